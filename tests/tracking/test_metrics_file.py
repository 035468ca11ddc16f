"""Metrics of a run whose file is damaged: what can be read is kept, and what is missing is said."""

import json
import math
import random
from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.diagnosis import diagnose
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.run_folder import RunFolder

STEPS = 8


def line(step: int, **others: float | None) -> bytes:
    return json.dumps({"step": step, "step_time": 1.0, "reward": step / 8, **others}).encode()


LINES = [line(step) for step in range(1, STEPS + 1)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.metrics.write_bytes(b"".join(line + b"\n" for line in LINES))
    return run


STRANGE = {
    "not JSON": b"oops",
    "a list": b"[1]",
    "a number": b"7",
    "null": b"null",
    "no step": b'{"reward": 1}',
    "a step that is a text": b'{"step": "3", "step_time": 1}',
    "a step that is true": b'{"step": true, "step_time": 1}',
    "a step that is not finite": b'{"step": NaN, "step_time": 1}',
    "an infinite step": b'{"step": 1e999, "step_time": 1}',
    "a negative step": b'{"step": -3, "step_time": 1}',
    "half a step": b'{"step": 2.5, "step_time": 1}',
    "a value that is a text": b'{"step": 9, "reward": "high"}',
    "a value that is a list": b'{"step": 9, "reward": [1]}',
    "a number without end": b'{"step": 9, "reward": ' + b"9" * 5000 + b"}",
    "a number beyond floats": b'{"step": 9, "reward": ' + b"9" * 400 + b"}",
    "nested": b'{"step": 9, "reward": ' + b"[" * 100_000 + b"}",
    "NULs": bytes(300),
    "garbage": random.Random(0).randbytes(300).replace(b"\n", b""),
    "not UTF-8": b'{"step": 9, "\xff": 1}',
    "half a line": LINES[2][:20],
    "two in one": LINES[2] + LINES[3],
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_line_is_left_out_and_the_file_kept_as_it_was(
    folder: RunFolder, strange: bytes
) -> None:
    """Wherever it is: in place of a line, after all, or where a line should end."""
    for content in (
        b"\n".join([*LINES[:2], strange, *LINES[3:], b""]),
        b"\n".join([*LINES[:2], strange, *LINES[3:], strange + b"\n"]),
    ):
        folder.metrics.write_bytes(content)
        (warning,) = folder.start({}, {}, {}, STEPS, continued=True)
        *_, copy = warning.split()
        assert Path(copy).read_bytes() == content
        assert "damaged or repeated (3" in warning
        assert "no line of 1 of 8 steps (3)" in warning
        kept = Metrics.read(folder.metrics)
        assert [row["step"] for row in kept.rows] == [1, 2, 4, 5, 6, 7, 8]
        assert not kept.damaged
        assert diagnose({}, kept.steps, kept.evaluations, num_devices=1) is not None
    assert sorted(path.name for path in folder.path.glob("*damaged*")) == [
        "metrics.damaged-1.jsonl", "metrics.damaged-2.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("end", [b"", LINES[-1][:7], LINES[-1][:30], LINES[-1]])
def test_a_line_that_a_killed_run_was_writing_is_no_damage(folder: RunFolder, end: bytes) -> None:
    folder.metrics.write_bytes(b"\n".join([*LINES[:-1], end]))
    assert folder.start({}, {}, {}, STEPS - 1, continued=True) == []
    assert folder.metrics.read_bytes() == b"".join(each + b"\n" for each in LINES[:-1])


def test_nuls_at_the_end_are_damage(folder: RunFolder) -> None:
    """As a power cut leaves them on some file systems."""
    folder.metrics.write_bytes(b"\n".join([*LINES[:-1], bytes(64)]))
    (warning,) = folder.start({}, {}, {}, STEPS, continued=True)
    assert "1 line that is damaged or repeated (8) and no line of 1 of 8 steps (8)" in warning


@pytest.mark.parametrize("name", ["gone", "empty", "cut"])
def test_steps_that_are_missing_are_said_at_every_start(folder: RunFolder, name: str) -> None:
    if name == "gone":
        folder.metrics.unlink()
    else:
        folder.metrics.write_bytes(b"" if name == "empty" else b"\n".join([*LINES[3:5], b""]))
    which = {"cut": "6 of 8 steps (1 to 3, 6 to 8)"}.get(name, "8 of 8 steps (1 to 8)")
    for _ in range(2):
        assert folder.start({}, {}, {}, STEPS, continued=True) == [
            f"warning: metrics.jsonl has no line of {which}"
        ]
    assert not list(folder.path.glob("*damaged*"))


def test_of_lines_of_one_step_the_last_counts_and_others_are_put_in_order(
    folder: RunFolder,
) -> None:
    evaluation = b'{"step": 2, "eval/greedy/pass@1": 0.5}'
    again = line(2, reward=0.9)
    folder.metrics.write_bytes(b"\n".join([*reversed(LINES), evaluation, again, evaluation, b""]))
    (warning,) = folder.start({}, {}, {}, STEPS, continued=True)
    assert "has 2 lines that are damaged or repeated (7, 9): " in warning
    kept = Metrics.read(folder.metrics)
    assert [row["step"] for row in kept.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept.steps[1]["reward"] == 0.9
    assert len(kept.evaluations) == 1


def test_a_step_of_a_damaged_number_takes_no_time_to_count(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.write(line(10**15) + b"\n")
    gaps = Metrics.read(folder.metrics).gaps("metrics.jsonl", first=1)
    assert gaps == (
        "metrics.jsonl has no line of 999,999,999,999,991 of 1,000,000,000,000,000 steps (9 to "
        "999999999999999)"
    )


def test_null_is_nan_and_lines_may_end_as_on_windows(folder: RunFolder) -> None:
    folder.metrics.write_bytes(line(1, reward=None) + b"\r\n\r\n" + line(2) + b"\r\n")
    metrics = Metrics.read(folder.metrics)
    assert math.isnan(metrics.rows[0]["reward"])
    assert len(metrics.rows) == 2
    assert not metrics.damaged


def test_a_file_that_cannot_be_read_at_all_is_said(folder: RunFolder) -> None:
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl is a folder"):
        Metrics.read(folder.metrics)
