"""The time in prompts is that of the checkpoints that a run continues from."""

import dataclasses
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.checkpoint.run_moment import run_moment
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import FACTS, SavedStep, complete_steps, digest

FIRST, SECOND = datetime(2024, 3, 9, 23, 59, 58, 7), datetime(2025, 1, 2)


def facts(time: datetime | None, fingerprint: str = "", **settings: str) -> RunFacts:
    cfg = GRPOConfig(**settings).resolved()
    said = None if time is None else time.isoformat()
    return RunFacts.of(cfg, {"the training problems": fingerprint}, {}, {}, said)


def save(run: Path, step: int, time: datetime | None, **settings: str) -> Path:
    """What a checkpoint says of its run, without its arrays."""
    saved = SavedStep(run / "checkpoints", step)
    content = json.loads(json.dumps(dataclasses.asdict(facts(time, **settings))))
    content |= {"counters": {}, "shapes": {}, "checksums": {}}
    (saved.path / FACTS).mkdir(parents=True)
    text = json.dumps({"facts": content, "sha256": digest(content)})
    (saved.path / FACTS / "metadata").write_text(text)
    return saved.path


def moment(run: Path, resume: str = "auto") -> datetime:
    return run_moment(GRPOConfig(output_dir=run, resume=resume).resolved())


def is_now(time: datetime) -> bool:
    return abs(datetime.now() - time) < timedelta(minutes=5)


def test_a_new_run_has_the_time_of_its_start(tmp_path: Path) -> None:
    assert is_now(moment(tmp_path))
    save(tmp_path, 1, FIRST)
    assert complete_steps(tmp_path / "checkpoints") == [1]
    assert is_now(moment(tmp_path, "never"))


def test_a_run_that_continues_keeps_its_time(tmp_path: Path) -> None:
    save(tmp_path, 1, FIRST)
    assert moment(tmp_path) == FIRST


def test_damaged_facts_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, FIRST)
    newest = save(tmp_path, 2, FIRST)
    (newest / FACTS / "metadata").write_text("{")
    assert moment(tmp_path) == FIRST


def test_a_run_of_which_no_time_is_known_has_that_of_its_start(tmp_path: Path) -> None:
    save(tmp_path, 1, None)
    assert is_now(moment(tmp_path))


def test_a_run_from_another_ones_checkpoint_has_its_time(tmp_path: Path) -> None:
    saved = save(tmp_path / "earlier", 1, FIRST)
    save(tmp_path / "earlier", 2, FIRST)
    own = tmp_path / "own"
    for named in (tmp_path / "earlier", saved):
        assert moment(own, str(named)) == FIRST
    save(own, 3, SECOND, resume=str(saved))  # the run has begun, and continues its own
    assert moment(own, str(saved)) == SECOND
    assert moment(own, str(tmp_path / "earlier")) == FIRST
    assert is_now(moment(own, str(tmp_path / "nowhere")))


def test_prompts_of_another_time_are_named_with_a_way_to_continue(tmp_path: Path) -> None:
    now = facts(SECOND, "one")
    with pytest.raises(UserError, match=r"the time in the prompts: 2024-03-09T.* -> 2025-01-02T.*"):
        now.changes_since(facts(FIRST, "other"), tmp_path)
    with pytest.raises(UserError, match="Name it in the setting resume, from which prompts take"):
        now.changes_since(facts(FIRST, "other"), tmp_path)
    for saved in (facts(None, "other"), facts(SECOND, "other")):
        with pytest.raises(UserError, match=r"problems are others\)\. Set these back") as error:
            now.changes_since(saved, tmp_path)
        assert "the time in" not in str(error.value)
    assert now.changes_since(facts(FIRST, "one"), tmp_path) == []
