"""Updates that are not finite are never applied."""

from pathlib import Path

import pytest

from grpo_eqx.errors import EXIT_FAULT

from .conftest import Command

pytestmark = pytest.mark.slow


def test_one_is_skipped_and_counted(small_model: Path, programs: Path, tmp_path: Path) -> None:
    flags = {"fault": "extreme_once", "scale_rewards": "none", "steps": 4}
    command = Command(small_model, programs, tmp_path / "run", **flags)
    command.finish()
    assert [row["skipped_updates"] for row in command.rows()] == [0, 0, 1, 0]
    assert command.rows()[3]["grad_norm"] > 0


def test_too_many_in_a_row_end_the_run_and_name_the_last_checkpoint(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    flags = {"fault": "extreme", "scale_rewards": "none", "max_skipped_updates": 2}
    command = Command(small_model, programs, tmp_path / "run", **flags)
    last = command.finish(EXIT_FAULT).splitlines()[-1]
    assert last.startswith(
        "error: the loss or its gradient was not finite in 3 updates in a row, which were not "
        "applied (max_skipped_updates is 2)"
    )
    assert last.endswith(f"The last checkpoint is {command.folder / 'checkpoints' / 'step_4'}.")
