"""A run that hangs or fails ends, with what is needed to find out why."""

import time
from pathlib import Path

import pytest

from grpo_eqx.common.errors import EXIT_FAULT
from grpo_eqx.distributed.startup import HEARTBEAT_SECONDS

from .conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.grid("watchdog")]


def test_a_hang_ends_with_the_stacks_of_all_threads(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    command = Command(small_model, programs, tmp_path / "run", fault="hang", hang_timeout=60)
    output = command.finish(EXIT_FAULT)
    assert "error: no progress for 60 s (hang_timeout) after the rollout of step 2" in output
    assert "The same command continues from the last checkpoint" in output
    assert 'faulty_run.py", line' in output
    assert " in hang\n" in output
    assert len(command.rows()) == 2


@pytest.mark.long
def test_so_does_one_that_keeps_python_from_running(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    command = Command(small_model, programs, tmp_path / "run", fault="hang_in_c", hang_timeout=60)
    output = command.finish(EXIT_FAULT)
    assert "Timeout (0:01:05)!" in output
    assert " in hang_in_c\n" in output


def test_a_hang_on_one_of_two_hosts_ends_both(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    flags = {"processes": 2, "fault": "hang_on_1", "hang_timeout": 90}
    output = Command(small_model, programs, tmp_path / "run", **flags).finish(EXIT_FAULT)
    assert "[1] error: no progress for 90 s" in output
    assert " in hang\n" in output


def test_an_exception_on_one_of_two_hosts_ends_both_in_seconds(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    flags = {"processes": 2, "fault": "crash_on_1"}
    lines, raised = [], None
    with Command(small_model, programs, tmp_path / "run", **flags).start() as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "ValueError: a bug" in line and raised is None:
                raised = time.monotonic()
    assert process.returncode != 0
    output = "".join(lines)
    assert raised is not None, output
    assert time.monotonic() - raised < HEARTBEAT_SECONDS - 5  # it need not be missed
    assert "[1] Traceback (most recent call last)" in output
    assert "in crashing" in output
