"""Runs that train adapters: what they keep, resume from and export."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.cli.main import main
from grpo_eqx.models import from_pretrained
from grpo_eqx.models.peft import CONFIG, WEIGHTS
from grpo_eqx.run.spec import RunSpec

PROBLEMS = Path(__file__).with_name("problems.jsonl")


def words(*, completions: list[str], **columns: object) -> list[float]:
    """A reward that an untrained model does not always get alike."""
    return [float(len(set(text.split()))) for text in completions]


def trainer(model: Path, folder: Path, **settings: Any) -> GRPOTrainer:
    cfg = GRPOConfig(
        **{
            "model": str(model), "data": str(PROBLEMS), "steps": 3, "prompts_per_step": 8,
            "num_generations": 2, "max_completion_length": 4, "eval_problems": 8,
            "lora_rank": 4, "lr_scheduler_type": "constant", "output_dir": str(folder),
            **settings,
        }
    )  # fmt: skip
    return GRPOTrainer(cfg, reward_funcs=[words])


def test_the_defaults_are_those_of_lora() -> None:
    cfg = GRPOConfig(lora_rank=4).resolved()
    assert (cfg.lora_alpha, cfg.lora_target) == (32, "all-linear")
    assert cfg.learning_rate == 10 * GRPOConfig().resolved().learning_rate
    of_others = GRPOConfig(model="Qwen/Qwen2.5-0.5B", lora_rank=4).resolved()
    assert of_others.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 16.0}, "lora_alpha is 16.0.* without lora_rank"),
        ({"lora_target": "q_proj"}, "lora_target .* without lora_rank"),
        ({"use_rslora": True}, "use_rslora .* without lora_rank"),
        ({"load_in_8bit": True}, "load_in_8bit .* without lora_rank"),
        ({"lora_rank": 4, "lora_target": "q_proj,"}, "lora_target is 'q_proj,': use all-linear"),
        (
            {"lora_rank": 4, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
            "sync_ref_model is on with lora_rank",
        ),
    ],
)
def test_settings_of_adapters_without_adapters_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        GRPOConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 4, "lora_target": "c_attn"}, "lora_target names 'c_attn'"),
        ({"lora_rank": 999}, "lora_rank is 999, and q_proj has a matrix"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_is_loaded(
    small_model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    for weights in (folder := Path(shutil.copytree(small_model, tmp_path / "m"))).glob("*.safe*"):
        weights.unlink()
    with pytest.raises(UserError, match=message):
        trainer(folder, tmp_path / "run", **settings)
    with pytest.raises(UserError, match=message):
        RunSpec.describe(GRPOConfig(model=str(folder), data=str(PROBLEMS), **settings))


def test_one_program_evaluates_adapters(small_model: Path, tmp_path: Path) -> None:
    made = trainer(small_model, tmp_path / "run")
    width, compiler = made.prompts.width(made.prompts.indices(0)), made.programs.compiler
    compiler.wait(made.sampler.key(8, 2, width))
    before = compiler.num_shapes["generate"]  # the rollout's, while the weights loaded
    made.evaluate()
    assert compiler.num_shapes["generate"] == before + 1


def test_a_passed_model_with_adapters_is_refused(small_model: Path, tmp_path: Path) -> None:
    made = trainer(small_model, tmp_path / "run")
    with pytest.raises(UserError, match="the model that is passed has adapters"):
        GRPOTrainer(
            made.cfg, model=made.state.model, tokenizer=made.tokenizer, reward_funcs=[words]
        )


@pytest.mark.slow
def test_a_run_keeps_the_adapters_alone_and_goes_on_from_them(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(small_model, tmp_path / "whole", beta=0.04)
    assert whole.state.reference is None
    whole.fit()
    trainer(small_model, tmp_path / "cut", beta=0.04, steps=2).fit()
    again = trainer(small_model, tmp_path / "cut", beta=0.04, steps=3)
    again.fit()
    assert eqx.tree_equal(*jax.device_get((again.state.model, whole.state.model)))

    names = json.loads((tmp_path / "whole/checkpoints/step_3/facts/metadata").read_text())
    shapes = names["facts"]["shapes"]
    assert all(".adapter." in name for name in shapes if name.startswith("model."))
    assert {x.name for x in (tmp_path / "whole" / "model").iterdir()} >= {CONFIG, WEIGHTS}

    command = ["grpo-eqx", "export", str(tmp_path / "whole"), "--merge", "--output"]
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "merged")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    merged = from_pretrained(tmp_path / "merged")
    assert not merged.has_adapters
    ids = jax.numpy.arange(12)[None] + 5
    adapted = from_pretrained(tmp_path / "whole" / "model")
    np.testing.assert_allclose(merged.logits(ids), adapted.logits(ids), atol=1e-4)
    assert np.abs(merged.logits(ids) - from_pretrained(small_model).logits(ids)).max() > 1e-3


@pytest.mark.slow
def test_an_adapter_is_trained_on(small_model: Path, tmp_path: Path) -> None:
    trainer(small_model, tmp_path / "first").fit()
    adapter = tmp_path / "first" / "model"
    with pytest.raises(UserError, match="is an adapter, and lora_rank is not set"):
        trainer(adapter, tmp_path / "refused", lora_rank=None)
    second = trainer(adapter, tmp_path / "second", steps=1)
    assert eqx.tree_equal(*jax.device_get((second.state.model, from_pretrained(adapter))))
    second.fit()
    saved = json.loads((tmp_path / "second" / "model" / CONFIG).read_text())
    assert saved["base_model_name_or_path"] == str(small_model)
