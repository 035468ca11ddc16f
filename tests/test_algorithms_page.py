"""The index of papers has every variant of the config, and names tests that exist."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common import choices
from grpo_eqx.settings.recipes import RECIPES

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guides" / "algorithms.md"
VARIANTS = {
    "advantage_estimator": choices.AdvantageEstimator,
    "scale_rewards": choices.ScaleRewards,
    "multi_objective_aggregation": choices.MultiObjectiveAggregation,
    "loss_type": choices.LossType,
    "importance_sampling_level": choices.ImportanceSamplingLevel,
    "kl_estimator": choices.KLEstimator,
    "importance_sampling_mode": choices.SamplerCorrection,
}
OTHERS = {
    "epsilon", "epsilon_high", "delta", "dual_clip", "sapo_temperature_pos",
    "sapo_temperature_neg", "mask_truncated_completions", "top_entropy_quantile", "entropy_coef",
    "steps_per_generation", "beta", "kl_clamp", "use_bias_correction_kl", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha", "importance_sampling_clip_min",
    "importance_sampling_clip_max", "off_policy_mask_threshold", "overlong_buffer",
    "dynamic_sampling", "router_replay",
}  # fmt: skip
"""Settings of the objective that have no choices."""


def quoted() -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))


@pytest.mark.parametrize("field", VARIANTS)
def test_every_choice_is_on_the_page(field: str) -> None:
    assert {field, *get_args(VARIANTS[field])} <= quoted()


def test_every_setting_of_the_objective_is_on_the_page() -> None:
    assert GRPOConfig.__dataclass_fields__.keys() >= OTHERS
    assert quoted() >= OTHERS


def test_no_choice_is_left_out() -> None:
    """A choice of another kind than these is none of the objective."""
    here = {name for name in vars(choices) if get_args(getattr(choices, name))}
    elsewhere = {"LearningRateCourse", "Remat", "Searchable", "RolloutShardingName"}
    named = {name for name in here for kind in VARIANTS.values() if getattr(choices, name) == kind}
    assert here == named | elsewhere


def test_every_test_that_it_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(), f"{file}::{test}"


def test_recipes_set_what_the_page_says() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`\w+=.*) \|$", PAGE.read_text(), re.M))
    assert rows.keys() == RECIPES.keys()
    for name, row in rows.items():
        settings: dict[str, Any] = {}
        exec("settings.update(" + ", ".join(re.findall(r"`([^`]+)`", row)) + ")", locals())
        assert RECIPES[name]() == dataclasses.replace(GRPOConfig(), **settings)
