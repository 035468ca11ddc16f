"""Updates that are not finite are never applied."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from grpo_eqx.common.errors import EXIT_FAULT

from .conftest import Command

pytestmark = pytest.mark.slow

LOSSES = ("loss", "grad_norm", "entropy", "reward", "reward_std")


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


def test_groups_without_variance_make_no_nan(unbroken: Command) -> None:
    """No completion of a random model is right: all rewards are 0."""
    steps = [row for row in unbroken.rows() if "reward" in row]
    assert {row["frac_reward_zero_std"] for row in steps} == {1.0}
    assert {row["skipped_updates"] for row in steps} == {0.0}
    check_finite(unbroken)


def test_completions_that_never_end_make_no_nan(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    """Masked, they leave no token in the loss."""
    flags = {"max_completion_length": 1, "mask_truncated_completions": True, "steps": 2}
    command = Command(small_model, programs, tmp_path / "run", **flags)
    command.finish()
    assert command.rows()[0]["completions/clipped_ratio"] == 1.0
    check_finite(command)


def check_finite(command: Command) -> None:
    weights = load(command.model())
    assert all(np.isfinite(x).all() for x in weights.values())
    for row in command.rows():
        assert all(math.isfinite(x) for name, x in row.items() if name in LOSSES), row
