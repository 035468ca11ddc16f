"""The layout that `rollout_sharding auto` chooses, and what it says of it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.families.qwen3_moe import Qwen3MoeConfig
from grpo_eqx.rollout.layout_choice import AutoSharding, Batch, DecodingWork, Estimate
from grpo_eqx.sharding import parse_mesh, parse_rollout_sharding
from grpo_eqx.training.lowering import model_shapes

MESH = parse_mesh("auto").build()
CONFIG = Qwen2Config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)
EXPERTS = Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=4,
    num_experts_per_tok=1,
    moe_intermediate_size=256,
)
BATCH = Batch(16, 8, None)


def work(**changes: object) -> DecodingWork:
    shapes = jax.eval_shape(lambda m: m.astype(jnp.bfloat16), model_shapes(CONFIG, MESH))
    fields = DecodingWork(
        config=CONFIG,
        weights=shapes,
        itemsize=2,
        kv_itemsize=2.0,
        prompt_length=64,
        completion_length=64,
        resident_bytes=0,
        usable_bytes=2**40,
        device_kind="TPU v6 lite",
    )
    return dataclasses.replace(fields, **changes)


def estimate(name: str, **changes: object) -> Estimate:
    layout = parse_rollout_sharding(name).layout(MESH, *BATCH)
    return work(**changes).estimate(layout, BATCH)


def weight_bytes() -> int:
    return sum(x.size * 2 for x in jax.tree.leaves(work().weights))


def test_it_reads_all_weights_or_their_part_of_them() -> None:
    """Keys and values are of 16 completions and 2 prompts on each device, or their part of more."""
    position = 2 * 8 * 4 * 64 * 2
    for name, devices in [("replicated", 1), ("tensor:2", 2), ("tensor:4", 4)]:
        cached = devices * (2 * 64 + 16 * 64) * position // devices
        logits = devices * 16 * 1024 * 4 * 4 / devices
        found = estimate(name).num_bytes - cached - logits
        assert found == pytest.approx(weight_bytes() / devices, rel=0.01)


def test_a_token_passes_through_the_experts_that_it_uses() -> None:
    """All are read, whatever it uses; the time differs by the FLOPs of those used."""
    fewer, more = (dataclasses.replace(EXPERTS, num_experts_per_tok=number) for number in (1, 3))
    shapes = jax.eval_shape(lambda m: m.astype(jnp.bfloat16), model_shapes(fewer, MESH))
    few, many = (estimate("replicated", config=each, weights=shapes) for each in (fewer, more))
    assert few.num_bytes == many.num_bytes
    flops = 2 * 16 * EXPERTS.num_hidden_layers * 2 * 3 * 512 * 256
    assert many.seconds - few.seconds == pytest.approx(flops / 918e12, rel=1e-3)


def test_sending_weights_takes_the_time_of_the_links() -> None:
    """Of v6e: 90 GB a second, and a microsecond a hop."""
    head = 1024 * 512 * 2
    sent = (weight_bytes() - head + 16 * 1024 * 4) * 7 / 8 / 90e9 + 9 * 7e-6
    difference = estimate("legacy").seconds - estimate("replicated").seconds
    assert difference == pytest.approx(sent, rel=0.01)


@pytest.mark.topology
def test_hops_add_up_over_the_axes_of_a_torus() -> None:
    """Small activations of all 256 devices wait for 15 + 15 hops, where a ring has 255."""
    pytest.importorskip("libtpu", reason="needs the plan extra")
    from grpo_eqx.planner.devices import described_devices

    mesh, batch = parse_mesh("auto").build(described_devices("v6e-256")), Batch(256, 1, None)
    legacy, replicated = (
        work().estimate(parse_rollout_sharding(name).layout(mesh, *batch), batch).seconds
        for name in ("legacy", "replicated")
    )
    head = 1024 * 512 * 2
    sent = (weight_bytes() - head + 1024 * 4) * 255 / 256 / 90e9 + 9 * 30e-6
    assert legacy - replicated == pytest.approx(sent, rel=0.02)


def test_maxtext_over_tp_is_a_group_that_shares_the_weights() -> None:
    """The layout of tensor:8, but for its prompts: neither is far from the other."""
    mesh, batch = parse_mesh("1,1,8").build(), BATCH
    both = [parse_rollout_sharding(name).layout(mesh, *batch) for name in ("maxtext", "tensor:8")]
    over_tp, shared = (work().estimate(layout, batch).seconds for layout in both)
    assert over_tp == pytest.approx(shared, rel=0.1)


def test_an_embedding_of_its_own_is_held_but_not_read() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    shapes = jax.eval_shape(lambda m: m.astype(jnp.bfloat16), model_shapes(config, MESH))
    table = 1024 * 512 * 2
    tied, untied = estimate("replicated"), estimate("replicated", config=config, weights=shapes)
    assert untied.num_bytes - tied.num_bytes == table
    assert untied.seconds == tied.seconds


def test_the_fastest_that_fits_is_chosen() -> None:
    fastest = AutoSharding(work(kv_itemsize=1e-9)).layout(MESH, *BATCH)
    names = "replicated", "tensor:2", "tensor:4", "tensor:8", "legacy", "maxtext"
    seconds = {name: estimate(name, kv_itemsize=1e-9).seconds for name in names}
    first, second = sorted(seconds, key=seconds.__getitem__)[:2]
    assert fastest.why.startswith(f"{first}: ")
    assert f"(auto: about {seconds[first] * 1e3:.3g} ms a token; {second} takes " in fastest.why


def test_what_does_not_fit_is_not_chosen() -> None:
    needed = {name: estimate(name).num_bytes for name in ("replicated", "tensor:2", "tensor:8")}
    fits_two = int(needed["tensor:2"] / 0.9) + 1
    chosen = AutoSharding(work(usable_bytes=fits_two)).layout(MESH, *BATCH)
    assert not chosen.why.startswith("replicated")
    nothing = AutoSharding(work(usable_bytes=1)).layout(MESH, *BATCH)
    assert "(auto: none fits by an estimate, and this takes the least memory" in nothing.why


def test_a_batch_that_only_few_devices_divide_is_decoded_by_those_that_do() -> None:
    chosen = AutoSharding(work()).layout(MESH, 3, 1)
    assert chosen.why.startswith(("tensor:8", "maxtext"))
    first = AutoSharding().layout(MESH, *BATCH)
    assert first.why == "replicated: each of the 8 devices holds all weights"
