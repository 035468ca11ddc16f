"""What a config refuses, and what it fills in."""

from pathlib import Path

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
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**fields)
