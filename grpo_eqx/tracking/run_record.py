"""All records of a run, behind one object."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import TracebackType

from grpo_eqx.config import GRPOConfig
from grpo_eqx.data.run_inputs import hub_commits
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.errors import RunError
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.console import TrainingDisplay
from grpo_eqx.tracking.learning_curve import plot_learning_curve
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.trackers import JsonlTracker, Tracker, WandbTracker

_MANY_CLIPPED = 0.5


class RunRecord:
    """Record of a run: its folder, trackers and display, and at the end its learning curve."""

    def __init__(
        self,
        cfg: GRPOConfig,
        layout: LayoutReport,
        trackers: Sequence[Tracker] = (),
        *,
        only_history: bool = False,
        step: int = 0,
        continued: bool = False,
    ):
        """**Arguments:** the run's settings; its layout on devices; trackers besides the folder's;
        whether to write and show nothing, because another process does; the step after which the
        run is resumed, 0 for a new run; whether the run in the folder is the one that is resumed.
        """
        assert cfg.output_dir is not None  # resolved
        self.cfg = cfg
        self.layout = layout
        self.only_history = only_history
        self.folder = RunFolder(cfg.output_dir)
        self.history: list[Mapping[str, float]] = []
        if continued:
            self.history += self.folder.history(step)
        self._resumed_after, self._continued = step, continued
        self._extra_trackers = trackers
        self._trackers: list[Tracker] = []
        self._display = TrainingDisplay(cfg.steps, done=step)
        self._warned: set[str] = set()

    def __enter__(self) -> "RunRecord":
        raise_on_all_hosts(self._open)
        return self

    def _open(self) -> None:
        if self.only_history:
            return
        cfg = self.cfg
        kept = self.folder.start(cfg, self.layout, self._resumed_after, continued=self._continued)
        self._trackers = [JsonlTracker(self.folder.metrics), *self._extra_trackers]
        if cfg.wandb != "disabled":
            assert cfg.wandb_project is not None  # resolved
            fields = dataclasses.asdict(cfg) | {
                "layout": dataclasses.asdict(self.layout),
                "hub_commits": hub_commits(cfg),
            }
            self._trackers.append(
                WandbTracker(
                    cfg.wandb, cfg.wandb_project, fields, self.folder.path, self.folder.run_id()
                )
            )
        self._display.__enter__()
        if kept is not None:
            self.note(f"an earlier run in {self.folder.path} is kept in {kept}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.only_history:
            return
        self._display.__exit__(kind, error, trace)
        # A record that cannot be written must not hide why the run ends.
        with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
            # A process that was asked to end has seconds, and a plot takes some.
            in_haste = kind is not None and issubclass(kind, SystemExit)
            self._finish(plots=not in_haste)

    def _finish(self, *, plots: bool) -> None:
        with self.folder.writing():
            for tracker in self._trackers:
                tracker.finish()
            if self.history and plots:
                title = f"GRPO: {self.cfg.model} on {self.cfg.data}"
                first = 1 if self._continued else self._resumed_after + 1
                plot_learning_curve(self.history, title, self.folder.learning_curve, first)

    def note(self, text: str) -> None:
        """Shows the user a message, from one process only."""
        if not self.only_history:
            self._display.note(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step`, counted from 1."""
        self.history.append(metrics)
        if self.only_history:
            return
        with self.folder.writing():
            for tracker in self._trackers:
                tracker.log(step, metrics)
        self._display.step(step, metrics)
        clipped = metrics["completions/clipped_ratio"]
        if clipped > _MANY_CLIPPED:
            self._warn_once(
                "clipped",
                f"{clipped:.0%} of the completions were cut off at max_completion_length "
                f"({self.cfg.max_completion_length}) before their answer; consider raising it.",
            )
        if math.isnan(metrics["reward"]):
            self._warn_once(
                "reward", f"no completion had a reward, so step {step} has trained nothing."
            )

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self.note(f"warning: {text}")

    def wants_completions(self, step: int) -> bool:
        """Returns whether to write the completions of `step`, counted from 1."""
        every = self.cfg.log_completions_steps
        return not self.only_history and every > 0 and (step == 1 or step % every == 0)
