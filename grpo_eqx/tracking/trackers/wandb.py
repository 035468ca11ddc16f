"""Weights & Biases."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.durations import TimeShare
from grpo_eqx.tracking.trackers.base import CompletionsTable, Tracker

_SHARE_OF_TABLES = 0.0005
"""Share of the run's time that tables may take. `wandb` takes 30 ms for 128 completions."""


class WandbTracker(Tracker):
    """Tracker for a Weights & Biases run; `wandb` is imported and contacted only here.

    If steps are short, it sends tables of completions for only some steps, among them the first and
    the last.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"],
        project: str,
        config: Mapping[str, Any],
        folder: Path,
        run_id: str,
    ):
        """**Arguments:**

        - `mode`, `project`: the settings `wandb` and `wandb_project`.
        - `config`: the run's settings; `run_name` is the run's name, by default the folder's name.
        - `folder`: the run's folder.
        - `run_id`: the id at Weights & Biases, which a resumed run keeps.

        Raises `UserError` if Weights & Biases does not start.
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
        """First step that Weights & Biases lacks; above 0 for a resumed run that is online."""
        self._tables = TimeShare(_SHARE_OF_TABLES)
        self._left_out: CompletionsTable | None = None  # table of the last step, if not sent

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        # An evaluation follows its step, which may be the last step that is online already.
        if step >= self._first_new_step - is_evaluation:
            # Weights & Biases drops metrics of steps before its last, such as a late evaluation.
            self._run.log(dict(metrics), step=max(step, self._run.step))

    def completions(self, step: int, table: CompletionsTable) -> None:
        if step < self._first_new_step:
            return
        self._left_out = table
        if self._tables.is_due():
            self._send_table(step)

    def _send_table(self, step: int) -> None:
        """Sends the last step's table, unless it was sent already."""
        table, self._left_out = self._left_out, None
        if table is None:
            return
        with self._tables.spent():
            columns = [[_finite_or_none(x) for x in column] for column in table.values()]
            # Columns that may lack values take Weights & Biases several times as long.
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
    """Returns a value that JSON can hold: missing rewards are NaN in tables."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
