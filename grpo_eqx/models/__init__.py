"""Language models, read from and written to Hugging Face folders."""

from grpo_eqx.models.architecture import Architecture as Architecture
from grpo_eqx.models.architecture import LayerKind as LayerKind
from grpo_eqx.models.base import CausalLM as CausalLM
from grpo_eqx.models.base import ModelConfig as ModelConfig
from grpo_eqx.models.base import PromptCache as PromptCache
from grpo_eqx.models.causal_attention import Visible as Visible
from grpo_eqx.models.decoder import Decoder as Decoder
from grpo_eqx.models.decoder_config import DecoderConfig as DecoderConfig
from grpo_eqx.models.decoder_config import FileFormat as FileFormat
from grpo_eqx.models.decoder_config import layer_kinds as layer_kinds
from grpo_eqx.models.families.gemma2 import Gemma2Config as Gemma2Config
from grpo_eqx.models.families.gemma3 import Gemma3Config as Gemma3Config
from grpo_eqx.models.families.llama import LlamaConfig as LlamaConfig
from grpo_eqx.models.families.mistral import MistralConfig as MistralConfig
from grpo_eqx.models.families.qwen2 import Qwen2 as Qwen2
from grpo_eqx.models.families.qwen2 import Qwen2Config as Qwen2Config
from grpo_eqx.models.families.qwen3 import Qwen3Config as Qwen3Config
from grpo_eqx.models.lora import Lora as Lora
from grpo_eqx.models.lora import with_adapters as with_adapters
from grpo_eqx.models.pretrained import from_pretrained as from_pretrained
from grpo_eqx.models.pretrained import model_folder as model_folder
from grpo_eqx.models.pretrained import save_pretrained as save_pretrained
from grpo_eqx.models.registry import register as register
from grpo_eqx.models.rotary import Rope as Rope
from grpo_eqx.models.rotary import RopeScaling as RopeScaling
