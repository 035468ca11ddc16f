"""Metrics of a step."""

from grpo_eqx.tracking.metrics import merge_updates


def test_updates_merge_by_mean_or_extreme_as_the_name_says() -> None:
    updates = [
        {"loss": 1.0, "policy_ratio/min": 0.5, "policy_ratio/max": 2.0, "clip_ratio/low_min": 0.0},
        {"loss": 3.0, "policy_ratio/min": 0.7, "policy_ratio/max": 1.0, "clip_ratio/low_min": 0.1},
    ]
    assert merge_updates(updates) == {
        "loss": 2.0, "policy_ratio/min": 0.5, "policy_ratio/max": 2.0, "clip_ratio/low_min": 0.0,
    }  # fmt: skip
