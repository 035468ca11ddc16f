"""Dialogues with tools here and in TRL, with every chat template that TRL's package ships.

Prompts, what the model reads after its turns, the calls that it makes and the mask of the loss are
TRL's own, run on the same tokenizer with a model that writes scripted turns. Or the template is
refused, for a reason that is shown to be true.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_eqx import UserError
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.calls import Calls
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.dialogues import Dialogue, Dialogues, ToolLimits
from grpo_eqx.environments.tools import make_tools
from tests.parity.scripted_dialogues import CHANGED, SCRIPTS, TOOLS, Call, Message, Script, Turn

pytest.importorskip("torch")
trl = pytest.importorskip("trl.chat_template_utils")
GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
pytestmark = pytest.mark.parity

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<eos>", "<turn|>", "<|tool_response>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "muse": ("<|eot|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "": ("<|im_end|>", "<|endoftext|>"),
}
"""Ends of completions by the start of a template's name: the tokenizer's, and further ones of the
model's generation config."""
_SPECIAL = re.compile(r'<\|["\w]+\|?>|<\w+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>')
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def ends_of(name: str) -> tuple[str, ...]:
    return next(ENDS[key] for key in sorted(ENDS, reverse=True) if name.startswith(key))


@functools.cache
def byte_pairs() -> str:
    """A byte-level tokenizer with a few merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([source("qwen3"), source("llama3_1")], trainer)
    return str(tokenizer.to_str())


def tokenizer_with(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a template, and its special tokens."""
    text, (end, *further) = source(name), ends_of(name)
    base = Tokenizer.from_str(byte_pairs())
    base.add_tokens([AddedToken(t, normalized=False) for t in sorted({*_PLAIN.findall(text)})])
    special = sorted({*_SPECIAL.findall(text), *further})
    base.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token=end)
    tokenizer.chat_template = text
    return tokenizer


def ours(name: str) -> ChatFormat:
    tokenizer = tokenizer_with(name)
    return ChatFormat(ChatTokenizer(tokenizer, tokenizer.convert_tokens_to_ids([*ends_of(name)])))


