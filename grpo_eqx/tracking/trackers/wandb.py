"""Weights & Biases."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.time_share import TimeShare
from grpo_eqx.tracking.trackers.base import CompletionsTable, Tracker

_SHARE_OF_TABLES = 0.0005
"""Share of the time that tables may take: `wandb` needs 30 ms for one of 128 completions."""


class WandbTracker(Tracker):
    """Tracker for a Weights & Biases run; `wandb` is imported and contacted only here.

    Where steps are short, it gets the table of completions of some, the first and the last of them.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"],
        project: str,
        config: Mapping[str, Any],
        folder: Path,
        run_id: str,
    ):
        """**Arguments:** mode and project; the run's settings; its folder; its id at Weights &
        Biases, which a run that is resumed keeps. Its name is `run_name`, or that of the folder.

        Raises `UserError` where Weights & Biases does not start.
        """
        import wandb

        self._wandb = wandb
        try:
            self._run = wandb.init(
                mode=mode, project=project, name=config["run_name"] or folder.name, dir=folder,
                config=dict(config), id=run_id, resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases did not start ({error}): run `wandb login`, or set wandb to "
                f"offline."
            ) from error

        self._first_new_step = self._run.step
        """The first step that Weights & Biases lacks; more than 0 where it had this run online."""
        self._tables = TimeShare(_SHARE_OF_TABLES)
        self._left_out: CompletionsTable | None = None  # the last step's

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        # An evaluation comes after its step, which may be the last that is there already.
        if step >= self._first_new_step - is_evaluation:
            # Weights & Biases drops what is older than its last step, such as a late evaluation.
            self._run.log(dict(metrics), step=max(step, self._run.step))

    def completions(self, step: int, table: CompletionsTable) -> None:
        if step < self._first_new_step:
            return
        self._left_out = table
        if self._tables.is_due():
            self._send_table(step)

    def _send_table(self, step: int) -> None:
        """Sends the last step's table, unless it is there already."""
        table, self._left_out = self._left_out, None
        if table is None:
            return
        with self._tables.spent():
            columns = [[_finite_or_none(x) for x in column] for column in table.values()]
            # Columns that may lack a value take Weights & Biases several times as long.
            lacks_some = [any(x is None for x in column) for column in columns]
            rows = list(zip(*columns, strict=True))
            shown = self._wandb.Table(columns=list(table), data=rows, optional=lacks_some)
            self._run.log({"completions": shown}, step=step)  # TRL's name

    def finish(self) -> None:
        try:
            self._send_table(self._run.step)
        finally:
            self._run.finish()


def _finite_or_none(value: Any) -> Any:
    """Returns a value as JSON can hold it: a missing reward is NaN in tables."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
