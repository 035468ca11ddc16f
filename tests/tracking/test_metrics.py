"""Metrics of a step."""

import numpy as np
import pytest

from grpo_eqx.rewards import Rewards
from grpo_eqx.tracking import metrics
from grpo_eqx.tracking.metrics import StepClock, merge_updates, reward_metrics


def test_rewards_have_trls_names() -> None:
    metrics = reward_metrics(Rewards.of(("correct",), np.array([[[1.0, 0.0], [0.0, 1.0]]]), (1.0,)))
    assert metrics["reward"] == metrics["rewards/correct/mean"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.0
    np.testing.assert_allclose(metrics["reward_std"], np.sqrt(1 / 3))


def test_groups_without_two_rewards_count_neither_as_equal_nor_as_different() -> None:
    nan = np.nan
    of_none, of_one, equal, different = [
        [nan] * 3,
        [1.0, nan, nan],
        [1.0, nan, 1.0],
        [1.0, 2.0, nan],
    ]

    def share(*groups: list[float]) -> float:
        rewards = Rewards.of(("only",), np.array([groups]), (1.0,))
        return reward_metrics(rewards)["frac_reward_zero_std"]

    assert share(of_none, of_one, equal, different) == share(equal, different) == 0.5
    assert share(of_none, of_one, equal) == 1.0
    assert np.isnan(share(of_none, of_one))


def test_updates_merge_by_mean_or_extreme_as_the_name_says() -> None:
    updates = [
        {"loss": 1.0, "policy_ratio/min": 0.5, "policy_ratio/max": 2.0, "clip_ratio/low_min": 0.0},
        {"loss": 3.0, "policy_ratio/min": 0.7, "policy_ratio/max": 1.0, "clip_ratio/low_min": 0.1},
    ]
    assert merge_updates(updates) == {
        "loss": 2.0, "policy_ratio/min": 0.5, "policy_ratio/max": 2.0, "clip_ratio/low_min": 0.0,
    }  # fmt: skip


def test_the_clock_averages_the_latest_ten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    clock, averages = StepClock(), []
    for seconds in range(1, 13):
        now += seconds - 0.5
        clock.lap("rollout")
        now += 0.5
        clock.lap("update")
        step = clock.metrics()
        assert step["step_time"] == step["time/train/step_s"] == seconds
        assert step["time/train/rollout_s"] == seconds - 0.5
        averages.append(step["time/train/step_avg_last10_s"])
        clock.next_step()
    assert averages[:3] == [1.0, 1.5, 2.0]
    assert averages[-1] == sum(range(3, 13)) / 10
