"""Settings that a report shows: what was chosen, and not what follows from it."""

import dataclasses
import json
from typing import Any

from grpo_eqx import GRPOConfig, recipes
from grpo_eqx.tracking.report.settings import special_settings


def recorded(cfg: GRPOConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(cfg.resolved()), default=str))


def names(*configs: GRPOConfig) -> list[str]:
    return [setting.name for setting in special_settings([recorded(cfg) for cfg in configs])]


def test_a_run_with_the_defaults_has_none() -> None:
    assert names(GRPOConfig()) == []


def test_what_follows_from_another_setting_is_not_shown() -> None:
    assert names(GRPOConfig(beta=0.01)) == ["beta"]  # not kl_estimator, which is k3 then
    assert names(GRPOConfig(model="a/b")) == ["model"]  # nor the learning rate of larger models
    (changed,) = special_settings([recorded(GRPOConfig(model="a/b", learning_rate=1e-5))])[1:]
    assert (changed.name, changed.values, changed.default) == ("learning_rate", ["1e-05"], "1e-06")


def test_settings_that_others_require_are_shown() -> None:
    assert "epsilon_high" in names(recipes.cispo())


def test_runs_are_compared_setting_by_setting() -> None:
    first, second = GRPOConfig(seed=1), GRPOConfig(seed=1, reward_funcs=("correct", "format"))
    shown = special_settings([recorded(first), recorded(second)])
    assert [(x.name, list(x.values), x.default, x.differs) for x in shown] == [
        ("reward_funcs", ["correct", "correct, format"], "correct", True),
        ("seed", ["1", "1"], "0", False),
    ]


def test_a_setting_without_meaning_in_a_run_is_unused_there() -> None:
    first = GRPOConfig(log_completions=True, num_completions_to_print=2)
    shown = {x.name: x for x in special_settings([recorded(first), recorded(GRPOConfig())])}
    printed = shown["num_completions_to_print"]
    assert (printed.values, printed.default) == (["2", "unused"], "4")
    pair = GRPOConfig(max_num_seqs=32), GRPOConfig()  # None has a meaning of its own
    (slots,) = special_settings(list(map(recorded, pair)))
    assert (slots.values, slots.default) == (["32", "None"], "None")


def test_settings_of_another_version_are_shown_as_they_are() -> None:
    config = recorded(GRPOConfig(steps=5)) | {"of_a_subclass": [1, 2], "loss_type": "gone"}
    shown = {x.name: (list(x.values), x.default) for x in special_settings([config])}
    assert shown["of_a_subclass"] == (["1, 2"], "-")
    assert shown["loss_type"] == (["gone"], "dapo")


def test_what_was_passed_is_shown_and_leaves_other_defaults() -> None:
    config = recorded(GRPOConfig(beta=0.01)) | {"data": "Dataset, passed to GRPOTrainer"}
    shown = {x.name: (list(x.values), x.default) for x in special_settings([config])}
    assert shown["data"] == (["Dataset, passed to GRPOTrainer"], "word_problems")
    assert shown.keys() == {"data", "beta"}


def test_a_config_that_could_not_be_read_has_no_values() -> None:
    (seed,) = special_settings([recorded(GRPOConfig(seed=3)), {}])
    assert seed.values == ["3", "-"]
