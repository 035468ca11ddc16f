"""Names of metrics are known before the first step."""

from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.loop.metric_names import metric_names
from grpo_eqx.tracking.metrics import OF_THE_MACHINE

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "reward_funcs": ("correct", "tags"),
            "reward_failures": "drop",
            "dynamic_sampling": True,
            "num_iterations": 2,
            "beta": 0.1,
            "entropy_coef": 0.1,
            "importance_sampling_mode": "token_truncate",
        },
        {"max_staleness": 1, "importance_sampling_mode": "none"},
    ],
    ids=["default", "much", "carried over"],
)
def test_they_are_what_a_step_logs(
    small_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    cfg = GRPOConfig(
        model=str(small_model), data=str(PROBLEMS), steps=1, prompts_per_step=8,
        num_generations=2, max_completion_length=4, eval_problems=8, output_dir=str(tmp_path),
        **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(cfg)
    passes = trainer._run.passes
    known = metric_names(
        trainer.cfg,
        trainer.rewards,
        trainer.programs.updater.options.objective,
        passes,
        trainer._run.model,
    )
    (logged,) = trainer.fit().history
    of_the_step = {name for name in logged if not name.startswith(OF_THE_MACHINE)}
    assert of_the_step == {"step", *known}
