"""The device side of training: the three programs, and everything their arrays go through."""

from grpo_eqx.training.batch import Batch as Batch
from grpo_eqx.training.optimizer import make_optimizer as make_optimizer
from grpo_eqx.training.packing import Packing as Packing
from grpo_eqx.training.programs import Programs as Programs
from grpo_eqx.training.programs import TokenScores as TokenScores
from grpo_eqx.training.row_shape import RowShape as RowShape
from grpo_eqx.training.state import TrainState as TrainState
