"""GRPO's arithmetic: advantages from rewards, losses from log-probs."""

from grpo_eqx.objective.advantages import ScaleRewards as ScaleRewards
from grpo_eqx.objective.advantages import group_advantages as group_advantages
from grpo_eqx.objective.losses import TokenLoss as TokenLoss
from grpo_eqx.objective.losses import clipped_policy_loss as clipped_policy_loss
