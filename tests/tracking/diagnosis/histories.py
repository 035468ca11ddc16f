"""Synthetic histories of runs."""

from collections.abc import Callable, Mapping
from typing import Any

Value = float | Callable[[int], float]
"""A metric of all steps, or as a function of the step's number."""

SETTINGS: Mapping[str, Any] = {
    "steps": 40, "prompts_per_step": 16, "num_generations": 8, "max_completion_length": 48,
    "temperature": 1.0, "num_iterations": 1, "steps_per_generation": 1, "beta": 0.0,
    "entropy_coef": 0.0, "advantage_estimator": "grpo", "max_num_seqs": None, "top_p": 1.0,
    "multi_objective_aggregation": "sum_then_normalize", "micro_batch_size_per_device": None,
    "rollout_dtype": "auto", "kv_cache_dtype": "auto", "max_grad_norm": 1.0,
}  # fmt: skip
HEALTHY: Mapping[str, Value] = {
    "reward": lambda step: 0.35 + 0.01 * step + 0.08 * (step % 3 - 1),
    "reward_std": 0.48,
    "rewards/correct/mean": lambda step: 0.35 + 0.01 * step + 0.08 * (step % 3 - 1),
    "rewards/correct/std": 0.48,
    "frac_reward_zero_std": lambda step: 0.3 + 0.1 * (step % 4),
    "completions/mean_length": lambda step: 20.0 + step % 4,
    "completions/clipped_ratio": 0.0,
    "entropy": lambda step: 0.2 * 0.97**step,
    "loss": -0.01,
    "grad_norm": lambda step: 0.4 + 0.2 * (step % 3),
    "kl": lambda step: 0.002 * step,
    "clip_ratio/region_mean": 0.0,
    "sampling/sampling_logp_difference/mean": 4e-7,
    "skipped_updates": 0.0,
    "perf/padding_share": lambda step: 0.1 + 0.05 * (step % 3),
    "perf/slot_utilization": lambda step: 0.72 + 0.05 * (step % 3),
    "perf/balance": 0.95,
    "compile/num_programs": lambda step: 20.0 if step == 1 else 0.0,
    "compile/seconds": lambda step: 20.0 if step == 1 else 0.0,
    "step_time": lambda step: 25.0 if step == 1 else 1.0,
}


def steps_of(number: int = 40, **metrics: Value) -> list[dict[str, float]]:
    """The metrics of steps: those of a healthy run, but for what is given."""
    values = {**HEALTHY, **metrics}
    return [
        {"step": float(step), **{name: x(step) if callable(x) else x for name, x in values.items()}}
        for step in range(1, number + 1)
    ]


def evaluated(*pairs: tuple[int, float], problems: int = 512) -> list[dict[str, float]]:
    """Evaluations after steps, with their pass@1."""
    return [
        {"step": float(step), "eval/greedy/pass@1": x, "eval/num_problems": float(problems)}
        for step, x in pairs
    ]
