"""Checkpoints of one run: saved when they are due, and found again to resume from."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_eqx.checkpoint.preemption import Preempted, StopRequest
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.shared_folder import check_shared
from grpo_eqx.checkpoint.store import CheckpointStore, complete_steps
from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.exchange import from_main, on_any_host, raise_on_all_hosts
from grpo_eqx.errors import RunError, UserError, first_line
from grpo_eqx.setting_ranges import parse_duration
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.training.state import TrainState

FOLDER = "checkpoints"
"""Name of the folder within the run's."""


@dataclasses.dataclass(frozen=True)
class Resumable:
    """Checkpoints to resume from."""

    folder: Path
    steps: list[int]
    """Steps of the complete checkpoints, newest first; not empty."""


class Checkpoints:
    """Checkpoints of one run.

    On several processes, all must make the same calls; process 0 decides what is found and when a
    checkpoint is due.
    """

    def __init__(self, cfg: GRPOConfig, facts: RunFacts, say: Callable[[str], None]):
        """**Arguments:** the resolved settings; what identifies the run; shows the user a line."""
        assert cfg.output_dir is not None  # resolved
        self.cfg = cfg
        self.facts = facts
        self.say = say
        self.folder = Path(cfg.output_dir) / FOLDER
        self._stop = StopRequest(cfg.preemption_deadline, say)
        self._store: CheckpointStore | None = None
        self._last_save = self._last_step = time.monotonic()
        limit = cfg.stop_after
        seconds = math.inf if limit is None else parse_duration("stop_after", limit)
        self._end, self._longest_step = self._last_step + seconds, 0.0

    def __enter__(self) -> "Checkpoints":
        self._stop.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until everything is written."""
        try:
            if self._store is not None:
                # A save that fails must not hide why the run ends.
                with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
                    self._store.close()
        finally:
            self._stop.__exit__()

    def find(self, source: str | Path | None = None) -> Resumable | None:
        """Returns the checkpoints to resume from, `None` where there are none.

        **Arguments:** the run folder or the checkpoint, by default what `cfg.resume` says.

        A complete run in the folder is resumed, with nothing left to train, if it is this one, so
        that a command can always be repeated; any other stays as it is, for a new run to put aside.
        Raises `UserError` if hosts do not share the run's folder, or if more steps than the run's
        are done.
        """
        check_shared(self.folder.parent)
        wanted = self.cfg.resume if source is None else str(source)
        if wanted == "never":
            return None
        folder, only = self.folder, None
        if wanted != "auto":
            folder, only = raise_on_all_hosts(lambda: located("resume", Path(wanted)))
        steps = from_main(complete_steps(folder) if only is None else [only])
        if not steps:
            return None
        found = Resumable(folder, steps)
        if wanted == "auto" and self._is_of_a_complete_other(found):
            return None
        if steps[0] > self.cfg.steps:
            raise UserError(
                f"{folder / f'step_{steps[0]}'} is a checkpoint after step {steps[0]}, and steps "
                f"is {self.cfg.steps}: raise steps, or resume from an earlier checkpoint."
            )
        return found

    def _is_of_a_complete_other(self, found: Resumable) -> bool:
        """Returns whether checkpoints are of a complete run, and that is not this one."""
        done, run = found.steps[0], RunFolder(found.folder.parent)
        if done < self.cfg.steps or not from_main(run.is_complete):
            return False
        if done == self.cfg.steps and self._facts_of(found) in (self.facts, None):
            return False
        self.say(
            f"the run in {str(run.path)!r} has finished its {done} steps, and this is a new one: "
            f"raise steps to continue that one."
        )
        return True

    def _facts_of(self, found: Resumable) -> RunFacts | None:
        """Reads what identifies the run of checkpoints; `None` if all are damaged."""
        with CheckpointStore(found.folder, read_only=True) as store:
            for step in found.steps:
                # Whatever Orbax finds wrong with one: `restore` says it.
                with contextlib.suppress(Exception):
                    return raise_on_all_hosts(functools.partial(RunFacts.saved, store, step))
        return None

    def restore(self, found: Resumable, like: TrainState) -> TrainState:
        """Restores the newest checkpoint that can be read.

        **Arguments:** what `find` found; the state's shapes, with shardings.

        A checkpoint that cannot be read is named, and the one before it is used. Raises
        `UserError` where none can be read, or where it is of another run.
        """
        failures = []
        with CheckpointStore(found.folder) as store:
            for step in found.steps:
                path = found.folder / f"step_{step}"
                try:
                    read = functools.partial(self._read, store, step, like)
                    changes, state = raise_on_all_hosts(read)
                except UserError:
                    raise
                except Exception as error:  # whatever Orbax and TensorStore find wrong with it
                    failures.append(f"{path}: {first_line(error)}")
                    self.say(f"warning: cannot read the checkpoint {failures[-1]}")
                    continue
                self.say(f"resuming from {path}, after step {step} of {self.cfg.steps}")
                if changes:
                    self.say(f"settings changed since then: {'; '.join(changes)}")
                return state
        raise UserError(
            f"none of the {len(failures)} checkpoints in {str(found.folder)!r} can be read "
            f"({failures[0]}): restore one from a backup, or start anew with --resume never."
        )

    def _read(
        self, store: CheckpointStore, step: int, like: TrainState
    ) -> tuple[list[str], TrainState]:
        """Reads one checkpoint; returns what has changed since, and its state."""
        path = store.folder / f"step_{step}"
        changes = self.facts.changes_since(RunFacts.saved(store, step), path)
        return changes, store.restore(step, like)

    def after_step(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Saves the state if a checkpoint is due; raises `Preempted` if any process is to stop.

        **Arguments:** the state; the metrics of its step, by which the best checkpoint is kept.
        """
        score = self._score(metrics)
        cfg, step = self.cfg, state.step
        stop = self._stop.received or self._has_no_time_for_another_step()
        if step < cfg.steps and on_any_host(stop):
            self.save(state, score)
            self.say(
                f"stopped after step {step} of {cfg.steps}, saved in {self.folder}: the same "
                f"command continues from there"
            )
            raise Preempted
        due = step >= cfg.steps or (cfg.save_steps is not None and step % cfg.save_steps == 0)
        if not due and cfg.save_minutes is not None:
            due = from_main(time.monotonic() - self._last_save >= 60 * cfg.save_minutes)
        if due:
            self.save(state, score)

    def describe_last(self) -> str:
        """Describes the newest checkpoint in a sentence."""
        if self._store is not None:
            self._store.wait()
        steps = complete_steps(self.folder)
        if not steps:
            return "No checkpoint has been saved."
        return f"The last checkpoint is {self.folder / f'step_{steps[0]}'}."

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """Returns how good a step is: its metric, with the sign by which more is better."""
        name = self.cfg.metric_for_best_model
        if name is None:
            return None
        if name not in metrics:
            raise UserError(
                f"metric_for_best_model is {name!r}, which this run does not log: use one of "
                f"{', '.join(sorted(metrics))}."
            )
        value = -metrics[name] if self.cfg.greater_is_better is False else metrics[name]
        return -math.inf if math.isnan(value) else value

    def _has_no_time_for_another_step(self) -> bool:
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._last_step)
        self._last_step = now
        return now + self._longest_step > self._end

    def save(self, state: TrainState, score: float | None = None) -> None:
        """Saves the state in the background; returns when its arrays may change again.

        **Arguments:** the state; how good it is, where the best checkpoint is kept.
        """
        if self._store is None:
            self._store = CheckpointStore(
                self.folder,
                save_total_limit=self.cfg.save_total_limit,
                keep_best=self.cfg.metric_for_best_model is not None,
            )
        self._store.save(state, dataclasses.asdict(self.facts), score)
        self._last_save = time.monotonic()


def located(setting: str, path: Path) -> tuple[Path, int | None]:
    """Returns the folder of checkpoints that a path names, and the step, if it names one.

    **Arguments:** what gives the path, for the message of a `UserError`; the path.
    """
    prefix, _, number = path.name.rpartition("_")
    if prefix == "step" and number.isdigit() and path.is_dir():
        return path.parent, int(number)
    if complete_steps(path / FOLDER):
        return path / FOLDER, None
    or_word = "auto, never, " if setting == "resume" else ""
    raise UserError(
        f"{setting} is {str(path)!r}, which is neither a run folder with checkpoints nor a "
        f"checkpoint: use {or_word}a run folder or a checkpoint such as RUN/{FOLDER}/step_100."
    )
