"""Options of an update."""

import dataclasses
from typing import NamedTuple

from grpo_eqx.common.shapes import Number
from grpo_eqx.objective import Objective
from grpo_eqx.training.optimizer import OptimizerNumbers


class UpdateNumbers(NamedTuple):
    """Numbers that `update` takes as data: others compile nothing again."""

    temperature: Number
    objective: Objective
    left_out: Number | None
    """Share of the tokens, those with the lowest entropy, that the policy term leaves out."""
    optimizer: OptimizerNumbers | None
    """`None` for an optimizer that was passed, whose numbers are constants of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of `Updater`, besides the strategies of its forward pass."""

    temperature: float
    """Divisor of the logits in training, which is that of sampling."""
    objective: Objective
    optimizer: OptimizerNumbers | None = None
    """Numbers of the optimizer. `None`: it has constants of its own."""
    top_entropy_quantile: float = 1.0

    @property
    def numbers(self) -> UpdateNumbers:
        """Numbers that `update` takes as data."""
        keeps_all = self.top_entropy_quantile == 1
        left_out = None if keeps_all else 1 - self.top_entropy_quantile
        return UpdateNumbers(self.temperature, self.objective, left_out, self.optimizer)
