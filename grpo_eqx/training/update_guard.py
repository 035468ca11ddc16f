"""Ends a run whose updates are no longer finite."""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

from grpo_eqx.errors import RunError
from grpo_eqx.training.programs import SKIPPED


class UpdateGuard:
    """Count of the updates in a row that were skipped, because they were not finite."""

    def __init__(self, most: int, last_checkpoint: Callable[[], str]):
        """**Arguments:** the number of skipped updates in a row that a run survives; describes the
        last checkpoint in a sentence.
        """
        self.most = most
        self.last_checkpoint = last_checkpoint
        self.in_a_row = 0

    def after_step(self, updates: Sequence[Mapping[str, SupportsFloat]]) -> int:
        """Notes the metrics of a step's updates; returns how many of them were skipped.

        Raises `RunError` where more updates in a row were skipped than a run survives.
        """
        skipped = [float(update[SKIPPED]) > 0 for update in updates]
        for one in skipped:
            self.in_a_row = self.in_a_row + 1 if one else 0
            if self.in_a_row > self.most:
                raise RunError(
                    f"the loss or its gradient was not finite in {self.in_a_row} updates in a row, "
                    f"which were not applied (max_skipped_updates is {self.most}): look for "
                    f"extreme rewards, or try a lower learning_rate or max_grad_norm. "
                    f"{self.last_checkpoint()}"
                )
        return sum(skipped)
