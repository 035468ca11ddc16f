"""The programs of a run are listed once, for whoever compiles them before they are called."""

from pathlib import Path
from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.run.to_compile import in_order_of_use, run_programs

SMALL: dict[str, Any] = {
    "data": str(Path(__file__).parents[1] / "problems.jsonl"),
    "prompts_per_step": 8, "num_generations": 2, "max_completion_length": 8,
}  # fmt: skip


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
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    names = {each.name for each in run_programs(run, programs)}
    assert names == {"generate", "update", "evaluate", *others}


def test_a_step_begins_with_the_rollout_and_ends_with_the_update() -> None:
    run = RunSpec.describe(GRPOConfig(**SMALL, beta=0.1, num_iterations=2))
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    keys = [key for key, _ in in_order_of_use(run, programs, (16, 24))]
    first, second = (
        programs.sampler.key(run.cfg.prompts_per_step, run.cfg.num_generations, width)
        for width in (16, 24)
    )
    assert keys == [first, "score", "score_reference", "update", second]


def test_entropies_of_shares_are_a_program_of_their_own() -> None:
    settings = GRPOConfig(**SMALL, top_entropy_quantile=0.5, steps_per_generation=2)
    run = RunSpec.describe(settings)
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    _, *others = [key for key, _ in in_order_of_use(run, programs, (16,))]
    assert others == ["score", "score_share", "update"]


def test_completions_of_several_turns_are_sampled_by_programs_of_their_own() -> None:
    run = RunSpec.describe(GRPOConfig(**SMALL, max_num_seqs=8), acts=True)
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    of_rollouts = ["weights", "prefill", "slots", "decode", "extend", "admit"]
    of_evaluations = [f"evaluate {name}" for name in of_rollouts]
    names = [each.name for each in run_programs(run, programs)]
    assert names == ["update", *of_rollouts, *of_evaluations]


@pytest.mark.parametrize("caches", ["recompute", "keep"])
def test_completions_that_go_on_are_read_anew_or_lie_beside_the_update(caches: str) -> None:
    cfg = GRPOConfig(
        **SMALL, max_staleness=1, importance_sampling_mode="none", carried_caches=caches
    )
    run = RunSpec.describe(cfg)
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    found = {each.name: each for each in run_programs(run, programs)}
    sampling = ["weights", "prefill", "slots", "decode", "reread", "admit"]
    assert list(found) == ["update", *sampling, "evaluate"]
    assert (found["update"].beside() is not None) == (caches == "keep")


@pytest.mark.parametrize("on_start", [False, True])
def test_programs_of_turns_are_compiled_in_the_order_of_their_use(on_start: bool) -> None:
    cfg = GRPOConfig(**SMALL, eval_steps=5, eval_on_start=on_start, eval_problems=4)
    run = RunSpec.describe(cfg, acts=True)
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    keys = list(map(str, dict(in_order_of_use(run, programs, (16, 24)))))
    first, second, evaluation = (
        [f"{name} (prompts of {width} tokens)" for name in ("prefill", "slots", "decode", "extend")]
        for width in (16, 24, run.prompts.heldout)
    )
    evaluation = ["weights", *evaluation]
    steps = ["weights", *first, "update", *second]
    assert keys == (evaluation + steps if on_start else steps + evaluation)


NUMBERS: dict[str, Any] = {
    "steps": 77,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 5,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.2,
    "temperature": 0.7,
    "seed": 7,
}
"""Settings that are numbers in every run, each with another value than its default."""
TERMS: dict[str, Any] = {
    "beta": 0.1,
    "kl_clamp": 10.0,
    "entropy_coef": 0.01,
    "top_entropy_quantile": 0.3,
    "top_p": 0.9,
    "min_p": 0.1,
    "delta": 1.5,
    "importance_sampling_mode": "token_truncate",
    "importance_sampling_clip_min": 0.5,
    "importance_sampling_clip_max": 2.0,
    "off_policy_mask_threshold": 0.1,
    "num_iterations": 2,
    "eval_steps": 5,
    "num_generations_eval": 2,
    "eval_temperature": 0.6,
}
"""Settings with numbers that add something to a program."""
OTHER_TERMS: dict[str, Any] = {
    **TERMS,
    **{name: 0.9 * value for name, value in TERMS.items() if isinstance(value, float)},
    "epsilon": 0.1,
    "epsilon_high": 0.15,
    "delta": 1.3,
    "num_iterations": 3,
    "eval_steps": 10,
    "reward_weights": (2.0,),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"dual_clip": 3.0}, NUMBERS | {"dual_clip": 2.5}),
        (TERMS, NUMBERS | OTHER_TERMS),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "optimizer": "lion", "lora_rank": 2},
            NUMBERS | {"epsilon_high": 3.0},
        ),
        (
            {"loss_type": "sapo", "loss_backend": "pallas"},
            NUMBERS | {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
        ),
    ],
    ids=lambda settings: ",".join(list(settings)[:2]),
)
def test_other_numbers_make_no_other_program(
    settings: dict[str, Any], others: dict[str, Any]
) -> None:
    """What is lowered is the same text, so a cache has the compiled program."""
    lowered = [texts(**settings), texts(**settings | others)]
    assert lowered[0].keys() == lowered[1].keys()
    assert [name for name, text in lowered[0].items() if text != lowered[1][name]] == []


def texts(**settings: Any) -> dict[str, str]:
    run = RunSpec.describe(GRPOConfig(**SMALL | settings))
    programs = make_programs(run, run.mesh(jax.devices()[:1]))
    return {x.name: x.lower().as_text() for x in run_programs(run, programs)}
