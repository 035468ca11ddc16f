"""The lines of an evaluation by itself are those that were written, or the evaluation stops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import FileError
from grpo_eqx.evaluation.evaluator import Draws
from grpo_eqx.evaluation.results_file import ResultsFile

NUM, SETTINGS = 6, {"model": "x"}
PLAN = [(Draws(), 4), (Draws(1.0, 2), 2)]
Lines = list[bytes]


def row(draws: str, problem: int, num_samples: int) -> dict[str, Any]:
    flags = [True] * num_samples
    return {
        "draws": draws, "problem": problem, "prompt": "q\u2028", "completions": ["a"] * num_samples,
        "truncated": flags, "solved": flags, "strict": flags, "voted": True,
        "scores": {"length": [1.0, None][:num_samples]},
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a whole evaluation."""
    with ResultsFile(tmp_path / "results.json", SETTINGS) as file:
        pass
    rows = [row("greedy", i, 1) for i in range(NUM)]
    rows += [row("temperature_1", i, 2) for i in range(NUM)]
    file.rows_path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file.path


def resumed(path: Path) -> list[int]:
    with ResultsFile(path, SETTINGS) as file:
        done = file.resume(PLAN, NUM)
        if sum(done) == 2 * NUM:
            assert len(file.finish([draws for draws, _ in PLAN])) == 2
        return done


def changed(line: bytes, **values: Any) -> bytes:
    return json.dumps({**json.loads(line), **values}).encode() + b"\n"


def test_a_whole_file_and_its_start_are_read(path: Path) -> None:
    rows, lines = (
        path.with_suffix(".jsonl"),
        path.with_suffix(".jsonl").read_bytes().splitlines(True),
    )
    assert resumed(path) == [NUM, NUM]
    rows.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    assert resumed(path) == [NUM, 2]
    rows.write_bytes(b"".join(lines[:3]))
    assert resumed(path) == [0, 0]
    assert rows.read_bytes() == b""


@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (lambda lines: lines[:2] + lines[3:], 3),
        (lambda lines: lines[:2] + lines[1:], 3),
        (lambda lines: [*lines, lines[-1]], 13),
        (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], 5),
        (lambda lines: [*lines[:2], lines[8], *lines[3:8], lines[2], *lines[9:]], 3),
        (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3),
        (lambda lines: [*lines[:2], b"\0" * 40 + b"\n", *lines[3:]], 3),
        (lambda lines: [*lines[:2], b"\xff\n", *lines[3:]], 3),
        (lambda lines: [*lines[:2], b"[1]\n", *lines[3:]], 3),
        (lambda lines: [b"{}\n", *lines[1:]], 1),
        (lambda lines: [lines[0][:30] + b"\n", *lines[1:]], 1),
        *(
            (lambda lines, values=values: [*lines[:7], changed(lines[7], **values), *lines[8:]], 8)
            for values in (
                {"solved": [True]}, {"solved": [1, 0]}, {"solved": None}, {"strict": None},
                {"voted": None}, {"scores": {}}, {"scores": {"length": ["1", 2]}},
                {"scores": {"length": [1.0]}}, {"completions": "ab"}, {"problem": 1.5},
                {"truncated": [[], []]}, {"draws": "greedy"},
            )
        ),
    ],
)  # fmt: skip
def test_a_line_that_is_not_as_it_was_written_is_named_and_nothing_changed(
    path: Path, damage: Callable[[Lines], Lines], first: int
) -> None:
    rows = path.with_suffix(".jsonl")
    rows.write_bytes(b"".join(damage(rows.read_bytes().splitlines(keepends=True))))
    before = rows.read_bytes(), path.read_bytes()
    with pytest.raises(
        FileError, match=rf"jsonl, line {first}, .*(delete it and the l|save it in UTF-8)"
    ):
        resumed(path)
    assert (rows.read_bytes(), path.read_bytes()) == before
