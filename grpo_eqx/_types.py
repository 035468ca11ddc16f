"""Shape aliases and config choices, used in signatures throughout the package.

A dim's name means the same everywhere:

- `P`: prompts in a batch, `G`: completions of one prompt (its group);
- `Tp`, `Tc`: prompt and completion length in tokens, including padding;
- `N`, `K`: query heads and key/value heads, `D`: head size;
- `L`: layers, `H`: hidden size, `V`: vocabulary size.
"""

from typing import Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

PromptIds = Int[jax.Array | np.ndarray, "P Tp"]
PromptMask = Bool[jax.Array | np.ndarray, "P Tp"]
TokenFloats = Float[jax.Array | np.ndarray, "P G Tc"]
GroupFloats = Float[jax.Array | np.ndarray, "P G"]

Remat = Literal["none", "dots", "full"]
"""Values that a layer keeps for the backward pass: all, its matrix products, or only its input."""

AdvantageEstimator = Literal[
    "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjectiveAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
CLIPPED_LOSSES: tuple[LossType, ...] = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Losses with PPO's clipped objective; they differ in how tokens are aggregated."""
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
KLEstimator = Literal["k1", "k2", "k3"]
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
