"""Configs and models are found by Hugging Face's `model_type`, or a published name."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from grpo_eqx import UserError
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.families.qwen3_moe import Qwen3MoeConfig
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.models.registry import init_model, published_config, read_config

TINY = Qwen2Config(
    hidden_size=4,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=16,
)


def test_a_config_is_read_by_its_model_type(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.to_json()))
    assert read_config(path) == TINY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", r"config.json holds \[\]: expected a JSON object"),
        ("{}", "model_type=None is not supported, only qwen2, qwen3"),
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported, only qwen2, qwen3"),
        ('{"model_type": ["qwen2"]}', "is not supported, only qwen2"),
    ],
)
def test_what_no_family_reads_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(path)


def test_published_models_are_known_by_name() -> None:
    assert published_config("Qwen/Qwen2.5-3B-Instruct") == Qwen2Config.from_name("3B")
    assert published_config("Qwen/Qwen2.5-4B") is None
    assert published_config("someone/3B") is None


def test_a_model_is_of_its_configs_family(key: jax.Array) -> None:
    assert isinstance(jax.eval_shape(lambda key: init_model(TINY, key), key), Qwen2)


def test_parameters_are_float32_with_x64_too(key: jax.Array) -> None:
    """Shapes of a new model are those that a checkpoint is read into."""
    experts = Qwen3MoeConfig(
        **dataclasses.asdict(TINY), num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8
    )
    with jax.enable_x64(True):
        for config in (TINY, experts):
            model = jax.eval_shape(functools.partial(init_model, config), key)
            shapes = jax.eval_shape(lambda x: with_adapters(x, Lora(rank=1, alpha=1.0), key), model)
            assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
