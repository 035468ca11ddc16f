"""The registry of metrics: it has all that runs log, and nothing else."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.loop.metric_names import metric_names
from grpo_eqx.rewards.make_rewards import make_rewards
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.recipes import RECIPES
from grpo_eqx.tracking.metric_registry import METRICS, find_metric

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
TINY: dict[str, Any] = {
    "data": str(PROBLEMS), "prompts_per_step": 8, "num_generations": 2,
    "max_completion_length": 4, "eval_problems": 8,
}  # fmt: skip
MUCH: dict[str, Any] = {
    "reward_funcs": ("correct", "tags"),
    "reward_failures": "drop",
    "overlong_buffer": 0.25,
    "dynamic_sampling": True,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "beta": 0.1,
    "entropy_coef": 0.1,
    "top_entropy_quantile": 0.5,
    "mask_truncated_completions": True,
    "off_policy_mask_threshold": 1.0,
    "rollout_dtype": "int8",
    "kv_cache_dtype": "int8",
    "lora_rank": 2,
}
"""Settings that add metrics, or that change how they are computed."""
OF_EXPERTS = {"moe/max_vio", "moe/unused_experts", "moe/routing_agreement"}
"""Metrics of models with experts, which another test runs."""
OF_IDS_WITHOUT_TOKEN = {"completions/num_ids_without_token"}
"""Metrics of models with ids that the tokenizer lacks, which another test runs."""
OF_TOOLS = {
    "tools/call_frequency", "tools/failure_frequency", "tools/turns", "tools/num_lost",
    "time/tools/call_s", "time/tools/wait_s",
}  # fmt: skip
"""Metrics of completions that act, which another test runs."""
OF_AGENTS = {
    "agents/requests", "agents/forks", "agents/drifted_tokens", "agents/num_refused",
    "time/agents/run_s",
}  # fmt: skip
"""Metrics of completions that agents make, which another test runs."""
OF_ACCELERATORS = {
    "perf/mfu/update", "perf/bandwidth_utilization/rollout",
    "memory/train/bytes_in_use_max_gib", "memory/train/peak_bytes_in_use_max_gib",
}  # fmt: skip
"""Metrics that CPUs do not have; other tests compute them by these names."""


def names_of_steps(cfg: GRPOConfig) -> list[str]:
    """Names that the steps of a run log, without those of the machine."""
    run = RunSpec.describe(cfg)
    objective = make_programs(run, run.build_mesh()).updater.options.objective
    return metric_names(run.cfg, make_rewards(run.cfg, None), objective, run.passes, run.model)


@pytest.fixture(scope="module")
def known_before_runs() -> set[str]:
    """Names of the steps of all recipes, and with much else."""
    settings = {**TINY, "model": "tiny_qwen2"}
    configs = [make(**settings) for make in RECIPES.values()]
    configs += [
        GRPOConfig(**settings, **MUCH),
        GRPOConfig(**settings, loss_type="sapo", importance_sampling_mode="sequence_mask"),
        GRPOConfig(**settings, importance_sampling_level="sequence_token", num_iterations=2),
        GRPOConfig(**settings, max_staleness=1, importance_sampling_mode="coupled"),
    ]
    return {name for cfg in configs for name in names_of_steps(cfg)}


def test_a_name_has_one_entry_and_a_unit_and_a_sentence() -> None:
    examples = {re.sub(r"\{\w+\}", "x", metric.name): metric for metric in METRICS}
    assert len(examples) == len(METRICS)
    for example, metric in examples.items():
        found = [each.name for each in METRICS if each.pattern.fullmatch(example)]
        assert found == [metric.name]
        assert metric.meaning.endswith("."), metric.name
        assert not metric.healthy.endswith("."), metric.name


def test_a_pattern_stands_for_any_name_and_others_have_no_entry() -> None:
    for name, entry in {
        "rewards/correct/mean": "rewards/{func}/mean",
        "rewards/a/b/mean": "rewards/{func}/mean",
        "eval/temperature_0.8/pass@16": "eval/{sampling}/pass@{k}",
        "eval/greedy/strict/pass@1": "eval/{sampling}/strict/pass@{k}",
        "eval/greedy/words": "eval/{sampling}/{metric}",
        "eval/greedy/strict/pass@1/ci_low": "eval/{sampling}/{figure}/ci_low",
        "compile/num_shapes/score": "compile/num_shapes/{program}",
    }.items():
        assert (metric := find_metric(name)) is not None
        assert metric.name == entry
    for name in ("rewards/mean", "reward_", "a/reward", "eval/greedy/pass@", "rewards//mean"):
        assert find_metric(name) is None, name


def test_the_metrics_of_all_recipes_have_entries(known_before_runs: set[str]) -> None:
    assert [name for name in sorted(known_before_runs) if find_metric(name) is None] == []


def words(*, completions: list[str], **columns: object) -> list[float]:
    """A metric of evaluations."""
    return [float(len(text.split())) for text in completions]


@pytest.mark.slow
def test_a_run_with_much_on_logs_entries_only_and_no_entry_is_logged_by_none(
    small_model: Path, tmp_path: Path, known_before_runs: set[str]
) -> None:
    evaluations = {"eval_steps": 1, "num_generations_eval": 2, "eval_temperature": 0.8}
    cfg = GRPOConfig(
        model=str(small_model), steps=2, output_dir=tmp_path, **TINY, **MUCH, **evaluations
    )
    GRPOTrainer(cfg, eval_metrics=[words]).fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = {name for row in rows for name in row}
    assert [name for name in sorted(logged) if find_metric(name) is None] == []
    elsewhere = OF_ACCELERATORS | OF_EXPERTS | OF_IDS_WITHOUT_TOKEN | OF_TOOLS | OF_AGENTS
    used = Counter(find_metric(name) for name in logged | known_before_runs | elsewhere)
    assert [metric.name for metric in METRICS if metric not in used] == []
