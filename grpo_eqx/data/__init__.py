"""Sources of prompts, and the tokenizer that encodes them."""

from grpo_eqx.data.jsonl import read_jsonl as read_jsonl
from grpo_eqx.data.load import load_data as load_data
from grpo_eqx.data.prompts import Prompt as Prompt
from grpo_eqx.data.prompts import PromptSource as PromptSource
from grpo_eqx.data.records import Records as Records
from grpo_eqx.data.tokenizer import ChatTokenizer as ChatTokenizer
from grpo_eqx.data.word_problems import WordProblem as WordProblem
from grpo_eqx.data.word_problems import WordProblems as WordProblems
