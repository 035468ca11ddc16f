"""State of a run, such as finished, failed or going on, as its folder shows it."""

import dataclasses
import re
import time
from typing import Literal

from grpo_eqx.common.errors import FileError
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import read_object
from grpo_eqx.tracking.run_folder import SIGN_SECONDS, RunFolder

_SIGNS_MISSED = 6
"""Signs of life that a run may miss, on a busy machine or file system, before it counts as dead."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """State of a run, in a word and in a sentence."""

    word: Literal["finished", "going on", "stopped", "failed", "not begun"]
    sentence: str


def find_ending(folder: RunFolder, done: int, steps: int | None) -> Ending:
    """Says how a run ended.

    **Arguments:**

    - `folder`: the run's folder.
    - `done`: the last recorded step.
    - `steps`: the steps that the run was to make, if known.

    Every run that is not killed empties its lock's file at its end. A preempted run saves a
    checkpoint of its last step, and a finished run writes its model.
    """
    progress = f"step {done:,}" if steps is None else f"step {done:,} of {steps:,}"
    counted = f"{done:,} step{'' if done == 1 else 's'}"
    holder, silence = _holder(folder), _seconds_since_sign(folder)
    saved = saved_steps(folder)
    resumes = f"its newest checkpoint is of step {saved[-1]:,}" if saved else "it has no checkpoint"
    if holder and silence < _SIGNS_MISSED * SIGN_SECONDS:
        return Ending("going on", f"It is going on, at {progress}.")
    if holder:
        why = "by a signal, or with its machine"
        return Ending("failed", f"It was ended {why}, after {progress}; {resumes}.")
    reason = _reason(folder)
    if reason is not None:
        return Ending("stopped", f"A callback stopped it after {progress}: {reason}.")
    if folder.is_complete and (steps is None or done >= steps):
        return Ending("finished", f"It finished its {counted} and wrote its model.")
    if done == 0:
        return Ending("not begun", "It recorded no step.")
    if done in saved and (steps is None or done < steps):
        return Ending("stopped", f"It stopped after {progress}, with a checkpoint to go on from.")
    if steps is not None and done >= steps:
        return Ending("failed", f"It made all {steps:,} steps, but its model is not here.")
    return Ending("failed", f"It ended early, after {progress}; {resumes}.")


def saved_steps(folder: RunFolder) -> list[int]:
    """Returns the steps with a checkpoint, oldest first."""
    names = [path.name for path in folder.checkpoints.glob("step_*")]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


def _holder(folder: RunFolder) -> bool:
    """Returns whether a run holds the folder, or was killed while it did."""
    try:
        return bool(read_object(folder.lock))
    except FileError:  # no file, or the empty one of a run that has ended
        return False


def _reason(folder: RunFolder) -> str | None:
    """Returns why a callback stopped the run, if one did."""
    try:
        return field(read_object(folder.stopped), "reason", str, "").rstrip(".")
    except FileError:  # no file, as a rule
        return None


def _seconds_since_sign(folder: RunFolder) -> float:
    try:
        return time.time() - folder.lock.stat().st_mtime
    except OSError:
        return float("inf")
