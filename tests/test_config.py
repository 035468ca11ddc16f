"""What a config refuses, and what it fills in."""

from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, UserError


def test_defaults_depend_on_the_model() -> None:
    embedded = GRPOConfig(seed=3).resolved()
    assert embedded.output_dir == Path("runs/tiny_qwen2-word_problems-seed3")
    real = GRPOConfig(model="Qwen/Qwen2.5-3B-Instruct", data="openai/gsm8k").resolved()
    assert real.output_dir == Path("runs/Qwen2.5-3B-Instruct-gsm8k-seed0")
    assert (real.learning_rate, real.max_completion_length) == (1e-6, 512)
    assert embedded.learning_rate > real.learning_rate


def test_given_values_are_kept() -> None:
    cfg = GRPOConfig(learning_rate=3e-5, epsilon=0.1, output_dir=Path("x")).resolved()
    assert (cfg.learning_rate, cfg.epsilon_high, cfg.output_dir) == (3e-5, 0.1, Path("x"))
    assert cfg.resolved() == cfg


def test_only_what_has_a_part_in_the_combination_is_filled_in() -> None:
    default = GRPOConfig().resolved()
    assert (default.epsilon, default.epsilon_high, default.scale_rewards) == (0.2, 0.2, "group")
    for name in (
        "kl_estimator", "use_bias_correction_kl", "ref_model_sync_steps", "sapo_temperature_pos",
        "importance_sampling_clip_max", "max_generation_batches", "wandb_project",
    ):  # fmt: skip
        assert getattr(default, name) is None, name
    sapo = GRPOConfig(loss_type="sapo", beta=0.1, advantage_estimator="rloo").resolved()
    assert (sapo.epsilon, sapo.sapo_temperature_neg, sapo.scale_rewards) == (None, 1.05, None)
    assert (sapo.kl_estimator, sapo.use_bias_correction_kl) == ("k3", True)
    assert GRPOConfig(reward_failures="drop").resolved().max_failed_rewards == 0.1
    masked = GRPOConfig(importance_sampling_mode="token_mask", importance_sampling_clip_min=0.5)
    assert masked.resolved().importance_sampling_clip_max is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "sapo", "epsilon_high": 0.28}, "epsilon_high is 0.28 with loss_type sapo"),
        ({"loss_type": "sapo", "epsilon": 0.2}, "epsilon is 0.2 with loss_type sapo"),
        ({"loss_type": "cispo"}, "cispo and epsilon_high is not set"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "the cap on the ratio itself"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.2}, "does not clip ratios"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 4.0}, "does not clip ratios"),
        (
            {
                "loss_type": "cispo",
                "epsilon_high": 5.0,
                "importance_sampling_level": "sequence_token",
            },
            "carry no gradient",
        ),
        ({"sapo_temperature_pos": 1.0}, "sapo_temperature_pos is 1.0 with loss_type dapo"),
        ({"delta": 1.1}, "delta is 1.1 and epsilon_high is 0.2"),
        ({"dual_clip": 1.25, "epsilon_high": 0.3}, "dual_clip is 1.25 and epsilon_high is 0.3"),
        ({"delta": 3.0, "dual_clip": 4.0}, "only the smaller would have an effect"),
        ({"kl_estimator": "k3"}, "kl_estimator is k3 with beta = 0: it would do nothing"),
        ({"kl_clamp": 10.0}, "kl_clamp is 10.0 with beta = 0"),
        ({"use_bias_correction_kl": True}, "with beta = 0"),
        ({"sync_ref_model": True}, "sync_ref_model is True with beta = 0"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "has mean zero"),
        ({"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": True}, "is unbiased"),
        (
            {"dynamic_sampling": True, "advantage_estimator": "reinforce"},
            "also learns from groups with equal rewards",
        ),
        ({"max_failed_rewards": 0.2}, "max_failed_rewards is 0.2 while reward_failures is stop"),
        (
            {"reward_timeout": 5.0, "reward_batch_timeout": 5.0},
            "reward_batch_timeout is 5.0, which ends every call before",
        ),
        ({"beta": 0.1, "ref_model_sync_steps": 4}, "while sync_ref_model is off"),
        ({"beta": 0.1, "ref_model_mixup_alpha": 0.5}, "while sync_ref_model is off"),
        ({"beta": 0.1, "sync_ref_model": True, "steps": 64}, "never move in time"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "which is not scaled"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "scale_rewards is none with multi_objective_aggregation",
        ),
        (
            {
                "multi_objective_aggregation": "normalize_then_sum",
                "advantage_estimator": "reinforce",
            },
            "it is defined only for grpo",
        ),
        ({"max_generation_batches": 3}, "while dynamic_sampling is off"),
        ({"max_generation_batches": 1, "dynamic_sampling": True}, "use 2 or more"),
        ({"importance_sampling_clip_max": 2.0}, "without importance_sampling_mode"),
        (
            {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": 0.5},
            "must be finite and above 1",
        ),
        (
            {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.0},
            "must be between 0 and 1",
        ),
        ({"off_policy_mask_threshold": float("inf")}, "off_policy_mask_threshold is inf"),
        ({"advantage_estimator": "reinforce", "scale_rewards": "group"}, "which is not scaled"),
        ({"wandb_project": "mine"}, "while wandb is disabled"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_dtype": "int16"}, "kv_cache_dtype is 'int16': use auto, float32, bfloat16"),
        ({"remat": "some"}, "remat is 'some': use "),
        ({"loss_type": None}, "loss_type is None: use grpo, "),
        ({"scale_rewards": True}, "scale_rewards is True: use group, batch, none, None"),
        ({"stop_strings": "</answer>"}, r"pass a tuple, \('</answer>',\)"),
        ({"seed": 1.5}, "seed is 1.5: use a whole number"),
        ({"warmup_steps": 0.1}, "warmup_steps is 0.1: use a whole number"),
        ({"num_generations": 8.0}, "num_generations is 8.0: use a whole number"),
    ],
)
def test_what_is_none_of_the_choices_is_refused(fields: dict[str, Any], message: str) -> None:
    """A command line refuses these by itself, Python does not; and tests check types before."""
    cfg = GRPOConfig()
    for name, value in fields.items():
        object.__setattr__(cfg, name, value)
    with pytest.raises(UserError, match=message):
        cfg.__post_init__()


