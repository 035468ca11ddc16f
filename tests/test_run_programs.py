"""The programs of a run are listed once, for whoever compiles them before they are called."""

from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.run_programs import in_order_of_use, run_programs
from grpo_eqx.run_spec import RunSpec

SMALL: dict[str, Any] = {"prompts_per_step": 8, "num_generations": 2, "max_completion_length": 8}


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, set()),
        ({"num_iterations": 2}, {"score"}),
        ({"beta": 0.1}, {"score_reference"}),
        ({"beta": 0.1, "steps_per_generation": 2}, {"score", "score_reference"}),
        ({"eval_steps": 5, "num_generations_eval": 4}, {"evaluate_samples"}),
    ],
)
def test_the_settings_decide_which_there_are(settings: dict[str, Any], others: set[str]) -> None:
    run = RunSpec.describe(GRPOConfig(**SMALL, **settings))
    programs = run.programs(run.mesh(jax.devices()[:1]))
    names = {each.name for each in run_programs(run, programs)}
    assert names == {"generate", "update", "evaluate", *others}


def test_a_step_begins_with_the_rollout_and_ends_with_the_update() -> None:
    run = RunSpec.describe(GRPOConfig(**SMALL, beta=0.1, num_iterations=2))
    programs = run.programs(run.mesh(jax.devices()[:1]))
    keys = [key for key, _ in in_order_of_use(run, programs, (16, 24))]
    first, second = (
        programs.key_of_generate(run.cfg.prompts_per_step, run.cfg.num_generations, width)
        for width in (16, 24)
    )
    assert keys == [first, "score", "score_reference", "update", second]


def test_entropies_of_shares_are_a_program_of_their_own() -> None:
    settings = GRPOConfig(**SMALL, top_entropy_quantile=0.5, steps_per_generation=2)
    run = RunSpec.describe(settings)
    programs = run.programs(run.mesh(jax.devices()[:1]))
    _, *others = [key for key, _ in in_order_of_use(run, programs, (16,))]
    assert others == ["score", "score_share", "update"]
