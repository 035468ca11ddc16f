"""Loss backends: per-token log-probs and entropies from hidden states and the head."""

from grpo_eqx.loss_backends.base import LossBackend as LossBackend
from grpo_eqx.loss_backends.base import TokenStats as TokenStats
from grpo_eqx.loss_backends.chunked import ChunkedLoss as ChunkedLoss
from grpo_eqx.loss_backends.dense import DenseLoss as DenseLoss
from grpo_eqx.loss_backends.logits import stats_of_logits as stats_of_logits
from grpo_eqx.loss_backends.pallas import PallasLoss as PallasLoss

LOSS_BACKENDS: dict[str, type[LossBackend]] = {
    "dense": DenseLoss,
    "chunked": ChunkedLoss,
    "pallas": PallasLoss,
}
"""Loss backends that a config can name; others are passed to `GRPOTrainer`, as objects."""
