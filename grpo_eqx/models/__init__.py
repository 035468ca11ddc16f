"""Language models, read from and written to Hugging Face folders."""

from grpo_eqx.models.base import CausalLM as CausalLM
from grpo_eqx.models.base import ModelConfig as ModelConfig
from grpo_eqx.models.base import PromptCache as PromptCache
from grpo_eqx.models.causal_attention import Visible as Visible
from grpo_eqx.models.decoder import Decoder as Decoder
from grpo_eqx.models.families.gemma2 import Gemma2Config as Gemma2Config
from grpo_eqx.models.families.gemma3 import Gemma3Config as Gemma3Config
from grpo_eqx.models.families.llama import LlamaConfig as LlamaConfig
from grpo_eqx.models.families.mistral import MistralConfig as MistralConfig
from grpo_eqx.models.families.qwen2 import Qwen2 as Qwen2
from grpo_eqx.models.families.qwen2 import Qwen2Config as Qwen2Config
from grpo_eqx.models.families.qwen3 import Qwen3Config as Qwen3Config
from grpo_eqx.models.families.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from grpo_eqx.models.pretrained import from_pretrained as from_pretrained
from grpo_eqx.models.pretrained import model_folder as model_folder
from grpo_eqx.models.pretrained import save_pretrained as save_pretrained
from grpo_eqx.models.registry import register as register
