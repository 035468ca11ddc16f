"""The architecture of a Qwen2 model, in Hugging Face's terms."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from grpo_eqx.errors import UserError
from grpo_eqx.models.base import ModelConfig
from grpo_eqx.models.config_fields import used_fields

_SIZES: dict[str, dict[str, Any]] = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                 num_attention_heads=12, num_key_value_heads=2),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
               num_attention_heads=16, num_key_value_heads=2),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
               num_attention_heads=28, num_key_value_heads=4,
               vocab_size=152064, tie_word_embeddings=False),
    "14B": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
                num_attention_heads=40, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
    "32B": dict(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                num_attention_heads=40, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
    "72B": dict(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
                num_attention_heads=64, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(ModelConfig):
    """Sizes and constants of a Qwen2 model; fields as in Hugging Face's `Qwen2Config`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    head_dim: int | None = None
    """Size of one head; `None` means `hidden_size // num_attention_heads`."""
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UserError(
                    f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}), or set head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_size % 2:
            raise UserError(f"head_dim ({self.head_dim}) must be even for rotary embeddings.")

    @property
    def head_size(self) -> int:
        """Resolved `head_dim`."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Number of parameters in all layers' matrices; biases and norms are too few to count."""
        queries = self.num_attention_heads * self.head_size
        keys = self.num_key_value_heads * self.head_size
        attention = 2 * self.hidden_size * (queries + keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * (attention + mlp)

    @classmethod
    def from_name(cls, name: str) -> "Qwen2Config":
        """Returns the architecture of a Qwen2.5 model by its name, without network access.

        `name` is a size ("3B") or a hub name ("Qwen/Qwen2.5-3B-Instruct"). The constants are
        those of the Instruct models' `config.json`. Raises `UserError` for an unknown name.
        """
        size = name.rsplit("/", 1)[-1].removeprefix("Qwen2.5-").removesuffix("-Instruct")
        if size not in _SIZES:
            raise UserError(f"no Qwen2.5 size named {name!r}; known sizes: {', '.join(_SIZES)}.")
        return cls(**_SIZES[size])

    @classmethod
    def from_json(cls, path: str | Path) -> "Qwen2Config":
        """Reads a Hugging Face `config.json`.

        Raises `UserError` for a field that asks for something unsupported, such as scaled rotary
        positions, and for a value of the wrong type. Warns about unknown fields.
        """
        try:
            fields = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a readable config.json: {error}.") from error
        if not isinstance(fields, dict):
            raise UserError(f"{path} is not a readable config.json: it is not a JSON object.")
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        # Defaults of absent fields are the same as in Hugging Face, except for this one.
        values = {"tie_word_embeddings": False, **used_fields(fields, kinds, path)}
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise UserError(f"{path} lacks the field {field.name}.")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of a `config.json` that Hugging Face transformers (4 and 5) reads."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "use_sliding_window": False,
            **dataclasses.asdict(self),
        }
