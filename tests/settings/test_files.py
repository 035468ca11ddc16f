"""Settings in files, as YAML and JSON write them."""

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig, recipes
from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.files import read_settings, to_yaml


def test_values_get_the_types_of_their_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 1e-5\nsteps: 7.0\nreward_funcs: [correct, format]\nbeta: 0\ntop_k: None\n"
    )
    assert read_settings(path) == {
        "learning_rate": 1e-5, "steps": 7, "reward_funcs": ("correct", "format"), "beta": 0.0,
        "top_k": None,
    }  # fmt: skip


UNUSUAL = recipes.dapo(steps=3, stop_strings=("\n",), system_prompt="hi 😀")


@pytest.mark.parametrize("cfg", [GRPOConfig(), UNUSUAL])
def test_what_is_printed_and_what_a_run_records_is_read_back(
    tmp_path: Path, cfg: GRPOConfig
) -> None:
    cfg, path = cfg.resolved(), tmp_path / "settings"
    for text in (to_yaml(cfg), json.dumps(dataclasses.asdict(cfg), indent="\t")):
        path.write_text(text, encoding="utf-8")
        assert GRPOConfig(**read_settings(path)) == cfg


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: 3", "max_steps is an unknown setting: use steps, which counts rollouts"),
        ("steps: x", "steps is 'x': use a whole number"),
        ("steps: x\nseed: -1", "steps is 'x': use .*seed is -1: it must be"),
        ("training:\n  max_steps: 3", "write what is in training at the top level. max_steps is"),
        (
            "model:\n  path: m\n  lr: 1",
            "write what is in model at the top level. path is an unknown setting: use ",
        ),
        (
            "actor:\n  optim:\n    lr: 1\n  checkpoint:\n    save_contents: []",
            "in actor, optim at the top level. checkpoint is an unknown .* lr is an unknown set",
        ),
        (
            "rollout:\n  name: vllm\n  temperature: 1.0",
            "what is in rollout at the top level. rollout.name is an unknown setting: there is no",
        ),
        (
            "scale_reward: group\nbeta: x",
            r"scale_reward is an unknown setting: did you mean scale_rewards\? beta is 'x': use a",
        ),
        ("steps: [", "is not valid YAML .* at line 1, column 9"),
        ("- 3", "has no settings by name"),
        ("3: 4", "has the name 3: use names that are texts"),
        ("recipe: dapo", "recipe is an unknown setting"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"config '.*run.yaml'.*{message}"):
        read_settings(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_settings(tmp_path / "nowhere.yaml")


def test_a_file_may_have_no_setting_yet_and_have_what_is_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# later")
    assert read_settings(path) == {}
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty: write settings into it"):
        read_settings(path)
    path.write_text("recipe: dapo")
    assert read_settings(path, ["recipe"]) == {"recipe": "dapo"}
