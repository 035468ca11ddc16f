"""Checkpoints of one run: saved when they are due, and found again to resume from."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from grpo_eqx.checkpoint.preemption import Preempted, StopRequest
from grpo_eqx.checkpoint.same_run import RunFacts, after_its_end
from grpo_eqx.checkpoint.saved import OtherArraysError, SavedStep, complete_steps
from grpo_eqx.checkpoint.store import CheckpointStore
from grpo_eqx.common.errors import RunError, UserError, first_line
from grpo_eqx.distributed.exchange import from_main, on_any_host, raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.types import parse_duration
from grpo_eqx.tracking.metrics import OF_THE_MACHINE
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Resumable:
    """Checkpoints to resume from."""

    folder: Path
    steps: list[int]
    """Steps of the complete checkpoints, newest first; not empty."""

    @property
    def saved(self) -> list[SavedStep]:
        """The checkpoints, newest first."""
        return [SavedStep(self.folder, step) for step in self.steps]


class Checkpoints:
    """Checkpoints of one run.

    On several processes, all must make the same calls; process 0 decides what is found and when a
    checkpoint is due.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        facts: RunFacts,
        stop: StopRequest,
        say: Callable[[str], None],
        started: float,
        processes: Collection[int] | None = None,
    ):
        """**Arguments:**

        - `cfg`: the resolved settings.
        - `facts`: what identifies the run.
        - `stop`: requests to end the run.
        - `say`: shows the user a line.
        - `started`: when the run started, by `time.monotonic`.
        - `processes`: processes that hold parts of the state; by default, all do.
        """
        assert cfg.output_dir is not None  # resolved
        self.cfg = cfg
        self.facts = facts
        self.say = say
        self.folder = RunFolder(cfg.output_dir).checkpoints
        self._requested = stop
        self._saves = self._stops = False
        self._stuck: list[int] = []  # steps that could not be moved: none is saved up to the last
        self._store: CheckpointStore | None = None
        self._processes = processes
        self._last_save = self._last_step = time.monotonic()
        limit = cfg.stop_after
        seconds = math.inf if limit is None else parse_duration("stop_after", limit)
        self._end, self._longest_step = started + seconds, 0.0

    def __enter__(self) -> "Checkpoints":
        """Creates the folder; raises `RunError` if it cannot be written."""
        self._store = CheckpointStore(
            self.folder,
            save_total_limit=self.cfg.save_total_limit,
            best=self.cfg.metric_for_best_model,
            stuck=self._stuck,
            say=self.say,
            processes=self._processes,
        )
        self._last_save = self._last_step = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until everything is written."""
        assert self._store is not None  # entered
        # A save that fails must not hide why the run ends.
        with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
            self._store.close()

    def find(self) -> Resumable | None:
        """Returns the checkpoints to resume from; `None` if no checkpoint exists.

        A run that started from the path in `cfg.resume` continues from its own checkpoints. A
        finished run is found like any other, so that a command can always be repeated.

        Raises `UserError` if more steps than the run's are done, or if it is finished and has no
        checkpoint left.
        """
        wanted = self.cfg.resume
        if wanted == "never":
            return None
        found = Resumable(self.folder, from_main(complete_steps(self.folder)))
        if wanted != "auto" and not self._started_from(wanted, found):
            folder, step = raise_on_all_hosts(lambda: located("resume", Path(wanted)))
            steps = complete_steps(folder) if step is None else [step]
            found = Resumable(folder, from_main(steps))
        if not found.steps:
            raise_on_all_hosts(self._check_for_lost_steps)
            return None
        if found.steps[0] > self.cfg.steps:
            raise UserError(
                f"{found.saved[0].path} is a checkpoint after step {found.steps[0]}, and steps is "
                f"{self.cfg.steps}: raise steps, or resume from an earlier checkpoint."
            )
        return found

    def _started_from(self, path: str, found: Resumable) -> bool:
        """Returns whether checkpoints are of a run that was resumed from a path."""
        facts = self._facts_of(found)
        return facts is not None and facts.config["resume"] == path

    def _check_for_lost_steps(self) -> None:
        """Says which steps a run without checkpoints made; raises `UserError` if it is finished."""
        if os.path.lexists(self.folder) and not os.path.isdir(self.folder):
            raise UserError(
                f"{str(self.folder)!r} is not a folder, or is a link to none: restore it, or set "
                f"resume to never to start anew."
            )
        run = RunFolder(self.folder.parent)
        done = max((int(row["step"]) for row in Metrics.read(run.metrics).steps), default=0)
        if run.is_complete:
            raise UserError(
                f"the run in {str(run.path)!r} is finished, after {done} steps, and none of its "
                f"checkpoints is left. {after_its_end(run)}"
            )
        if done:
            self.say(
                f"warning: the run in {str(run.path)!r} recorded {done} steps and has no "
                f"checkpoint: it starts again at step 0, and what it recorded is put aside"
            )

    def _facts_of(self, found: Resumable) -> RunFacts | None:
        """Reads what identifies the run of checkpoints; `None` if all are damaged."""
        for saved in found.saved:
            # Whatever is wrong with one: `restore` says it.
            with contextlib.suppress(Exception):
                return raise_on_all_hosts(functools.partial(RunFacts.saved, saved))
        return None

    def check(self, found: Resumable, like: TrainState) -> None:
        """Raises `UserError` where checkpoints are of another run; reads no arrays.

        **Arguments:**

        - `found`: a result of `find`.
        - `like`: the shapes of the state.
        """
        for saved in found.saved:
            try:
                raise_on_all_hosts(functools.partial(self._changes, saved, like))
                return
            except UserError:
                raise
            except Exception:  # `restore` says what is wrong with it
                continue

    def restore(self, found: Resumable, like: TrainState) -> TrainState:
        """Restores the newest checkpoint that can be read.

        **Arguments:**

        - `found`: a result of `find`.
        - `like`: the shapes of the state, with shardings.

        A checkpoint that cannot be read is named, and the one before it is used; the run's own
        later ones are put aside. Raises `UserError` where none can be read, or where it is of
        another run.
        """
        failures = []
        for saved in found.saved:
            try:
                changes, state = self._restored(saved, like)
            except UserError:
                raise
            except Exception as error:  # whatever Orbax and TensorStore find wrong with it
                failures.append(f"{saved.path}: {first_line(error)}")
                self.say(f"warning: cannot read the checkpoint {failures[-1]}")
                continue
            self.say(f"resuming from {saved.path}, after step {state.step} of {self.cfg.steps}")
            if state.step == self.cfg.steps:
                self.say("nothing is left to train; for a new run, set resume to never")
            if changes:
                self.say(f"settings changed since then: {'; '.join(changes)}")
            if found.folder == self.folder:
                raise_on_all_hosts(functools.partial(self._put_aside_after, state.step))
                self._stuck = from_main(self._after(state.step))
            return state
        raise UserError(
            f"none of the {len(failures)} checkpoints in {str(found.folder)!r} can be read "
            f"({failures[0]}): restore one from a backup, or set resume to never to start anew."
        )

    def _restored(self, saved: SavedStep, like: TrainState) -> tuple[list[str], TrainState]:
        """Reads one checkpoint; returns what has changed since, and its state."""

        def read() -> tuple[list[str], dict[str, jax.Array | np.ndarray]]:
            return self._changes(saved, like), saved.read(like)

        changes, arrays = raise_on_all_hosts(read)
        return changes, saved.verified(arrays, like)

    def _changes(self, saved: SavedStep, like: TrainState) -> list[str]:
        """Returns what has changed since a checkpoint; raises `UserError` for another run's."""
        changes = self.facts.changes_since(RunFacts.saved(saved), saved.path)
        try:
            saved.check_arrays(like)
        except OtherArraysError as error:
            raise UserError(
                f"the checkpoint {str(saved.path)!r} is of another model or optimizer than this "
                f"run ({error}): pass those again, or use another output_dir, or set resume to "
                f"never."
            ) from error
        return changes

    def _put_aside_after(self, step: int) -> None:
        """Moves later checkpoints, which are damaged or not wanted, out of the run's way.

        Where they cannot be moved, none is saved until the run is beyond them.
        """
        later = self._after(step)
        if not later or not is_main():
            return
        run = RunFolder(self.folder.parent)
        names = ", ".join(f"step_{each}" for each in later)
        try:
            kept = run.put_aside([SavedStep(self.folder, each).path for each in later])
        except OSError as error:
            self.say(
                f"warning: the checkpoints after it ({names}) cannot be moved out of "
                f"{str(self.folder)!r} ({error.strerror or error}): they stay, and none is saved "
                f"up to step {later[0]}"
            )
        else:
            self.say(f"the checkpoints after it ({names}) are kept in {kept}")

    def _after(self, step: int) -> list[int]:
        """Returns the later steps of which anything is there, newest first."""
        names = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        found = {*complete_steps(self.folder), *(int(x) for x in names if x.isdecimal())}
        return sorted((each for each in found if each > step), reverse=True)

    def are_due(self, step: int, *, is_evaluated: bool = False) -> bool:
        """Decides, for all processes alike, whether `after_step` will save or stop.

        **Arguments:**

        - `step`: the step, which the devices may still be computing.
        - `is_evaluated`: whether an evaluation follows, after which the step may be the best.
        """
        cfg = self.cfg
        no_time = self._has_no_time_for_another_step()
        self._stops = step < cfg.steps and on_any_host(self._requested.received or no_time)
        if self._stops and no_time and not self._requested.received:
            self.say(f"stop_after is {cfg.stop_after}: there is no time for another step")
        due = step >= cfg.steps or (cfg.save_steps is not None and step % cfg.save_steps == 0)
        if not due and cfg.save_minutes is not None:
            due = from_main(time.monotonic() - self._last_save >= 60 * cfg.save_minutes)
        due |= is_evaluated and _is_of_evaluations(cfg.metric_for_best_model)
        self._saves = due or self._stops
        return self._saves

    @property
    def saves(self) -> bool:
        """Whether `after_step` will save."""
        return self._saves

    @property
    def stops(self) -> bool:
        """Whether `after_step` will stop the run."""
        return self._stops

    def are_interrupted(self) -> bool:
        """Returns, for all processes alike, whether the run has been asked to stop.

        If so, `after_step` will save and stop.
        """
        if on_any_host(self._requested.received):
            self._saves = self._stops = True
        return self._stops

    def is_asked_to_stop(self) -> bool:
        """Returns whether this process has been asked to stop, which it then does after its step.

        Other than `are_interrupted`, it changes nothing, and any thread may call it.
        """
        return self._requested.received

    def save_next(self) -> None:
        """Has `after_step` save, whether it is due or not."""
        self._saves = True

    @phase("checkpoint")
    def after_step(self, state: TrainState, metrics: Mapping[str, float]) -> Path | None:
        """Saves the state, and raises `Preempted` to stop, as was decided before.

        **Arguments:**

        - `state`: the state after the step.
        - `metrics`: metrics of the step and its evaluation, which decide on the best checkpoint.

        **Returns:** the checkpoint, which may still be being written; `None` if there is none.
        """
        score = self._score(metrics)
        if not self._saves:
            return None
        assert self._store is not None  # entered
        can_save = state.step > max(self._stuck, default=0)
        if can_save:
            self._store.save(state, dataclasses.asdict(self.facts), score)
        self._last_save = time.monotonic()
        if self._stops:
            self._store.wait()
            self.stop(state.step)
        return SavedStep(self.folder, state.step).path if can_save else None

    def save_and_stop(self, state: TrainState) -> NoReturn:
        """Ends a run within a step: saves how far the completions are that it carries over.

        **Arguments:**

        - `state`: the state after the last step, with all that is carried over now.
        """
        assert self._store is not None  # entered
        self._store.wait()
        saved = SavedStep(self.folder, state.step)
        if from_main(state.step in complete_steps(self.folder)):
            raise_on_all_hosts(lambda: saved.write_carried(state.carried) if is_main() else None)
        elif state.step > max(self._stuck, default=0):
            self._store.save(state, dataclasses.asdict(self.facts))
            self._store.wait()
        self.stop(state.step)

    def stop(self, step: int) -> NoReturn:
        """Ends the run after a step whose checkpoint is written, by raising `Preempted`."""
        self._requested.is_served = True
        is_saved, saved = step in complete_steps(self.folder), SavedStep(self.folder, step).path
        self.say(
            f"stopped after step {step} of {self.cfg.steps}"
            + (f", saved as {saved}: the same command continues from there" if is_saved else "")
        )
        raise Preempted

    def wait(self) -> None:
        """Waits until everything is written, also by other processes."""
        assert self._store is not None  # entered
        if self._processes is None:
            self._store.wait()
        else:
            raise_on_all_hosts(self._store.wait)

    def describe_last(self) -> str:
        """Describes the newest checkpoint in a sentence."""
        if self._store is not None:
            self._store.wait()
        steps = complete_steps(self.folder)
        if not steps:
            return "No checkpoint has been saved."
        return f"The last checkpoint is {SavedStep(self.folder, steps[0]).path}."

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """Returns how good a step is: its metric, with the sign by which more is better."""
        name = self.cfg.metric_for_best_model
        if name is None or (name not in metrics and _is_of_evaluations(name)):
            return None
        if name not in metrics:
            known = [each for each in sorted(metrics) if not each.startswith(OF_THE_MACHINE)]
            raise UserError(
                f"metric_for_best_model is {name!r}, which this run does not log: use one of "
                f"{', '.join(known)}."
            )
        value = -metrics[name] if self.cfg.greater_is_better is False else metrics[name]
        # Times differ between processes, which must keep the same checkpoint.
        return from_main(-math.inf if math.isnan(value) else value) if self._saves else None

    def _has_no_time_for_another_step(self) -> bool:
        """Returns whether a step like the longest so far, with its saves, would end too late."""
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._last_step)
        self._last_step = now
        return now + self._longest_step > self._end


def _is_of_evaluations(metric: str | None) -> bool:
    return metric is not None and metric.startswith("eval/")


def located(setting: str, path: Path) -> tuple[Path, int | None]:
    """Returns the folder of checkpoints that a path names, and the step, if it names one.

    **Arguments:**

    - `setting`: what gives the path, for the message of a `UserError`.
    - `path`: the path.
    """
    prefix, _, number = path.name.rpartition("_")
    is_step = prefix == "step" and number.isdigit()
    if is_step and os.path.isdir(path):
        return path.parent, int(number)
    name = RunFolder(path).checkpoints.name
    for folder in (path / name, path):
        if folder.name == name and complete_steps(folder):
            return folder, None
    wrong = "has no checkpoints" if os.path.exists(path) else "does not exist"
    others = [f"step_{step}" for step in complete_steps(path.parent)] if is_step else []
    or_word = "auto, never, " if setting == "resume" else ""
    fix = f"use {or_word}a run folder or a checkpoint such as RUN/{name}/step_100"
    raise UserError(
        f"{setting} is {str(path)!r}, which {wrong}: "
        + (f"beside it are {', '.join(others)}." if others else f"{fix}.")
    )
