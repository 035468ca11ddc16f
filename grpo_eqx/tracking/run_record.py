"""All records of a run behind one object: folder, trackers, display and learning curve."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_eqx.common.durable import sync, write_durably
from grpo_eqx.common.errors import RunError, near
from grpo_eqx.data.run_inputs import hub_commits
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.completions_table import import_writers, write_completions
from grpo_eqx.tracking.diagnosis import Doctor, Finding
from grpo_eqx.tracking.durations import TimeShare
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.plots.learning_curve import plot_learning_curve
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.run_trackers import RunTrackers
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.tracking.trackers import Tracker
from grpo_eqx.tracking.training_display import TrainingDisplay

_SHARE_OF_PLOTS = 0.001
"""Share of the run's time that drawing the learning curve may take before the run ends."""
_FIRST_PLOT_S = 300.0


class RunRecord:
    """Record of a run: its folder, trackers, display and learning curve."""

    def __init__(
        self,
        cfg: GRPOConfig,
        layout: LayoutReport,
        trackers: Sequence[Tracker] = (),
        *,
        passed: Mapping[str, Any] | None = None,
        only_history: bool = False,
        step: int = 0,
        continued: bool = False,
    ):
        """**Arguments:**

        - `cfg`, `layout`: the run's settings, and its layout on devices.
        - `trackers`: trackers besides the ones that the settings name.
        - `passed`: descriptions of objects passed in place of settings, by setting.
        - `only_history`: whether to write and show nothing, because another process does.
        - `step`: the step after which the run is resumed; 0 for a new run.
        - `continued`: whether the run in the folder is the run that is resumed.
        """
        assert cfg.output_dir is not None  # resolved
        self.cfg = cfg
        self.layout = layout
        self.passed = passed or {}
        self.only_history = only_history
        self.folder = RunFolder(cfg.output_dir)
        self.history: list[Mapping[str, float]] = []
        self.evaluations: list[Mapping[str, float]] = []
        earlier = Metrics.read(self.folder.metrics, step if continued else 0)
        if continued:
            self.history += earlier.steps
            self.evaluations += earlier.evaluations
        self._resumed_after, self._continued = step, continued
        self._passed_trackers = trackers
        self._trackers: RunTrackers | None = None  # while the run goes on
        self._table_writer = ThreadPoolExecutor(1, thread_name_prefix="completions_table")
        self._table: Future[None] | None = None  # the table being written
        self._unsynced: list[Path] = []  # tables that may not be on the disk yet
        rewards = [metrics.get("reward", math.nan) for metrics in self.history]
        self._display = TrainingDisplay(cfg.steps, done=step, rewards=rewards)
        self._doctor = Doctor(
            {**dataclasses.asdict(cfg), **self.passed},
            earlier.rows if continued else (),
            num_devices=layout.devices,
        )
        self._warned = False
        self._plots = TimeShare(_SHARE_OF_PLOTS, first_after_s=_FIRST_PLOT_S)

    def __enter__(self) -> "RunRecord":
        raise_on_all_hosts(self._open)
        return self

    def _open(self) -> None:
        if self.only_history:
            return
        cfg = self.cfg
        notes = self.folder.start(
            dataclasses.asdict(cfg), dataclasses.asdict(self.layout), hub_commits(cfg),
            self._resumed_after, passed=self.passed, continued=self._continued,
        )  # fmt: skip
        self._trackers = self._open_trackers(
            self._resumed_after, self._passed_trackers, started=self._continued
        )
        if cfg.log_completions_steps:  # meanwhile, the first programs are compiled
            self._table_writer.submit(import_writers)
        self._display.__enter__()
        for note in notes:
            self.note(note)

    def _open_trackers(self, step: int, passed: Sequence[Tracker], *, started: bool) -> RunTrackers:
        def warn(text: str) -> None:
            self.note(f"warning: {text}")

        return RunTrackers(
            self.cfg, self.layout, self.folder, passed, warn,
            replaced=self.passed, step=step, started=started,
        )  # fmt: skip

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.only_history:
            return
        self._display.__exit__()
        self._table_writer.shutdown()  # Python must not exit during an import, or within a table
        # A failed write must not hide the error that ends the run.
        try:
            with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
                self.flush()
        finally:
            with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
                # A preempted process has only seconds left, and a plot takes some of them.
                in_haste = kind is not None and issubclass(kind, SystemExit)
                self._finish(plots=not in_haste)

    def _finish(self, *, plots: bool) -> None:
        with self.folder.writing():
            trackers, self._trackers = self._trackers, None
            if trackers is not None:
                trackers.finish()
            self._sync_tables()
            if self.history and plots:
                self._plot()

    def _plot(self) -> None:
        title = f"GRPO: {self.cfg.model} on {self.cfg.data}"
        first = 1 if self._continued else self._resumed_after + 1
        with self._plots.spent():
            plot_learning_curve(self.history, title, self.folder.learning_curve, first)

    def note(self, text: str) -> None:
        """Shows the user a message, from one process only."""
        if not self.only_history:
            self._display.note(near(text))

    @phase("record")
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step`, counted from 1."""
        self.history.append({"step": float(step), **metrics})
        if self.only_history:
            return
        assert self._trackers is not None  # entered
        self.flush()
        with self.folder.writing():
            self._trackers.log(step, metrics)
            if self._plots.is_due():
                self._plot()
        self._display.step(step, metrics)
        self._tell(self._doctor.step(self.history[-1]))

    def completions(
        self, columns: Mapping[str, Sequence[Any]], of_tokens: Mapping[str, Sequence[Any]]
    ) -> None:
        """Records a step's table of completions, which a thread writes while the run goes on.

        **Arguments:**

        - `columns`: columns with an entry for each completion.
        - `of_tokens`: more columns, with a list for each completion.

        Raises `RunError` if the previous table could not be written.
        """
        step = columns["step"][0]
        assert self._trackers is not None  # entered
        self.flush()
        path = self.folder.completions_of(step)
        # A copy, because trackers may change the columns meanwhile.
        table = {name: list(column) for name, column in columns.items()} | dict(of_tokens)
        self._trackers.completions(step, columns)
        if self.cfg.num_completions_to_print is not None:
            self._display.completions(columns, self.cfg.num_completions_to_print)
        # Last, because the thread that writes shares Python's interpreter with this one.
        self._table = self._table_writer.submit(write_completions, path, table)
        self._unsynced.append(path)

    def sync(self) -> None:
        """Waits until all records are on the disk; raises `RunError` if they cannot be written."""
        self.flush()
        if self._trackers is not None:
            with self.folder.writing():
                self._sync_tables()
                self._trackers.sync()

    def _sync_tables(self) -> None:
        tables, self._unsynced = self._unsynced, []
        for path in (*tables, *{table.parent for table in tables}):
            with contextlib.suppress(FileNotFoundError):  # somebody deleted it
                sync(path)

    def flush(self) -> None:
        """Waits for the table being written; raises `RunError` if it could not be written."""
        table, self._table = self._table, None
        if table is not None:
            with self.folder.writing():
                table.result()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the model after `step` steps, unless it is recorded already.

        After the run's end, passed trackers do not receive it, because they have finished. If it
        cannot be written, the first such failure is a warning.
        """
        if self.has_evaluation(step, metrics):
            return
        self.evaluations.append({"step": float(step), **metrics})
        if self.only_history:
            return
        try:
            with self.folder.writing():
                self._log_evaluation(step, metrics)
        except RunError as error:
            if not self._warned:
                self._warned = True
                self.note(f"warning: an evaluation is not recorded: {error}")
        self._tell(self._doctor.evaluation({"step": float(step), **metrics}))

    def has_evaluation(self, step: int, names: Collection[str]) -> bool:
        """Returns whether an evaluation with these metrics is recorded for a step."""
        return any(row["step"] == step and row.keys() >= set(names) for row in self.evaluations)

    def stopped(self, step: int, reason: str) -> None:
        """Records that the run ended before its last step, and why."""
        if not self.only_history:
            self._display.stopped()
        self.note(f"stopped after step {step} of {self.cfg.steps}: {reason}")
        if not self.only_history:
            with self.folder.writing():
                facts = json.dumps({"step": step, "reason": reason}, indent=2)
                write_durably(self.folder.stopped, facts + "\n")

    def _log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._trackers is not None:
            self._trackers.log(step, metrics)
            return
        trackers = self._open_trackers(step, (), started=True)
        trackers.log(step, metrics)
        trackers.finish()

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            kind = "warning" if finding.kind == "sickness" else "note"
            self.note(f"{kind}: {finding.text} {finding.advice}")

    def wants_completions(self, step: int) -> bool:
        """Returns whether to write the completions of `step`, counted from 1."""
        every = self.cfg.log_completions_steps
        return not self.only_history and every > 0 and (step == 1 or step % every == 0)
