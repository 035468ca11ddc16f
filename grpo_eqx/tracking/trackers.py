"""Trackers: one object per destination of metrics."""

import abc
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grpo_eqx.errors import UserError


class Tracker(abc.ABC):
    """Receiver of the metrics of every step and evaluation. Subclass it to send them elsewhere."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step`, counted from 1, or of an evaluation after it.

        An evaluation's names start with `eval/`; its step is 0 before the first.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Writes out what is still buffered; called once, also after a failure."""


class JsonlTracker(Tracker):
    """Tracker that writes a line of JSON per step or evaluation, with null for what is not finite.

    Every line is flushed at once, so that a killed run keeps its record. Lines that the file has
    already stay: a resumed run continues it.
    """

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


class WandbTracker(Tracker):
    """Tracker for a Weights & Biases run; `wandb` is imported and contacted only here."""

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
        """
        import wandb

        try:
            self._run = wandb.init(
                mode=mode, project=project, name=config["run_name"] or folder.name, dir=folder,
                config=dict(config), id=run_id, resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases did not start ({error}): run `wandb login`, or use --wandb "
                f"offline."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Weights & Biases drops what is older than its last step, such as a late evaluation.
        self._run.log(dict(metrics), step=max(step, self._run.step))

    def finish(self) -> None:
        self._run.finish()
