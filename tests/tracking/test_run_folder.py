"""The output folder of a run, after somebody else has deleted or moved what is in it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx.common.errors import RunError
from grpo_eqx.tracking.run_folder import RunFolder


def _delete(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)


def _leave_a_rest(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    (folder.checkpoints / "step_4").mkdir(parents=True)  # as one that was being written


def _replace_by_a_file(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    folder.path.touch()


@pytest.mark.parametrize("damage", [_delete, _leave_a_rest, _replace_by_a_file])
def test_of_a_deleted_run_it_is_said_what_the_same_command_does(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start({}, {}, {})
    (folder.checkpoints / "step_3").mkdir(parents=True)
    shutil.copytree(folder.path, tmp_path / "kept")
    assert folder.what_continues().endswith("the same command continues from the last checkpoint")
    damage(folder)
    with pytest.raises(RunError, match="were deleted or moved while the run wr"), folder.writing():
        raise FileNotFoundError("x")
    # "without them, delete what is there, and it starts anew"
    if folder.path.is_dir():
        shutil.rmtree(folder.path)
    folder.path.unlink(missing_ok=True)
    folder.check_start(continued=False)
    # "move them back, in place of what is there now, and the same command continues"
    (tmp_path / "kept").rename(folder.path)
    folder.check_start(continued=True)


def test_of_deleted_checkpoints_it_is_said_that_the_same_command_starts_anew(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start({}, {}, {})
    (folder.checkpoints / "step_3.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "the same command starts anew, as no checkpoint is left" in folder.what_continues()
