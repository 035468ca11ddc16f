"""Continuation of a run: the checkpoint that it resumes from, and what its user is told of that."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from grpo_eqx.checkpoint.checkpoints import Checkpoints, Resumable
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import SavedStep, complete_steps
from grpo_eqx.common.errors import FileError, UserError
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.recorded_run import read_passed
from grpo_eqx.tracking.run_folder import PASSED, RunFolder
from grpo_eqx.training.state import TrainState

_BY_SETTING = "by its setting"

ResumeSource = str | Path | bool | None
"""Value of `resume_from_checkpoint`: a run folder or checkpoint; `True` for the newest of the run,
`False` for none; `None` for what `cfg.resume` says."""


def resuming_from(cfg: GRPOConfig, source: ResumeSource) -> GRPOConfig:
    """Returns the settings with the source in place of `resume`, unless it is `None`."""
    if isinstance(source, bool):
        source = "auto" if source else "never"
    return cfg if source is None else dataclasses.replace(cfg, resume=str(source))


def will_train(cfg: GRPOConfig, facts: RunFacts) -> bool:
    """Returns whether steps are likely to be made: no run in the folder is finished, or another.

    A guess, from the newest checkpoint alone: `find_resumable` decides.
    """
    folder = RunFolder(str(cfg.output_dir)).checkpoints
    if cfg.resume == "auto":
        for step in complete_steps(folder)[:1]:
            with contextlib.suppress(Exception):  # it is damaged, in whatever way
                saved = RunFacts.saved(SavedStep(folder, step))
                return step < cfg.steps and not facts.refused(saved)
    return True


def find_resumable(
    checkpoints: Checkpoints, source: ResumeSource, shapes: Callable[[], TrainState]
) -> Resumable | None:
    """Returns the checkpoints to resume from, if there are any.

    **Arguments:**

    - `checkpoints`: the checkpoints of the run.
    - `source`: the value of `resume_from_checkpoint`.
    - `shapes`: returns the shapes of what a checkpoint holds.

    Raises `UserError` if they are of another run, or if there are none and the source is `True`.
    """
    found = checkpoints.find()
    if found is not None:
        checkpoints.check(found, shapes())
    elif source is True:
        raise UserError(
            f"resume_from_checkpoint is True, and {str(checkpoints.cfg.output_dir)!r} has no "
            f"checkpoint of this run to resume from: leave it out, or name one."
        )
    return found


def notes_on(found: Resumable, passed: Mapping[str, str], *, continued: bool) -> Iterator[str]:
    """Yields notes on a run that resumes.

    **Arguments:**

    - `found`: the checkpoints that the run resumes from.
    - `passed`: objects that are passed to `GRPOTrainer` now, by the settings that they replace.
    - `continued`: whether this run saved the checkpoints.
    """
    folder = RunFolder(found.folder.parent)
    changes = _changed_objects(folder, passed)
    if changes:
        yield f"objects passed to GRPOTrainer changed since then: {'; '.join(changes)}"
    if continued and folder.stopped.exists():
        yield "a callback has ended this run: it goes on unless one stops it in on_train_begin"


def _changed_objects(earlier: RunFolder, passed: Mapping[str, str]) -> list[str]:
    """Lists the settings whose objects are of another class than in the earlier run."""
    try:
        before = read_passed(earlier)
    except FileError:
        return []  # reports say that it is damaged
    kinds = [
        (name, *(str(x.get(name, _BY_SETTING)).removesuffix(PASSED) for x in (before, passed)))
        for name in sorted({*before, *passed})
    ]
    return [f"{name}: {old} -> {new}" for name, old, new in kinds if old != new]
