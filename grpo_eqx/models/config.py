"""Sizes of a model, which training, generation and planning require of every family."""

import abc
from pathlib import Path
from typing import Any

import jax

from grpo_eqx.models.architecture import ExpertsShape


class ModelConfig(abc.ABC):
    """Sizes of a decoder, under Hugging Face's names.

    A family's config is a frozen dataclass with at least these fields.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    @abc.abstractmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Reads a Hugging Face `config.json`; raises `UserError` for unsupported settings."""

    @classmethod
    def published(cls, name: str) -> "ModelConfig | None":
        """Returns the config of a published model by its hub name, if it is known."""
        return None

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns the fields of a `config.json` that Hugging Face transformers reads."""

    @property
    @abc.abstractmethod
    def head_size(self) -> int:
        """Size of one attention head."""

    @property
    @abc.abstractmethod
    def num_layer_parameters(self) -> int:
        """Number of parameters in all layers' matrices; biases and norms are too few to count."""

    @property
    def num_active_parameters(self) -> int:
        """Number of them in the matrices that a token passes through: of experts, those it uses."""
        return self.num_layer_parameters

    @property
    @abc.abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """Number of positions that a query sees in each layer, its own included; `None`: all."""

    @property
    @abc.abstractmethod
    def logit_softcap(self) -> float | None:
        """Bound `c` of the logits, which are `c tanh(product / c)`; `None`: they are products."""

    @property
    def experts(self) -> ExpertsShape | None:
        """Experts of every layer; `None`: the layers have none."""
        return None

    @property
    def routes(self) -> jax.ShapeDtypeStruct | None:
        """Shape `[Lk]` of a token's routes: the `k` experts that it uses in each layer in turn.

        They are one dimension, as TPUs would pad the last two. `None` for layers without experts.
        """
        if self.experts is None:
            return None
        size = self.num_hidden_layers * self.experts.per_token
        return jax.ShapeDtypeStruct((size,), self.experts.dtype)

    @property
    def num_head_parameters(self) -> int:
        """Number of parameters in the language-model head; an embedding lookup is not a product."""
        return self.vocab_size * self.hidden_size
