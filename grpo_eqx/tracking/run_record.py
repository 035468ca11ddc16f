"""All records of a run, behind one object."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from grpo_eqx.config import GRPOConfig
from grpo_eqx.data.run_inputs import hub_commits
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.errors import RunError
from grpo_eqx.rewards.overlong import SOFT_OVERLONG
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.console import TrainingDisplay
from grpo_eqx.tracking.plots.learning_curve import plot_learning_curve
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.tracking.trackers import JsonlTracker, Tracker, WandbTracker

_MANY_CLIPPED = 0.5
_SHARE_OF_PLOTS = 0.01
"""Share of the time that drawing the learning curve may take before the run ends."""
_FIRST_PLOT_S = 20.0
_EQUAL = 1e-6
"""Standard deviation over mean, up to which rewards are equal but for rounding."""


class RunRecord:
    """Record of a run: its folder, trackers, display and learning curve."""

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
        self._plot_due = time.monotonic() + _FIRST_PLOT_S

    def __enter__(self) -> "RunRecord":
        raise_on_all_hosts(self._open)
        return self

    def _open(self) -> None:
        if self.only_history:
            return
        cfg = self.cfg
        kept = self.folder.start(
            cfg, dataclasses.asdict(self.layout), hub_commits(cfg),
            self._resumed_after, continued=self._continued,
        )  # fmt: skip
        self._trackers = [*self._own_trackers(), *self._extra_trackers]
        self._display.__enter__()
        if kept is not None:
            self.note(f"an earlier run in {self.folder.path} is kept in {kept}")

    def _own_trackers(self) -> list[Tracker]:
        """Opens the trackers that the settings name."""
        cfg, metrics = self.cfg, JsonlTracker(self.folder.metrics)
        if cfg.wandb == "disabled":
            return [metrics]
        assert cfg.wandb_project is not None  # resolved
        fields = dataclasses.asdict(cfg) | {
            "layout": dataclasses.asdict(self.layout),
            "hub_commits": hub_commits(cfg),
        }
        run_id = self.folder.run_id()
        wandb = WandbTracker(cfg.wandb, cfg.wandb_project, fields, self.folder.path, run_id)
        return [metrics, wandb]

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
            trackers, self._trackers = self._trackers, []
            for tracker in trackers:
                tracker.finish()
            if self.history and plots:
                self._plot()

    def _plot(self) -> None:
        """Draws the learning curve, and decides when the next is due."""
        started = time.monotonic()
        title = f"GRPO: {self.cfg.model} on {self.cfg.data}"
        first = 1 if self._continued else self._resumed_after + 1
        plot_learning_curve(self.history, title, self.folder.learning_curve, first)
        ended = time.monotonic()
        self._plot_due = ended + (ended - started) / _SHARE_OF_PLOTS

    def note(self, text: str) -> None:
        """Shows the user a message, from one process only."""
        if not self.only_history:
            self._display.note(text)

    @phase("record")
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step`, counted from 1."""
        self.history.append({"step": float(step), **metrics})
        if self.only_history:
            return
        with self.folder.writing():
            for tracker in self._trackers:
                tracker.log(step, metrics)
            if time.monotonic() > self._plot_due:
                self._plot()
        self._display.step(step, metrics)
        for subject, text in self._warnings(step, metrics):
            self._warn_once(subject, text)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the model after `step` steps, unless it is recorded already.

        After the run's end, trackers that were passed do not get it: they have finished. Where it
        cannot be written, a warning says so.
        """
        if self.only_history:
            return
        try:
            with self.folder.writing():
                if self.folder.has(step, metrics):
                    return
                trackers = self._trackers or self._own_trackers()
                for tracker in trackers:
                    tracker.log(step, metrics)
                    if not self._trackers:
                        tracker.finish()
        except RunError as error:
            self._warn_once("evaluation", f"an evaluation is not recorded: {error}")

    def _warnings(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with a step: a subject, to warn of once, and the words."""
        clipped = metrics["completions/clipped_ratio"]
        if clipped > _MANY_CLIPPED:
            yield (
                "clipped",
                f"{clipped:.0%} of the completions were cut off at max_completion_length "
                f"({self.cfg.max_completion_length}) before they ended; consider raising it.",
            )
        if math.isnan(metrics["reward"]):
            yield (
                "reward", f"no completion had a reward, so step {step} has trained nothing."
            )  # fmt: skip
            return
        if not math.isfinite(metrics["reward_std"]):
            yield (
                "reward_std", f"the rewards of step {step} are too large for float32: scale them."
            )  # fmt: skip
        largest_std = 0.0
        for name, mean in metrics.items():
            func = name.removeprefix("rewards/").removesuffix("/mean")
            if name != f"rewards/{func}/mean" or func == SOFT_OVERLONG:
                continue
            if math.isnan(mean):
                yield (
                    name,
                    f"reward function {func} returned None for all completions of step {step}.",
                )
            elif metrics[f"rewards/{func}/std"] <= _EQUAL * abs(mean):
                yield (
                    name,
                    f"reward function {func} returned {mean:g} for all completions of step {step} "
                    f"that it scored: from equal rewards nothing is learned.",
                )
            else:
                largest_std = max(largest_std, metrics[f"rewards/{func}/std"])
        sums = self.cfg.multi_objective_aggregation == "sum_then_normalize"
        if sums and largest_std > 0 and metrics["reward_std"] <= _EQUAL * largest_std:
            yield (
                "reward_std",
                f"the weighted rewards of step {step} add up to {metrics['reward']:g} for all "
                f"completions: from equal rewards nothing is learned.",
            )

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self.note(f"warning: {text}")

    def wants_completions(self, step: int) -> bool:
        """Returns whether to write the completions of `step`, counted from 1."""
        every = self.cfg.log_completions_steps
        return not self.only_history and every > 0 and (step == 1 or step % every == 0)
