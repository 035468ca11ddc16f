"""What a user is told where a run resumes, and from what."""

import json
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.checkpoint.checkpoints import Resumable
from grpo_eqx.loop.resumption import ResumeSource, notes_on, resuming_from
from grpo_eqx.tracking.recorded_run import read_passed
from grpo_eqx.tracking.run_folder import PASSED, RunFolder


@pytest.fixture
def earlier(tmp_path: Path) -> RunFolder:
    """A run in which a loss backend and an optimizer were passed."""
    folder = RunFolder(tmp_path)
    passed = {"loss_backend": f"DenseLoss{PASSED}", "optimizer": f"optax{PASSED}"}
    folder.passed.write_text(json.dumps(passed))
    return folder


@pytest.mark.parametrize(
    ("source", "resume"),
    [(None, "never"), (True, "auto"), (False, "never"), ("run/checkpoints/3", "run/checkpoints/3")],
)
def test_a_source_takes_the_place_of_the_setting(source: ResumeSource, resume: str) -> None:
    assert resuming_from(GRPOConfig(resume="never"), source).resume == resume


def test_it_says_which_objects_are_of_another_class(earlier: RunFolder) -> None:
    found = Resumable(earlier.checkpoints, [1])
    now = {"loss_backend": f"ChunkedLoss{PASSED}", "mesh": f"AutoMesh{PASSED}"}
    assert list(notes_on(found, now, continued=True)) == [
        "objects passed to GRPOTrainer changed since then: loss_backend: DenseLoss -> ChunkedLoss; "
        "mesh: by its setting -> AutoMesh; optimizer: optax -> by its setting"
    ]


def test_it_says_nothing_of_the_same_objects_or_where_their_record_is_damaged(
    earlier: RunFolder,
) -> None:
    found, same = Resumable(earlier.checkpoints, [1]), read_passed(earlier)
    assert list(notes_on(found, same, continued=True)) == []
    earlier.passed.write_text("[")
    assert list(notes_on(found, {}, continued=True)) == []


def test_it_says_that_a_callback_has_ended_the_run_that_goes_on(earlier: RunFolder) -> None:
    found, same = Resumable(earlier.checkpoints, [1]), read_passed(earlier)
    earlier.stopped.touch()
    (note,) = notes_on(found, same, continued=True)
    assert note.startswith("a callback has ended this run")
    assert list(notes_on(found, same, continued=False)) == []
