"""All trackers of a run, behind one object."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_eqx.data.run_inputs import hub_commits
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.trackers import (
    CompletionsTable,
    GuardedTracker,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from grpo_eqx.tracking.trackers.guarded import failure


class RunTrackers:
    """Trackers of a run: `metrics.jsonl`, those that its settings name, and those that were passed.

    What the first raises is raised; errors of the others are warnings.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        layout: LayoutReport,
        folder: RunFolder,
        passed: Sequence[Tracker],
        warn: Callable[[str], None],
        *,
        replaced: Mapping[str, Any],
        step: int,
        started: bool,
    ):
        """**Arguments:** the run's settings, layout and folder; trackers that were passed; called
        with warnings; what was passed in place of settings; the step after which the run goes on;
        whether it has started before: then, a tracker that cannot be opened is a warning too, and
        the run goes on without it. Otherwise its error is raised, as the user may still change the
        settings.
        """
        self._cfg, self._layout, self._folder = cfg, layout, folder
        self._replaced = replaced
        named: list[Tracker] = []
        for name, make in self._makers(step).items():
            try:
                named.append(make())
            except Exception as error:
                if not started:
                    for tracker in named:
                        tracker.finish()
                    raise
                warn(
                    f"{name} could not be opened ({failure(error)}): the run goes on without it, "
                    f"and metrics.jsonl has what it misses."
                )
        self._others = [GuardedTracker(tracker, warn) for tracker in (*named, *passed)]
        self._own = JsonlTracker(folder.metrics)

    def _makers(self, step: int) -> Mapping[str, Callable[[], Tracker]]:
        """Returns what makes the trackers that the settings name."""
        makers: dict[str, Callable[[], Tracker]] = {}
        if self._cfg.wandb in ("online", "offline"):
            makers["Weights & Biases"] = self._wandb
        if "tensorboard" in self._cfg.report_to:
            makers["TensorBoard"] = lambda: TensorBoardTracker(self._folder.tensorboard, step)
        return makers

    def _wandb(self) -> Tracker:
        cfg = self._cfg
        assert cfg.wandb in ("online", "offline")
        assert cfg.wandb_project is not None  # resolved
        fields = {
            **dataclasses.asdict(cfg),
            **self._replaced,
            "layout": dataclasses.asdict(self._layout),
            "hub_commits": hub_commits(cfg),
        }
        folder = self._folder
        return WandbTracker(cfg.wandb, cfg.wandb_project, fields, folder.path, folder.run_id())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step or evaluation."""
        for tracker in (self._own, *self._others):
            tracker.log(step, metrics)

    def completions(self, step: int, table: CompletionsTable) -> None:
        """Shows the completions of a step."""
        for tracker in self._others:
            tracker.completions(step, table)

    def sync(self) -> None:
        """Waits until the lines of `metrics.jsonl` are on the disk."""
        self._own.sync()

    def finish(self) -> None:
        """Finishes all."""
        for tracker in (*self._others, self._own):
            tracker.finish()
