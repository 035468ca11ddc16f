"""Declared differences between families: the architecture of a decoder beyond its sizes."""

import dataclasses
from typing import Literal

import numpy as np

from grpo_eqx.models.rotary import Rope

Activation = Literal["silu", "gelu_tanh"]
QKV = frozenset({"q_proj", "k_proj", "v_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Attention of a layer."""

    rope: Rope
    window: int | None = None
    """Number of positions that a query sees, its own included; `None`: all before it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """Experts of every layer, of which each token uses a few in place of one MLP."""

    number: int
    per_token: int
    """Number of experts that a token uses."""
    intermediate_size: int
    """Size of an expert's gate."""
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""

    @property
    def dtype(self) -> np.dtype:
        """Smallest integer dtype that counts the experts, from 0."""
        return np.min_scalar_type(self.number - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Differences between decoders of pre-normalized layers with gated MLPs and rotary positions.

    The defaults are those of Llama.
    """

    layers: tuple[LayerKind, ...]
    """Kind of each layer."""
    biased: frozenset[str] = frozenset()
    """Linear maps with a bias, such as `q_proj`."""
    head_norms: bool = False
    """Whether each head's queries and keys are RMS-normalized, before they are rotated."""
    output_norms: bool = False
    """Whether what attention and the MLP add to the residual stream is RMS-normalized too."""
    norm_offset: float = 0.0
    """Number that is added to the scale of every RMSNorm."""
    activation: Activation = "silu"
    """Activation of the MLP's gate."""
    experts: ExpertsShape | None = None
    """Experts in place of the MLP of every layer."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    score_scale: float | None = None
    """Factor of attention scores; `None`: one over the root of the head size."""
    score_softcap: float | None = None
    """Bound `c` of attention scores, `c tanh(score / c)`; `None`: unbounded."""
    logit_softcap: float | None = None
    """Bound of the logits, likewise."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layers, in order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer."""
        return tuple(kind.window for kind in self.layers)
