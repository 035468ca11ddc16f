"""A model's counts: by hand, and against XLA's own."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import grpo_eqx
from grpo_eqx.models.causal_attention import Visible
from grpo_eqx.models.cost import (
    cache_bytes,
    decode_bytes,
    num_parameters,
    projected_bytes,
    rollout_flops,
    update_flops,
)
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.families.qwen3_moe import Qwen3MoeConfig

# Two layers of 16 + 8 + 8 + 16 parameters for attention and 36 for the MLP, a head of 20.
TINY = Qwen2Config(
    hidden_size=4,
    intermediate_size=3,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=5,
)
PROMPTS = np.array([2])
COMPLETIONS = np.array([[1, 3]])


def test_parameters_are_those_of_the_models_matrices(key: jax.Array) -> None:
    model = Qwen2.init(TINY, key)
    stacked = [x.size for x in jax.tree.leaves(model.layers) if x.ndim == 3]
    assert TINY.num_layer_parameters == sum(stacked) == 168
    assert TINY.num_head_parameters == model.head.size == 20
    for tied, number in ((True, 168 + 20), (False, 168 + 2 * 20)):
        assert num_parameters(dataclasses.replace(TINY, tie_word_embeddings=tied)) == number


def test_nothing_else_counts_from_numbers_of_parameters() -> None:
    package = Path(grpo_eqx.__file__).parent
    counts = re.compile(r"num_(layer|active|head)_parameters")
    readers = {
        path.parent.name for path in package.rglob("*.py") if counts.search(path.read_text())
    }
    assert readers == {"models"}


# As above, but for three experts in place of each MLP, of which a token uses two, and a router.
EXPERTS = Qwen3MoeConfig(
    hidden_size=4,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=5,
    moe_intermediate_size=3,
    num_experts=3,
    num_experts_per_tok=2,
)


def test_of_experts_a_token_passes_through_those_it_uses(key: jax.Array) -> None:
    model = Decoder.init(EXPERTS, key)
    matrices = [x.size for x in jax.tree.leaves(model.layers) if x.ndim >= 3]
    assert EXPERTS.num_layer_parameters == sum(matrices) == 2 * (48 + 3 * 4 + 3 * 36)
    assert EXPERTS.num_active_parameters == 2 * (48 + 3 * 4 + 2 * 36)
    assert TINY.num_active_parameters == TINY.num_layer_parameters


def test_experts_cost_the_flops_of_those_used_and_the_bytes_of_all() -> None:
    more = update_flops(EXPERTS, PROMPTS, COMPLETIONS) - update_flops(TINY, PROMPTS, COMPLETIONS)
    assert more == 6 * 6 * 2 * (3 * 4 + 36)
    few, many = (
        decode_bytes(
            config,
            PROMPTS,
            COMPLETIONS,
            num_decode_steps=3,
            num_copies=1,
            itemsize=2,
            kv_itemsize=2.0,
        )
        for config in (TINY, EXPERTS)
    )
    assert many - few == 2 * 3 * 2 * (3 * 4 + 2 * 36)


def test_flops_of_an_update_by_hand() -> None:
    # 6 tokens go through the layers, 4 of them through the head.
    products = 6 * (6 * 168 + 4 * 20)
    # The prompt's tokens see 1 and 2 keys, the completions' inputs 2, and 2, 3, 4.
    attention = 12 * 2 * 4 * (1 + 2 + 2 + 2 + 3 + 4)
    assert update_flops(TINY, PROMPTS, COMPLETIONS) == products + attention
    assert rollout_flops(TINY, PROMPTS, COMPLETIONS) == (products + attention) / 3
    assert update_flops(TINY, PROMPTS, COMPLETIONS, frozen=True) == products * 4 / 6 + attention


def test_bytes_of_a_rollout_by_hand() -> None:
    # The prompt is read at all three steps; the completions have 0, and 0, 1, 2 positions so far.
    positions = 3 * 2 + 0 + 0 + 1 + 2
    weights = 3 * (168 + 20)
    position = 2 * 2 * 1 * 2
    of_one_copy = decode_bytes(
        TINY, PROMPTS, COMPLETIONS, num_decode_steps=3, num_copies=1, itemsize=2, kv_itemsize=2.0
    )
    assert of_one_copy == 2 * (weights + position * positions)
    of_two = decode_bytes(
        TINY, PROMPTS, COMPLETIONS, num_decode_steps=3, num_copies=2, itemsize=4, kv_itemsize=4.0
    )
    assert of_two == 4 * (2 * weights + position * positions)
    assert cache_bytes(TINY, 2.0) == 2 * position


def test_what_a_layer_projects_is_about_the_widths_of_its_products() -> None:
    config = Qwen2Config.from_name("7B")
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_size
    assert projected_bytes(config, 2) == pytest.approx(
        2 * (heads + 2 * config.intermediate_size), rel=0.05
    )


def test_work_adds_up_over_prompts() -> None:
    twice = update_flops(TINY, np.tile(PROMPTS, 2), np.tile(COMPLETIONS, (2, 1)))
    assert twice == 2 * update_flops(TINY, PROMPTS, COMPLETIONS)


def test_a_group_costs_less_than_its_completions_alone() -> None:
    alone = update_flops(TINY, np.repeat(PROMPTS, 2), COMPLETIONS.T)
    shared = update_flops(TINY, PROMPTS, COMPLETIONS)
    prompt = update_flops(TINY, PROMPTS, np.array([[0]]))
    assert shared == alone - prompt


def test_no_length_overflows() -> None:
    config = Qwen2Config.from_name("72B")
    lengths = np.full((1024, 16), 32768, np.int32)
    flops = update_flops(config, lengths[:, 0], lengths)
    assert flops > 6 * 72e9 * lengths.sum(dtype=float)


def test_flops_are_those_that_xla_counts() -> None:
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1,  # XLA counts a loop's body once
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    )
    P, G, T = 2, 3, 8
    model = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    rows = jax.ShapeDtypeStruct((P, T + G * T), jnp.int32)

    def forward(model: Qwen2, rows: Array) -> Float[Array, ""]:
        visible = Visible.of_padded(jnp.ones(rows.shape, bool))
        return model.project_logits(model.hidden(rows, rows, visible).states[:, T:]).sum()

    def counted(function: Callable[..., object]) -> float:
        return jax.jit(function).lower(model, rows).cost_analysis()["flops"]

    flops = update_flops(config, np.full(P, T), np.full((P, G), T))
    assert counted(forward) == pytest.approx(flops / 3, rel=0.03)
    assert counted(jax.value_and_grad(forward)) == pytest.approx(flops, rel=0.03)
