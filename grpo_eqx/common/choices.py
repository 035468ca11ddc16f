"""Values that settings and flags choose among. Imports nothing, so that help is shown at once."""

from typing import Literal

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
SamplerCorrection = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "coupled", "none"
]
SAMPLER_WEIGHTS: tuple[SamplerCorrection, ...] = (
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
)  # fmt: skip
"""Corrections that weight tokens: the decoupled ones."""

LearningRateCourse = Literal["constant", "linear", "cosine"]

Searchable = Literal[
    "micro_batch_size_per_device", "num_generations", "max_completion_length", "prompts_per_step"
]
"""Settings that memory grows with."""
RolloutShardingName = Literal[
    "auto", "replicated", "tensor:2", "tensor:4", "tensor:8", "tensor:16", "legacy", "maxtext"
]
"""Layouts of a rollout over devices, for any mesh of training."""
ALL_LINEAR = "all-linear"
"""Name for all linear maps in the layers, as targets of LoRA."""
LOCAL = "local"
"""Name for the devices of this machine, in place of a described slice."""
SOFT_OVERLONG = "soft_overlong"
"""Name under which DAPO's soft overlong penalty is logged."""
TRACKERS = "wandb", "tensorboard"
"""Trackers that `report_to` can name."""
