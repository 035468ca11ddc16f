"""Output folder of a run: the paths of its files, and its start."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.common.durable import write_durably
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.tracking.metrics_file import Metrics

SIGN_SECONDS = 20.0
"""Seconds between two signs of life: a run updates the time of its lock's file."""

_DAMAGED = "metrics.damaged-*.jsonl"
"""Names of copies of a metrics file with damaged lines, made when a run was resumed."""
PASSED = ", passed to GRPOTrainer"
"""End of the text that is recorded for a setting in whose place an object was passed."""


def first_step(settings: Mapping[str, Any]) -> int | None:
    """Returns the first step of a run's metrics; `None`, unknown, where another run continued."""
    return None if settings.get("resume") not in ("auto", "never", None) else 1


class RunFolder:
    """Paths of all that a run writes: config, metrics, completions, learning curve, model and more.

    An earlier run in the folder is kept: its entries move to `previous-1`, `previous-2` and so on.
    """

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.config = path / "config.json"
        self.layout = path / "layout.json"
        self.hub_commits = path / "hub_commits.json"
        self.passed = path / "passed.json"
        """Descriptions of objects passed to `GRPOTrainer` in place of settings, by setting."""
        self.metrics = path / "metrics.jsonl"
        self.completions = path / "completions"
        self.learning_curve = path / "learning_curve.png"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.stopped = path / "stopped.json"
        self.plan = path / "plan.json"
        """The plan, if `grpo-eqx plan --json` was told to write it here."""
        self.profile = path / "profile"
        self.lock = path / ".lock"
        self._run_id = path / "run_id"

    def start(
        self,
        settings: Mapping[str, Any],
        layout: Mapping[str, Any],
        commits: Mapping[str, str],
        step: int = 0,
        *,
        passed: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> list[str]:
        """Creates the folder and writes the run's config, layout on devices and commits on the hub.

        **Arguments:**

        - `settings`, `layout`, `commits`: the contents of the files.
        - `step`: the step after which the run is resumed.
        - `passed`: descriptions of objects passed in place of settings.
        - `continued`: whether the run in the folder is the run that is resumed. It keeps its
          records up to `step`, and loses later ones. Any other run in the folder is put aside.

        **Returns:** sentences for the user: where an earlier run was put, or which records of this
        run are missing.

        Raises the errors of `check_start`.
        """
        self.check_start(continued=continued)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            kept = None if continued else self._keep_previous()
            notes = [] if kept is None else [f"an earlier run in {self.path} is kept in {kept}"]
            if continued:
                notes += self._forget_after(step, first_step(settings))
            self.metrics.touch()  # first of all: this file marks a run folder
            self.completions.mkdir(exist_ok=True)
            self.stopped.unlink(missing_ok=True)
            files = {
                self.config: settings, self.layout: layout, self.hub_commits: commits,
                self.passed: passed,
            }  # fmt: skip
            for path, facts in files.items():
                if facts:
                    write_durably(path, json.dumps(facts, indent=2, default=str) + "\n")
                else:  # nothing is from the hub, or nothing was passed
                    path.unlink(missing_ok=True)
            return notes
        except OSError as error:
            raise self._unwritable(error.strerror) from error

    def check_start(self, *, continued: bool) -> None:
        """Raises `UserError` if a run cannot start in the folder; changes nothing.

        **Arguments:**

        - `continued`: whether the run in the folder continues.
        """
        self.check_writable()
        present = self._present()
        if present and not continued and not os.path.lexists(self.metrics):
            raise UserError(
                f"output_dir {str(self.path)!r} already contains {present[0].name!r}, but is not a "
                f"run folder: choose another."
            )

    def check_writable(self) -> None:
        """Raises `UserError` if the folder cannot be written; creates nothing."""
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError as error:  # TensorStore takes no other names
            raise UserError(
                f"output_dir {str(self.path)!r} is not read as UTF-8: set PYTHONUTF8=1 in the "
                f"environment."
            ) from error
        try:
            existing = next(
                path for path in (self.path, *self.path.absolute().parents) if path.exists()
            )
        except OSError as error:  # such as a name that is too long
            raise self._unwritable(error.strerror) from error
        if self.path.is_symlink() and existing != self.path:
            raise self._unwritable(f"it is a link to {self.path.readlink()}, which does not exist")
        if not existing.is_dir():
            raise self._unwritable(f"{existing} is a file")
        run = RunFolder(self.path.parent)
        if self.path in (run.checkpoints, run.completions, run.model) and run.metrics.exists():
            raise self._unwritable(f"it is part of the run in {run.path}")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unwritable(f"{existing} is read-only")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns the `OSError` of a failed write into a `RunError`."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"the records of the run could not be written to {str(self.path)!r} "
                f"({error.strerror or error}): {self.what_continues()}."
            ) from error

    def what_continues(self) -> str:
        """Says what to do after a failed write, and what the same command then does."""
        try:
            self.metrics.stat()
        except (FileNotFoundError, NotADirectoryError):  # every run has metrics from its start on
            return (
                "its files were deleted or moved while the run wrote them. Move them back, in "
                "place of what is there now, and the same command continues from the last "
                "checkpoint; without them, delete what is there, and it starts anew"
            )
        except OSError:  # the folder cannot be read
            pass
        else:
            if not any(path.name[5:].isdecimal() for path in self.checkpoints.glob("step_*")):
                return (
                    "free space or make the folder writable, and the same command starts anew, as "
                    "no checkpoint is left in it"
                )
        return (
            "free space or make the folder writable, and the same command continues from the last "
            "checkpoint"
        )

    def _unwritable(self, reason: str | None) -> UserError:
        return UserError(
            f"output_dir {str(self.path)!r} cannot be written ({reason}): choose another."
        )

    def completions_of(self, step: int) -> Path:
        """Returns the path of a step's table of completions."""
        return self.completions / f"step_{step:06d}.parquet"

    @property
    def is_complete(self) -> bool:
        """Whether the run has written its model, its last act."""
        return self.model.exists()

    def run_id(self) -> str:
        """Returns the id of the run at its trackers; the first call makes it."""
        if not self._run_id.exists() or not self._run_id.read_text().strip():
            write_durably(self._run_id, secrets.token_hex(4) + "\n")
        return self._run_id.read_text().strip()

    def completion_tables(self) -> dict[int, Path]:
        """Returns the tables of completions by step, oldest first."""
        matches = [
            (re.fullmatch(r"step_(\d+)\.parquet", path.name), path)
            for path in self.completions.glob("step_*.parquet")
        ]
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def _forget_after(self, step: int, first: int | None) -> list[str]:
        """Deletes the records of steps after `step`, which a resumed run repeats.

        Returns a warning if metrics are missing, from the step `first` on, by default from the
        first recorded step. A file with damaged lines is copied before they are removed.
        """
        for number, table in self.completion_tables().items():
            if number > step:
                table.unlink()
        kept = Metrics.read(self.metrics, step)
        gaps = kept.gaps(self.metrics.name, first=first, last=step)
        if kept.damaged:
            number = len(self._damaged_metrics()) + 1
            copy = self.path / _DAMAGED.replace("*", str(number))
            write_durably(copy, self.metrics.read_bytes())
            gaps = f"{gaps}: the file is kept as it was, as {copy}"
        write_durably(self.metrics, b"".join(line.strip() + b"\n" for line in kept.lines))
        return [] if gaps is None else [f"warning: {gaps}"]

    def _damaged_metrics(self) -> list[Path]:
        return list(self.path.glob(_DAMAGED))

    def _present(self) -> list[Path]:
        """Lists the entries of a run that exist."""
        entries = [
            self.config, self.layout, self.hub_commits, self.passed, self.metrics,
            self.completions, self.learning_curve, self.model, self.checkpoints, self.profile,
            self._run_id, self.stopped, self.tensorboard, self.path / "wandb",
            *self._damaged_metrics(),
        ]  # fmt: skip
        return [entry for entry in entries if os.path.lexists(entry)]

    def _keep_previous(self) -> Path | None:
        present = self._present()
        if not present:
            return None
        # The metrics move last, because they mark a run folder.
        return self.put_aside(sorted(present, key=lambda entry: entry == self.metrics))

    def put_aside(self, entries: Sequence[Path]) -> Path:
        """Moves entries of the folder to the next `previous-N`, and returns its path."""
        number = 1
        while os.path.lexists(self.path / f"previous-{number}"):
            number += 1
        kept = self.path / f"previous-{number}"
        for entry in entries:
            target = kept / entry.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            entry.rename(target)
        return kept
