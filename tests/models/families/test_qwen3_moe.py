"""Configs of Qwen3 with experts, and the folders of such models."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx import UserError
from grpo_eqx.common.errors import WeightsError
from grpo_eqx.models import Decoder, Qwen3MoeConfig, from_pretrained, save_pretrained
from grpo_eqx.models.registry import read_config
from grpo_eqx.sharding import parse_mesh

TINY = Qwen3MoeConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=12,
    moe_intermediate_size=8,
    num_experts=5,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    kept = {**TINY.to_json(), **fields}
    path.write_text(json.dumps({k: v for k, v in kept.items() if v is not None}))
    return path


def test_a_config_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_config(written(tmp_path)) == TINY


def test_either_name_of_the_number_of_experts_is_read(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, num_experts=None, num_local_experts=5)) == TINY
    assert read_config(written(tmp_path, num_experts=5, num_local_experts=5)) == TINY


@pytest.mark.parametrize(
    ("name", "value"),
    [("mlp_only_layers", [0]), ("decoder_sparse_step", 2), ("hidden_act", "gelu")],
)
def test_what_would_compute_otherwise_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name}=.* is not supported"):
        read_config(written(tmp_path, **{name: value}))


def test_more_experts_per_token_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"num_experts_per_tok \(6\) is above num_experts \(5\)"):
        read_config(written(tmp_path, num_experts_per_tok=6))


def test_the_loss_of_transformers_own_training_is_without_effect(tmp_path: Path) -> None:
    path = written(tmp_path, router_aux_loss_coef=0.01, output_router_logits=True)
    assert read_config(path) == TINY  # a warning would be an error


@pytest.mark.parametrize("mesh", ["auto", "2,2,2"])
def test_each_device_reads_its_part_of_every_expert(mesh: str, tmp_path: Path) -> None:
    model = Decoder.init(TINY, jax.random.key(0))
    save_pretrained(model, tmp_path)
    back = from_pretrained(tmp_path, parse_mesh(mesh).build())
    jax.tree.map(np.testing.assert_array_equal, model, back)
    if mesh == "2,2,2":
        part = back.layers.experts.down_proj.addressable_shards[0].data
        assert part.shape == (2, 5, 4, 8)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_pretrained(Decoder.init(TINY, jax.random.key(0)), tmp_path)
    written(tmp_path, num_experts=6)
    with pytest.raises(WeightsError, match=r"mlp\.gate\.weight' has shape \(5, 16\)"):
        from_pretrained(tmp_path)
