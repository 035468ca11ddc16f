"""Ends a run whose updates are no longer finite."""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

from grpo_eqx.common.errors import RunError
from grpo_eqx.training.updater import SKIPPED


def count_skipped(
    updates: Sequence[Mapping[str, SupportsFloat]],
    in_a_row: int,
    most: int,
    last_checkpoint: Callable[[], str],
) -> tuple[int, int]:
    """Counts the updates that were skipped, because they were not finite.

    **Arguments:**

    - `updates`: metrics of the updates of a step.
    - `in_a_row`: updates skipped in a row before.
    - `most`: skipped updates in a row that a run survives.
    - `last_checkpoint`: describes the last checkpoint in a sentence.

    **Returns:** how many of the step's updates were skipped; how many in a row by now. Raises
    `RunError` where these are more than a run survives.
    """
    skipped = [float(update[SKIPPED]) > 0 for update in updates]
    for one in skipped:
        in_a_row = in_a_row + 1 if one else 0
        if in_a_row > most:
            raise RunError(
                f"the loss or its gradient was not finite in {in_a_row} updates in a row, which "
                f"were not applied (max_skipped_updates is {most}): look for extreme rewards, or "
                f"try a lower learning_rate or max_grad_norm. {last_checkpoint()}"
            )
    return sum(skipped), in_a_row
