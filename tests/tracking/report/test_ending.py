"""How a run ended, from what its folder has."""

import json
import os
import time
from pathlib import Path

import pytest

from grpo_eqx.tracking.report.ending import find_ending
from grpo_eqx.tracking.run_folder import RunFolder

HOLDER = json.dumps({"host": "here", "process": 1})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """One whose run has ended, in whatever way: its lock is empty."""
    (tmp_path / ".lock").touch()
    return RunFolder(tmp_path)


def word(folder: RunFolder, done: int) -> str:
    return find_ending(folder, done, 10).word


def test_a_run_with_its_model_has_finished(folder: RunFolder) -> None:
    folder.model.mkdir()
    assert find_ending(folder, 10, 10).sentence == "It finished its 10 steps and wrote its model."
    assert word(folder, 10) == "finished"


def test_a_run_that_gives_signs_of_life_is_going_on(folder: RunFolder) -> None:
    folder.lock.write_text(HOLDER)
    assert word(folder, 4) == "going on"


def test_a_run_whose_signs_have_ended_was_killed(folder: RunFolder) -> None:
    folder.lock.write_text(HOLDER)
    hour_ago = time.time() - 3600
    os.utime(folder.lock, (hour_ago, hour_ago))
    ending = find_ending(folder, 4, 10)
    assert ending.word == "failed"
    assert ending.sentence.startswith(
        "It was ended by a signal, or with its machine, after step 4 of 10"
    )


def test_a_run_with_a_checkpoint_of_its_last_step_was_asked_to_stop(folder: RunFolder) -> None:
    (folder.checkpoints / "step_4").mkdir(parents=True)
    assert word(folder, 4) == "stopped"


def test_a_run_that_ended_after_its_checkpoint_failed(folder: RunFolder) -> None:
    (folder.checkpoints / "step_4").mkdir(parents=True)
    (folder.checkpoints / "step_5.orbax-checkpoint-tmp").mkdir()  # of which nothing is left
    ending = find_ending(folder, 6, 10)
    assert ending.word == "failed"
    assert ending.sentence.startswith("It ended early, after step 6 of 10")
    assert ending.sentence.endswith("its newest checkpoint is of step 4.")


def test_a_run_that_a_callback_ended_says_which_and_has_its_model(folder: RunFolder) -> None:
    folder.model.mkdir()
    folder.stopped.write_text(json.dumps({"step": 4, "reason": "reward has not improved"}))
    ending = find_ending(folder, 4, 10)
    assert ending.word == "stopped"
    assert ending.sentence == ("A callback stopped it after step 4 of 10: reward has not improved.")


def test_a_model_of_fewer_steps_is_not_that_of_a_run_that_goes_further(folder: RunFolder) -> None:
    folder.model.mkdir()
    assert word(folder, 4) == "failed"


def test_all_steps_without_a_model_and_no_step_at_all(folder: RunFolder) -> None:
    ending = find_ending(folder, 10, 10)
    assert ending.sentence == "It made all 10 steps, but its model is not here."
    assert word(folder, 0) == "not begun"
