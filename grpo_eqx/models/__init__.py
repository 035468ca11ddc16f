"""Language models, read from and written to Hugging Face folders."""

from grpo_eqx.models.base import CausalLM as CausalLM
from grpo_eqx.models.base import ModelConfig as ModelConfig
from grpo_eqx.models.base import PromptCache as PromptCache
from grpo_eqx.models.causal_attention import Visible as Visible
from grpo_eqx.models.pretrained import from_pretrained as from_pretrained
from grpo_eqx.models.pretrained import model_folder as model_folder
from grpo_eqx.models.pretrained import save_pretrained as save_pretrained
from grpo_eqx.models.qwen2 import Qwen2 as Qwen2
from grpo_eqx.models.qwen2_config import Qwen2Config as Qwen2Config
