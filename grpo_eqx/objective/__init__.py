"""GRPO's arithmetic: advantages from rewards, losses from log-probs."""

from grpo_eqx.objective.advantages import all_equal as all_equal
from grpo_eqx.objective.advantages import compute_advantages as compute_advantages
from grpo_eqx.objective.advantages import informative_groups as informative_groups
from grpo_eqx.objective.aggregation import Totals as Totals
from grpo_eqx.objective.aggregation import token_weights as token_weights
from grpo_eqx.objective.high_entropy import entropy_floor as entropy_floor
from grpo_eqx.objective.kl import kl_estimates as kl_estimates
from grpo_eqx.objective.metrics import Metrics as Metrics
from grpo_eqx.objective.objective import Objective as Objective
from grpo_eqx.objective.objective import TokenBatch as TokenBatch
