"""Reward functions that do what they should not: every other reward is right, nothing is left."""

import contextlib
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grpo_eqx.common.errors import RewardFailureError
from grpo_eqx.common.process_state import _DRAWS, _KINDS, StateGuard, _read
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards import RewardRunner
from grpo_eqx.rewards.limits import RewardLimits

from ..processes import with_variable
from . import odd_rewards
from .hostile import ASYNC, CASES, EVERYWHERE, OK, WORKERS

MARK = f"GRPO_EQX_TEST_OF_HOSTILE_{os.getpid()}"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "rewards.md"
PLACES = [(place, policy) for place in EVERYWHERE for policy in ("stop", "drop")]
ALL = [
    (place, policy, text)
    for place, policy in PLACES
    for text, case in CASES.items()
    if place in case.places
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="lists processes in /proc"),
]


def _runner(place: str, policy: str) -> RewardRunner:
    limits = RewardLimits(
        failures=policy,
        workers=2 * (place == WORKERS),
        timeout=3.0 if place in (ASYNC, WORKERS) else None,
    )
    importable = importlib.import_module("hostile")
    func = importable.obey_async if place == ASYNC else importable.obey
    return RewardRunner({"obey": func}, limits=limits)


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[tuple[str, str], RewardRunner]]:
    """Runners that last for all cases: what one leaves in this process would disturb the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        patch.setenv(MARK, "1")
        made = {each: _runner(*each) for each in PLACES if each[0] != WORKERS}
        yield made
        for runner in made.values():
            runner.close()
    left = with_variable(MARK)
    assert not left


@pytest.fixture
def runner(
    runners: dict[tuple[str, str], RewardRunner], place: str, policy: str
) -> Iterator[RewardRunner]:
    """One of these, or one with workers of its own: what a function changes there may stay."""
    runner = runners.get((place, policy)) or _runner(place, policy)
    yield runner
    if place == WORKERS:
        runner.close()


@pytest.mark.grid
@pytest.mark.parametrize(("place", "policy", "text"), ALL, ids=map("-".join, ALL))
def test_a_hostile_function_costs_its_own_completion_at_most(
    runner: RewardRunner,
    place: str,
    policy: str,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if text == "close stdout" and place != WORKERS:  # not pytest's own
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    case = CASES[text]
    runner._guard = StateGuard()  # which has said nothing yet
    columns = {"tests": [["1"], {"a": [2]}]}
    prompts, ids = [Prompt("?", columns)], [[[1], [2, 3], [4]]]
    other = {_DRAWS} | ({"the standard streams"} if text == "close stdout" else set())
    kinds = [name for name in _KINDS if name not in other]
    before = {name: _read(name) for name in kinds}
    draws = np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    begun = time.monotonic()
    if isinstance(case.answer, str) and policy == "stop":
        named = rf"^reward function obey {case.answer}.* for completion 1 of 3 \(['\"]"
        with pytest.raises(RewardFailureError, match=named) as raised:
            runner(prompts, [["a", text, "ccc"]], ids)
        assert len(str(raised.value)) < 1000
        assert str(raised.value).isprintable()
    else:
        rewards = runner(prompts, [["a", text, "ccc"]], ids)
        own = np.nan if isinstance(case.answer, str) else case.answer
        np.testing.assert_array_equal(rewards.each, [[[1.0, own, 3.0]]])
    assert time.monotonic() - begun < 60
    assert {name: _read(name) for name in kinds} == before
    assert np.random.get_state()[1].tobytes() == draws  # type: ignore[union-attr]
    assert (columns, ids) == ({"tests": [["1"], {"a": [2]}]}, [[[1], [2, 3], [4]]])
    said = capfd.readouterr().err
    assert "Traceback" not in said
    if isinstance(case.answer, str) and policy == "drop":
        warned = rf"warning: reward function obey {case.answer}.* for completion 1 of 3 \(['\"]"
        assert re.search(warned, said)
    if case.said is not None and place != WORKERS:
        assert re.search(rf"warning: reward function obey changed [^:]*{case.said}", said)


def test_a_worker_puts_back_names_and_streams_that_later_calls_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    obey = importlib.import_module("hostile").obey
    runner = RewardRunner({"obey": obey}, limits=RewardLimits(workers=1, timeout=30.0))
    breaking = ["guard", "replace all names", "replace stdout by what raises", "close stdout"]
    texts = [*breaking, "close many descriptors", "print a flood"]
    with contextlib.closing(runner):
        rewards = runner([Prompt("?", {})], [texts], [[[1]] * len(texts)])
    np.testing.assert_array_equal(rewards.each, OK)


def test_there_are_three_hundred_cases_and_the_guide_has_their_kinds() -> None:
    returned = len(odd_rewards.ACCEPTED) + len(odd_rewards.FAILED) + len(odd_rewards.BROKEN)
    assert len(ALL) + 3 * returned >= 300
    table = GUIDE.read_text().split("## Whatever a function does")[1].split("\n## ")[0]
    rows = dict.fromkeys(re.findall(r"^\| \*\*(\w+)\*\*", table, re.MULTILINE))
    assert list(rows) == list(dict.fromkeys(["returns", *(case.group for case in CASES.values())]))