def test_clip_ranges_without_effect_as_yet_are_named_not_refused() -> None:
    """They come into play with the first second update, and belong to a recipe."""
    assert GRPOConfig().without_effect() is None
    sequence = GRPOConfig(epsilon=0.1, importance_sampling_level="sequence")
    assert "epsilon, importance_sampling_level have no effect" in str(sequence.without_effect())
    sapo = GRPOConfig(loss_type="sapo", sapo_temperature_pos=2.0)
    assert "sapo_temperature_pos has no effect" in str(sapo.without_effect())
    assert GRPOConfig(epsilon=0.1, num_iterations=2).without_effect() is None
    assert GRPOConfig(epsilon=0.1, steps_per_generation=2).without_effect() is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1: .* use at least 2"),
        ({"prompts_per_step": 0}, "prompts_per_step is 0: it must be at least 1"),
        ({"max_completion_length": 0}, "max_completion_length is 0"),
        ({"micro_batch_size_per_device": 0}, "micro_batch_size_per_device is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"temperature": 0.0}, "training samples"),
        ({"learning_rate": -1e-4}, "learning_rate is -0.0001"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"epsilon": 1.5}, "epsilon is 1.5"),
        ({"epsilon_high": 0.0}, "epsilon_high is 0.0"),
        ({"warmup_steps": 200}, r"warmup_steps \(200\) exceeds the run's 150 updates"),
        ({"temperature": float("nan")}, "training samples"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0"),
        ({"reward_weights": (float("inf"),)}, "must be finite"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, r"seed is 4294967296: it must be below 2\^32"),
        ({"seed": 2**70}, f"seed is {2**70}: it must be below"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0"),
        ({"overlong_buffer": 1.0}, "overlong_buffer is 1.0"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"steps_per_generation": 3}, r"prompts_per_step \(16\) cannot be split evenly"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**fields)
