"""What reward functions may return: the same in this process, awaited and in a worker."""

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import RewardError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards import RewardRunner
from grpo_eqx.rewards.contract import read_rewards
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Samples
from grpo_eqx.rewards.workers import WorkerPool

from . import odd_rewards

KINDS = [*odd_rewards.ACCEPTED, *odd_rewards.FAILED, *odd_rewards.BROKEN]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A worker that returns whatever a test asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        importable = importlib.import_module("odd_rewards")
        funcs = {kind: functools.partial(importable.returns, kind) for kind in KINDS}
        pool = WorkerPool(funcs, 1)
        yield pool
        pool.close()


def here(kind: str, func: Any = odd_rewards.returns) -> Any:
    funcs = {kind: functools.partial(func, kind)}
    with RewardRunner(funcs, limits=RewardLimits(failures="drop")) as runner:
        rewards = runner([Prompt("?", {})], [["a"]], [[[1]]])
    assert rewards.failed is not None
    return rewards.each.item(), bool(rewards.failed.item())


def awaited(kind: str) -> Any:
    return here(kind, odd_rewards.returns_later)


def in_worker(pool: WorkerPool, kind: str) -> Any:
    (outcome,) = pool.run(kind, Samples(["?"], ["a"], {}), RewardLimits())
    return outcome


@pytest.mark.parametrize("kind", odd_rewards.ACCEPTED)
def test_what_is_a_reward_is_the_same_everywhere(pool: WorkerPool, kind: str) -> None:
    _, expected = odd_rewards.ACCEPTED[kind]
    assert in_worker(pool, kind) == expected
    for reward, failed in (here(kind), awaited(kind)):
        assert not failed
        assert reward == expected or (expected is None and reward != reward)


@pytest.mark.parametrize("kind", odd_rewards.FAILED)
def test_what_no_float_holds_is_a_failure_everywhere(
    pool: WorkerPool, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _, reason = odd_rewards.FAILED[kind]
    outcome = in_worker(pool, kind)
    assert isinstance(outcome, Failure)
    assert outcome.reason.startswith(reason)
    assert len(outcome.reason) < 200
    for call in (here, awaited):
        _, failed = call(kind)
        assert failed
        assert f"reward function {kind} {outcome.reason} for completion 0" in capfd.readouterr().err


@pytest.mark.parametrize("kind", odd_rewards.BROKEN)
def test_what_is_no_list_of_rewards_is_an_error_everywhere(pool: WorkerPool, kind: str) -> None:
    _, how = odd_rewards.BROKEN[kind]
    errors = []
    for call in (lambda: here(kind), lambda: awaited(kind), lambda: in_worker(pool, kind)):
        with pytest.raises(RewardError) as raised:
            call()
        errors.append(str(raised.value))
    for error in errors:
        assert error.startswith(f"reward function {kind} returned ")
        assert how in error
        assert len(error) < 350
        assert error.isprintable()


def test_rewards_are_read_in_their_order_and_counted() -> None:
    assert read_rewards([1, None, 2.5], 3) == [1.0, None, 2.5]
    assert str(read_rewards([1, "no"], 2, first=7)).startswith("returned 'no' for completion 8:")
    broken = read_rewards([0.0] * 1000, 2)
    assert str(broken).startswith("returned 1000 values for 2 completions:")
