"""The device side of training: rows, scores and updates, and everything their arrays go through."""

from grpo_eqx.training.forward import Forward as Forward
from grpo_eqx.training.micro_batches import RowShape as RowShape
from grpo_eqx.training.optimizer import make_optimizer as make_optimizer
from grpo_eqx.training.options import UpdateOptions as UpdateOptions
from grpo_eqx.training.packing import Packing as Packing
from grpo_eqx.training.rows import Rows as Rows
from grpo_eqx.training.scorer import Scorer as Scorer
from grpo_eqx.training.scorer import TokenScores as TokenScores
from grpo_eqx.training.state import TrainState as TrainState
from grpo_eqx.training.updater import Updater as Updater
