"""Results of the command `eval`, written during the evaluation, so that it can be continued."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo_eqx.common.durable import try_lock, write_durably
from grpo_eqx.common.errors import FileError, RunError, UserError
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import read_object, reading, value_of
from grpo_eqx.evaluation.evaluator import Batch, Draws
from grpo_eqx.evaluation.result import Evaluation

_FIX = "delete it and the lines after it, and the same command makes them again"


def saved_time(path: Path) -> str | None:
    """Returns the time in the prompts of saved results, if any."""
    try:
        settings = field(read_object(path), "settings", dict, "")
        return datetime.fromisoformat(field(settings, "time", str, "")).isoformat()
    except (FileError, ValueError):  # `ResultsFile` reports what is wrong
        return None


class ResultsFile:
    """A JSON file with settings and metrics, and beside it a JSONL file with a line per problem.

    Both depend only on the settings, not on whether the evaluation was interrupted.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """**Arguments:**

        - `path`: the file, `*.json`.
        - `settings`: all that decides the results.
        """
        if path.suffix != ".json":
            raise UserError(f"output is {str(path)!r}: give a file whose name ends in .json.")
        self.path = path
        self.rows_path = path.with_suffix(".jsonl")
        self.settings = json.loads(json.dumps(settings))  # as read from a file
        self._rows: IO[str] | None = None

    def __enter__(self) -> "ResultsFile":
        """Creates the files, or opens the files of the same evaluation.

        Raises `UserError` if they belong to another evaluation, are in use, or cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._check_same()
            file = self.rows_path.open("a+", encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise UserError(
                f"output is {str(self.path)!r}, which cannot be written "
                f"({error.strerror or error}): choose another file."
            ) from error
        if not try_lock(file):
            file.close()
            raise UserError(
                f"output is {str(self.path)!r}, which another evaluation is writing: wait for it, "
                f"or choose another file."
            )
        self._rows = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _check_same(self) -> None:
        if not os.path.exists(self.path):
            if os.path.exists(self.rows_path):
                raise UserError(
                    f"output is {str(self.path)!r}, and {str(self.rows_path)!r} exists already: "
                    f"choose another file."
                )
            self._write_results(None)
            return
        try:
            found = field(read_object(self.path), "settings", dict, str(self.path))
        except FileError as error:
            raise UserError(
                f"output is {str(self.path)!r}, which is not a file of results: choose another."
            ) from error
        differs = [
            f"{name}: {found.get(name)} -> {self.settings.get(name)}"
            for name in {**found, **self.settings}
            if found.get(name) != self.settings.get(name)
        ]
        if differs and all(each.startswith("weights: ") for each in differs):
            raise UserError(
                f"output is {str(self.path)!r}, which has results of other weights: the model has "
                f"changed since; give another file with --output."
            )
        if differs:
            raise UserError(
                f"output is {str(self.path)!r}, which has results of other settings "
                f"({'; '.join(differs)}): set these back to continue it, or choose another file."
            )

    def resume(self, plan: Sequence[tuple[Draws, int]], num_problems: int) -> list[int]:
        """Keeps the lines of whole batches; returns the number of finished problems of each part.

        **Arguments:**

        - `plan`: the parts of the evaluation in their order: their draws, and problems per batch.
        - `num_problems`: the number of problems.

        Raises `FileError`, and changes nothing, if a line is not as it was written.
        """
        assert self._rows is not None  # entered
        self._rows.seek(0)
        with reading(str(self.rows_path), _FIX):
            lines = [line for line in self._rows if line.endswith("\n")]
        left, done = len(lines), list[int]()
        # The lines of each part follow the previous part's. An incomplete part keeps whole batches
        # only, because its next batch begins at a multiple of the batch size.
        for _, batch in plan:
            own = min(left, num_problems)
            done.append(own if own == num_problems else own // batch * batch)
            left = left - own if own == num_problems else 0
        self._rows_of(lines, [draws for draws, _ in plan], num_problems)
        kept = "".join(lines[: sum(done)])
        with self._writing():
            self._rows.truncate(len(kept.encode()))
        return done

    def _rows_of(
        self, lines: Sequence[str], plan: Sequence[Draws], num_problems: int
    ) -> list[dict[str, Any]]:
        """Returns the data of lines; raises `FileError` for the first line that has changed.

        A line also counts as changed if it is at another place, because lines before it are missing
        or repeated.
        """
        rows = list[dict[str, Any]]()
        for i, line in enumerate(lines):
            called = f"{self.rows_path}, line {i + 1},"
            row = value_of(line.encode(errors="surrogateescape"), called, _FIX)
            part, problem = divmod(i, num_problems)
            like = row if problem == 0 else rows[-1]
            if part >= len(plan) or not _is_row(row, problem, plan[part].num_samples, like):
                raise FileError(f"{called} is not as it was written there: {_FIX}.")
            rows.append(row)
        return rows

    def add(self, batch: Batch) -> None:
        """Appends the lines of a batch."""
        assert self._rows is not None  # entered
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in _rows_of(batch)]
        with self._writing():
            self._rows.write("".join(lines))
            self._rows.flush()
            os.fsync(self._rows.fileno())

    def finish(self, plan: Sequence[Draws]) -> list[Evaluation]:
        """Writes the metrics of all lines, and returns the evaluations."""
        assert self._rows is not None  # entered
        self._rows.seek(0)
        with reading(str(self.rows_path), _FIX):
            lines = list(self._rows)
        size = len(lines) // len(plan)
        rows = self._rows_of(lines, plan, size)
        evaluations = [
            _evaluation(rows[i * size : (i + 1) * size], draws.temperature)
            for i, draws in enumerate(plan)
        ]
        metrics = {name: x for each in evaluations for name, x in each.metrics().items()}
        self._write_results({name: x if math.isfinite(x) else None for name, x in metrics.items()})
        return evaluations

    def _write_results(self, metrics: Mapping[str, float | None] | None) -> None:
        text = json.dumps({"settings": self.settings, "metrics": metrics}, indent=2) + "\n"
        with self._writing():
            write_durably(self.path, text)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns the `OSError` of a failed write into a `RunError`."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"results could not be written to {str(self.path)!r} ({error.strerror or error}): "
                f"free space or make it writable, and the same command continues."
            ) from error


def _rows_of(batch: Batch) -> Iterator[dict[str, Any]]:
    """Yields the line of each problem of a batch, as JSON data."""
    evaluation, rollout = batch.evaluation, batch.rollout
    for i, prompt in enumerate(rollout.prompts):
        strict, voted = evaluation.strict, evaluation.voted
        yield {
            "draws": evaluation.how,
            "problem": batch.first + i,
            "prompt": prompt.text,
            "completions": rollout.texts[i],
            "truncated": (~rollout.finished[i]).tolist(),
            "solved": evaluation.solved[i].tolist(),
            "strict": None if strict is None else strict[i].tolist(),
            "voted": None if voted is None else bool(voted[i]),
            "scores": {
                name: [x if math.isfinite(x) else None for x in own[i].tolist()]
                for name, own in evaluation.scores.items()
            },
        }


def _is_row(row: Any, problem: int, num_samples: int, like: Any) -> bool:
    """Returns whether a line can belong to a problem.

    **Arguments:**

    - `row`: the data of the line.
    - `problem`, `num_samples`: the problem's number, and its number of completions.
    - `like`: the data of another line of the same part.
    """
    if not (isinstance(row, dict) and isinstance(like.get("scores"), dict)):
        return False
    flags = [bool] * num_samples
    kinds = {
        "draws": str,
        "problem": float,
        "prompt": str,
        "completions": [str] * num_samples,
        "truncated": flags,
        "solved": flags,
        "strict": float if like.get("strict") is None else flags,
        "voted": float if like.get("voted") is None else bool,
        "scores": {name: [float] * num_samples for name in like["scores"]},
    }
    at_its_place = (row.get("problem"), row.get("draws")) == (problem, like.get("draws"))
    return at_its_place and _kinds(row) == kinds


def _kinds(value: Any) -> Any:
    """Returns the structure of a JSON value, with types in place of values; null is a number."""
    match value:
        case dict():
            return {name: _kinds(x) for name, x in value.items()}
        case list():
            return [_kinds(x) for x in value]
        case bool() | str():
            return type(value)
    return float


def _evaluation(rows: Sequence[Mapping[str, Any]], temperature: float) -> Evaluation:
    """Returns the evaluation that the lines record."""
    first = rows[0]
    scores = {
        name: np.array([row["scores"][name] for row in rows], float) for name in first["scores"]
    }
    return Evaluation(
        np.array([row["solved"] for row in rows], bool),
        None if first["strict"] is None else np.array([row["strict"] for row in rows], bool),
        None if first["voted"] is None else np.array([row["voted"] for row in rows], bool),
        scores,
        temperature,
    )
