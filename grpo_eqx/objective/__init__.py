"""GRPO's arithmetic: advantages from rewards, losses from log-probs."""

from grpo_eqx.objective.advantages import compute_advantages as compute_advantages
from grpo_eqx.objective.advantages import informative_groups as informative_groups
from grpo_eqx.objective.aggregation import Totals as Totals
from grpo_eqx.objective.aggregation import token_weights as token_weights
from grpo_eqx.objective.kl import kl_estimates as kl_estimates
from grpo_eqx.objective.metrics import Metrics as Metrics
from grpo_eqx.objective.objective import Objective as Objective
from grpo_eqx.objective.objective import TokenBatch as TokenBatch
from grpo_eqx.objective.policy_loss import PolicyLoss as PolicyLoss
from grpo_eqx.objective.policy_loss import cispo_loss as cispo_loss
from grpo_eqx.objective.policy_loss import clipped_loss as clipped_loss
from grpo_eqx.objective.policy_loss import sapo_loss as sapo_loss
from grpo_eqx.objective.ratios import off_policy_keep as off_policy_keep
from grpo_eqx.objective.ratios import policy_ratios as policy_ratios
from grpo_eqx.objective.ratios import sampler_weights as sampler_weights