def theirs(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer with the response template that TRL gives it.

    Raises `ValueError` if TRL has none.
    """
    tokenizer = tokenizer_with(name)
    if name.startswith("diffusion_gemma"):  # which writes calls as Gemma 4 does
        tokenizer.response_template = trl.gemma4_template
        return tokenizer
    # TRL knows the original by its text, and then puts the one for training in its place.
    tokenizer.chat_template = source(name.removesuffix("_training"))
    trl.add_response_schema(tokenizer)
    tokenizer.chat_template = source(name)
    return tokenizer


class Writer:
    """Writes turns in a template's form."""

    def __init__(self, tokenizer: Any, ends: Sequence[str]):
        self.tokenizer, self.ends = tokenizer, ends
        two = [Call("first", {}), Call("second", {})]
        self.most = None if "second" in self._rendered(Turn(calls=two), 2) else 1
        """Limit on the calls of a turn that the template writes."""
        text = self._rendered(Turn("So."), 1)
        self.end_of_text = next((end for end in ends if end in text), ends[1])

    def __call__(self, turn: Turn) -> str:
        """What the model would write for a turn, with its end token."""
        text = self._rendered(turn, self.most or len(turn.calls))
        last = max((text.rfind(end) + len(end) for end in self.ends if end in text), default=0)
        end = self.ends[-1] if turn.calls else self.ends[1]
        changed = turn.change(text[:last] if last else text + end)
        # A turn goes on until its end: ours would add one that is missing.
        return changed if changed.endswith(tuple(self.ends)) else changed + self.end_of_text

    def _rendered(self, turn: Turn, most: int) -> str:
        functions = [{"name": c.name, "arguments": c.arguments} for c in turn.calls[:most]]
        message: Message = {"role": "assistant", "content": turn.text}
        if functions:
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        if turn.thought:
            message |= {"reasoning_content": turn.thought, "thinking": turn.thought}
        user = {"role": "user", "content": "Find the word."}
        render = functools.partial(self.tokenizer.apply_chat_template, tokenize=False)
        try:
            whole = render([user, message])
        except Exception:
            if most < 2:
                raise
            return self._rendered(turn, 1)
        opened = render([user], add_generation_prompt=True)
        same = next(
            (i for i, (a, b) in enumerate(zip(whole, opened, strict=False)) if a != b), len(opened)
        )
        return str(whole[same:])


class Result(NamedTuple):
    """A dialogue that has ended."""

    prompt: list[int]
    ids: list[int]
    written: list[bool]
    messages: list[Message]


class Trl:
    """TRL's trainer, as far as its loop needs one; the model writes scripted turns."""

    def __init__(self, name: str):
        self._name = name
        self._tokenizer = self.processing_class = theirs(name)
        # The trainer puts another template in place of one that does not keep its prefix.
        self.chat_template = source("qwen3_training") if name == "qwen3" else None
        self.chat_template_kwargs = dict[str, Any]()
        self._is_vlm = self.use_vllm = False
        self.environment_factories = None
        self.max_tool_calling_iterations = self.max_completion_length = 10**9
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**9))

    def _get_tool_suffix_ids(self, messages: list[Message]) -> list[int]:
        """What TRL appends, but for two templates in which it leaves the template's form.

        It knows one end token alone, and cuts behind no other.
        """
        suffix: list[int] = GRPOTrainer._get_tool_suffix_ids(self, messages)
        if self._name == "glm4moe":
            # The model ends its calls with <|observation|>, which TRL appends again.
            (end,) = self._tokenizer.convert_tokens_to_ids(["<|observation|>"])
            assert suffix[0] == end
            return suffix[1:]
        if self._name == "gemma4_v2":
            # The template writes a line break behind the end of each turn.
            return [*self._tokenizer("\n", add_special_tokens=False)["input_ids"], *suffix]
        return suffix

    def _generate_single_turn(self, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [next(self._turns)], None

    def run(self, script: Script, turns: Sequence[list[int]]) -> Result:
        self.tools = list(script.tools)
        self._sync_tool_dicts = [{tool.__name__: bound(tool) for tool in script.tools}]
        self._async_tool_dicts = [dict[str, Any]()]
        self._turns = iter(turns)
        prompt = list(script.prompt)
        prompts, *_ = GRPOTrainer._tokenize_prompts(self, [prompt])
        ids = list(next(self._turns))
        parsed = trl.parse_response(self._tokenizer, ids, prefix=prompts[0], tools=self.tools)
        mask, completions, all_ids, *_ = GRPOTrainer._tool_call_loop(
            self, [prompt], prompts, [ids], [[parsed]], None, None, {}
        )
        return Result(prompts[0], all_ids[0], [bool(m) for m in mask[0]], completions[0])


def bound(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool that names wrong arguments as ours do, in the words of `inspect`."""

    def call(**arguments: Any) -> Any:
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise TypeError(f"{tool.__name__}() {error}") from None
        return tool(**arguments)

    return call


def run(chat: ChatFormat, calls: Calls, script: Script, turns: Sequence[list[int]]) -> Result:
    """Our own dialogue."""
    tools = {tool.name: tool for tool in make_tools(script.tools)}
    text = chat.tokenizer.template.render(
        list(script.prompt), tools=[tool.schema for tool in tools.values()]
    )
    prompt = chat.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    dialogue = Dialogue(tools)
    dialogues = Dialogues({0: dialogue}, (), chat, calls, ToolLimits())
    trajectory = Trajectory(prompt, Address(0, 0, 0))
    for ids in turns:
        trajectory = trajectory.extended(ids, np.zeros(len(ids)))
        dialogues.take(0, trajectory)
        ((_, reply),) = dialogues.replies(wait=True)
        if reply is None:
            break
        trajectory = trajectory.extended(reply)
    dialogue.finish(trajectory, chat)
    return Result(prompt, trajectory.ids.tolist(), trajectory.written.tolist(), dialogue.messages)


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    runner = Calls(timeout=20.0)
    yield runner
    runner.close()


DIALOGUE = (
    {"role": "user", "content": "Find it."},
    {
        "role": "assistant",
        "content": "Now.",
        "tool_calls": [
            {"type": "function", "function": {"name": "find", "arguments": {"word": "tree"}}}
        ],
    },
    {"role": "tool", "name": "find", "content": "There."},
)


def cannot_render(name: str) -> bool:
    user, turn, answer = DIALOGUE
    without_text = [user, {**turn, "content": ""}, answer]
    try:
        tokenizer_with(name).apply_chat_template(without_text, tokenize=False)
    except Exception:
        return True
    return False


def leaves_out_schemas(name: str) -> bool:
    render = functools.partial(tokenizer_with(name).apply_chat_template, tokenize=False)
    return bool(render(list(DIALOGUE[:1]), tools=list(TOOLS)) == render(list(DIALOGUE[:1])))


def leaves_out_calls(name: str) -> bool:
    render = functools.partial(tokenizer_with(name).apply_chat_template, tokenize=False)
    user, turn, _ = DIALOGUE
    return bool(render([user, turn]) == render([user, {"role": "assistant", "content": "Now."}]))


def rewrites_turns(name: str) -> bool:
    return not trl.is_chat_template_prefix_preserving(tokenizer_with(name))


def trl_has_no_parser(name: str) -> bool:
    try:
        theirs(name)
    except ValueError:
        return True
    return False


REASONS: dict[str, Callable[[str], bool]] = {
    "cannot render a dialogue with tools": cannot_render,
    "leaves out the schemas of tools": leaves_out_schemas,
    "leaves out the model's calls": leaves_out_calls,
    "otherwise once others follow it": rewrites_turns,
    "in a format that is unknown here": trl_has_no_parser,
}
"""Parts of our messages, and what shows that they are true."""
TAKEN = re.compile(
    r"diffusion_gemma|gemma4|glm4moe|gptoss|lfm2_2_5|lfm2_v2|llama3_[12]|nemotron_3"
    r"|qwen2_5(?!_vl)|qwen3"
)


class Misread(NamedTuple):
    """Turns that TRL misreads."""

    templates: str
    turns: str
    """A pattern of their texts."""
    is_call: bool
    """Whether such a turn calls what was meant; otherwise, it calls nothing."""


MISREAD = (
    # A thought that does not end holds no calls; TRL has it so for Qwen 3.5, but not for Nemotron.
    Misread("nemotron_3", r"\A(?!.*</think>)", False),
    # TRL reads LFM's lists of calls in Python with a pattern. It calls what was cut,
    Misread("lfm2", r"<\|tool_call_start\|>(?!.*<\|tool_call_end\|>)", False),
    # it has no escapes, which later templates write,
    Misread("lfm2_(v2|2_5_vl)", r"\\", True),
    # takes a list with True, False or None for a text,
    Misread("lfm2", r"=\[[^\]]*(True|False|None)", True),
    # and takes signs without escapes, which earlier templates write: no Python, so no call here.
    Misread(r"lfm2_2_5(_v2)?\Z", r"word='[^']*[\n\\]|[a-z]'[a-z]", False),
)


def misreads(name: str, text: str) -> list[Misread]:
    return [
        each
        for each in MISREAD
        if re.match(each.templates, name) and re.search(each.turns, text, flags=re.DOTALL)
    ]


def meant(name: str, script: Script, texts: Sequence[str], most: int | None) -> list[Any]:
    """What the model means to call in each turn, up to one without calls.

    **Arguments:**

    - `texts`: the turns in the template's form.
    - `most`: limit on the calls of a turn, in that form.
    """
    turns: list[Any] = []
    for turn, text in zip(script.turns, texts, strict=True):
        calls = [call._asdict() for call in turn.calls[:most]]
        if any(not each.is_call for each in misreads(name, text)):
            calls = []
        if "gemma4" in name and re.search(r"[:,\[]None[],}]", text):
            calls = []  # the template writes None, which is no value in Gemma's form
        turns.append(calls)
        if not calls:
            break
    return turns


def called(result: Result) -> list[Any]:
    return [
        [call["function"] for call in message.get("tool_calls", [])]
        for message in result.messages
        if message["role"] == "assistant"
    ]


def without_text_of_calls(result: Result) -> Result:
    """For GLM, whose calls end with a token that TRL reads as the text of the turn."""
    messages = [{**m, "content": ""} if m.get("tool_calls") else m for m in result.messages]
    return result._replace(messages=messages)


@pytest.mark.parametrize("name", NAMES)
def test_dialogues_are_those_of_trl_or_refused_for_a_true_reason(name: str, calls: Calls) -> None:
    try:
        chat = ours(name)
    except UserError as error:
        assert not TAKEN.match(name)
        (is_true,) = (is_true for part, is_true in REASONS.items() if part in str(error))
        assert is_true(name)
        return
    trainer, tokenizer = Trl(name), tokenizer_with(name)
    writer = Writer(tokenizer, ends_of(name))
    num_compared = 0
    for kind, script in SCRIPTS:
        texts = [writer(turn) for turn in script.turns]
        turns = tokenizer(texts, add_special_tokens=False)["input_ids"]
        result = run(chat, calls, script, turns)
        is_misread = any(misreads(name, text) for text in texts)
        if is_misread or kind not in CHANGED:
            assert called(result) == meant(name, script, texts, writer.most), kind
        if is_misread:
            continue
        expected = trainer.run(script, turns)
        if name.startswith("glm4moe"):
            result, expected = without_text_of_calls(result), without_text_of_calls(expected)
        if name == "qwen3" and any(m["role"] == "assistant" for m in script.prompt):
            # TRL's template writes thoughts, empty here, into the turns of a prompt, too.
            expected = expected._replace(prompt=result.prompt)
        assert result == expected, kind
        num_compared += 1
    assert num_compared >= {"lfm2": 24, "nemo": 28}.get(name[:4], len(SCRIPTS))


def test_there_are_thirty_dialogues() -> None:
    assert len(SCRIPTS) == 30


@pytest.mark.parametrize("name", ["gemma4_v2", "glm4moe", "glm4moe_training"])
def test_where_trl_leaves_the_form_of_a_template_it_is_kept_here(name: str) -> None:
    chat = ours(name)
    tokenizer, render = chat.tokenizer.tokenizer, chat.tokenizer.template.render
    user, turn, answer = DIALOGUE
    written = Writer(tokenizer, ends_of(name))(Turn("Now.", [Call("find", {"word": "tree"})]))
    suffix = tokenizer.decode(chat.suffix_ids([answer]))
    assert render([user]) + written + suffix == render(list(DIALOGUE))
    prompt, ids = tokenizer([render([user]), written], add_special_tokens=False)["input_ids"]
    assert chat.parse(ids, prompt, []).message == turn
