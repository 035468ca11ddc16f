"""All trackers of a run, behind one object."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import first_line
from grpo_eqx.data.run_inputs import hub_commits
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.trackers import (
    CompletionsTable,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)


class RunTrackers:
    """Trackers of a run: `metrics.jsonl`, the trackers that its settings name, and passed trackers.

    An error of `metrics.jsonl` ends the run; errors of the other trackers become warnings.
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
        """**Arguments:**

        - `cfg`, `layout`, `folder`: the run's settings, layout and folder.
        - `passed`: trackers that were passed to the trainer.
        - `warn`: called with warnings.
        - `replaced`: descriptions of objects passed in place of settings.
        - `step`: the step after which the run goes on.
        - `started`: whether the run has started before. If so, a tracker that cannot be opened is
          a warning, and the run goes on without it. If not, its error is raised, because the user
          can still change the settings.
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
        """Returns functions that make the trackers named in the settings."""
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
        """Finishes all trackers."""
        for tracker in (*self._others, self._own):
            tracker.finish()


class GuardedTracker(Tracker):
    """Tracker around another, whose first error is a warning and whose later errors are ignored.

    The other tracker is called again at every step: networks come back, and disks are emptied.
    Exceptions that are not errors, such as `KeyboardInterrupt`, pass.
    """

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]):
        """**Arguments:**

        - `tracker`: the other tracker.
        - `warn`: called with the warning.
        """
        self._tracker = tracker
        self._warn = warn
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(f"at step {step}", lambda: self._tracker.log(step, metrics))

    def completions(self, step: int, table: CompletionsTable) -> None:
        self._attempt(f"at step {step}", lambda: self._tracker.completions(step, table))

    def finish(self) -> None:
        self._attempt("when the run ended", self._tracker.finish)

    def _attempt(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a tracker's errors are of any class
            if self._failed:
                return
            self._failed = True
            self._warn(
                f"tracker {type(self._tracker).__name__} failed {when} ({failure(error)}): the run "
                f"goes on, and metrics.jsonl has what it misses."
            )


def failure(error: Exception) -> str:
    """Describes an error in a line."""
    return f"{type(error).__name__}: {first_line(error)}"
