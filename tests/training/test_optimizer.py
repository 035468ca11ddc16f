"""The optimizer that a config describes."""

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.training.optimizer import LearningRate

RUN = {"steps": 5, "num_iterations": 2, "steps_per_generation": 4, "learning_rate": 1.0}


@pytest.mark.parametrize("course", ["linear", "cosine"])
def test_the_learning_rate_falls_over_all_updates_of_the_run(course: str) -> None:
    schedule = LearningRate.of(GRPOConfig(**RUN, lr_scheduler_type=course))
    assert float(schedule(0)) == 1
    assert float(schedule(20)) == pytest.approx(0.5)
    assert float(schedule(39)) > 0
    assert float(schedule(40)) == pytest.approx(0)


def test_it_rises_first_where_a_warm_up_is_asked_for() -> None:
    schedule = LearningRate.of(GRPOConfig(**RUN, warmup_steps=10, lr_scheduler_type="constant"))
    assert [float(schedule(update)) for update in (0, 5, 10, 40)] == pytest.approx([0, 0.5, 1, 1])
