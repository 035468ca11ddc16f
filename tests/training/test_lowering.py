"""The programs are the same for shapes as for arrays, and what they exchange on a TPU pod."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.generation import SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.engine import TOKENS
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.registry import init_model
from grpo_eqx.objective import Objective
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.planner.hlo import Collective, Program, collectives
from grpo_eqx.planner.routes import Route
from grpo_eqx.planner.work import work_levels
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.sharding import parse_mesh, parse_rollout_sharding
from grpo_eqx.training import UpdateOptions
from grpo_eqx.training.lowering import model_shapes

from .runner import Batch, Runner

TINY = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
OF_0_5B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=4,
    num_attention_heads=14,
    num_key_value_heads=2,
)
"""The layers of Qwen2.5-0.5B, four of them."""


def runner_of(
    config: Qwen2Config,
    mesh: jax.sharding.Mesh,
    prompt_length: int,
    length: int,
    rollout_sharding: str = "legacy",
    **fields: Any,
) -> Runner:
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    micro, quantile = fields.pop("micro", None), fields.pop("top_entropy_quantile", 1.0)
    options = SamplerOptions(
        sampling=Sampling(),
        max_prompt_length=prompt_length,
        max_completion_length=length,
        stopping=fields.pop("stopping", Stopping.of_ids([3], config.vocab_size)),
        pad_id=0,
        seed=0,
        dtype=jnp.dtype("float32" if on_cpu else "bfloat16"),
        rollout_sharding=parse_rollout_sharding(rollout_sharding),
        attention=best_attention(mesh),
        **fields,
    )
    objective = Objective(epsilon=0.2, epsilon_high=0.2, max_completion_length=length)
    updates = UpdateOptions(temperature=1.0, objective=objective, top_entropy_quantile=quantile)
    return Runner(
        options, updates, mesh, ChunkedLoss(), optax.adamw(1e-6), remat="full", micro=micro,
        tokens_per_micro_batch=64 if on_cpu else 8192,
    )  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("mesh_name", ["auto", pytest.param("2,2,2", marks=pytest.mark.slow)])
def test_shapes_give_the_programs_that_arrays_do(mesh_name: str) -> None:
    mesh = parse_mesh(mesh_name).build()
    runner, model = runner_of(TINY, mesh, 16, 8), model_shapes(TINY, mesh)
    generated = runner.sampler.lower(model, 8, 4, 16).compile()
    assert generated.out_info.ids.shape == (8, 4, 8)
    updated = runner.lower_update(model, 8, 4).compile()
    state, argument = updated.out_info[:2], updated.args_info[0][:2]
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, argument)


@pytest.mark.grid
@pytest.mark.parametrize("mesh_name", ["2,4,1", pytest.param("2,2,2", marks=pytest.mark.slow)])
def test_an_update_for_shapes_is_that_of_a_ragged_batch(mesh_name: str) -> None:
    """The same text, and so the same memory; scores and rows come to be as in training."""
    mesh = parse_mesh(mesh_name).build()
    runner = runner_of(
        TINY, mesh, 16, 8, stopping=Stopping.of_ids(range(3, 20), 64), top_entropy_quantile=0.5,
        micro=1,
    )  # fmt: skip
    model = init_model(TINY, jax.random.key(0))
    model = jax.device_put(model, model.shardings(mesh))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 64, n).tolist() for n in rng.integers(1, 17, 16)]
    sample = runner.sample(model, prompts, 4)
    packing = runner.packing(sample)
    assert packing.number < packing.shape.most_micro_batches
    scores = runner.scorer(model, runner.rows(sample, packing))
    rows = runner.rows_of(Batch(sample, rng.normal(size=(16, 4)).astype(np.float32)), packing)
    rows = dataclasses.replace(
        rows, old_logps=scores.logps, ref_logps=scores.logps, entropies=scores.entropies
    )
    planned = runner.lower_update(
        model_shapes(TINY, mesh), 16, 4, ("old_logps", "ref_logps", "entropies")
    )
    opt_state = runner.updater.init(model).opt_state
    assert runner.updater.lower(model, opt_state, rows, None).as_text() == planned.as_text()


def on_v6e_16(
    program: str,
    mesh_name: str,
    rollout_sharding: str = "legacy",
    config: Qwen2Config = OF_0_5B,
    **fields: Any,
) -> list[Collective]:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    mesh = parse_mesh(mesh_name).build(described_devices("v6e-16"))
    runner = runner_of(config, mesh, 128, 128, rollout_sharding, **fields)
    model = model_shapes(config, mesh)
    if program == "generate":
        lowered = runner.sampler.lower(model, 16, 4, 128)
    else:
        lowered = runner.lower_update(model, 16, 4)
    return collectives(lowered.compile().as_text())


@pytest.mark.slow
def test_no_table_of_embeddings_nor_its_gradient_is_ever_whole() -> None:
    mesh, config = parse_mesh("2,4,1").build(), dataclasses.replace(TINY, vocab_size=2**14)
    lowered = runner_of(config, mesh, 16, 8).lower_update(model_shapes(config, mesh), 8, 4)
    exchanged = [x.shapes for x in collectives(lowered.compile().as_text())]
    assert any(f"[{2**14},{config.hidden_size // 4}]" in shapes for shapes in exchanged)
    assert not any(f"[{2**14},{config.hidden_size}]" in shapes for shapes in exchanged)


@pytest.mark.topology
@pytest.mark.long
def test_an_update_gathers_no_more_than_a_matrix_of_one_layer_at_a_time() -> None:
    found = on_v6e_16("update", "auto")
    gathers = [x for x in found if x.kind == "all-gather"]
    matrix = OF_0_5B.hidden_size * OF_0_5B.intermediate_size * 2  # bfloat16
    assert max(x.num_bytes for x in gathers) == matrix
    assert all(x.loops >= 1 for x in gathers if x.num_bytes > 2**20)


@pytest.mark.topology
@pytest.mark.long
def test_maxtext_leaves_the_weights_where_they_are_while_it_decodes() -> None:
    """And legacy brings them to the completions, but for the head."""
    found = {style: on_v6e_16("generate", "auto", style) for style in ("legacy", "maxtext")}
    decoding = {style: [x for x in every if x.loops >= 2] for style, every in found.items()}
    matrix = OF_0_5B.hidden_size * OF_0_5B.intermediate_size * 2
    gathered = {
        style: sum(x.num_bytes for x in found if x.kind == "all-gather" and x.num_bytes >= matrix)
        for style, found in decoding.items()
    }
    assert gathered["maxtext"] == 0
    # Devices draw from the parts of the vocabulary that they score: no logits are gathered.
    of_a_device = 16 * 4 * OF_0_5B.vocab_size * 4 // 16
    sent = [x.num_bytes for x in found["maxtext"] if x.kind == "all-gather" and x.loops == 1]
    assert max(sent, default=0) < of_a_device
    assert matrix <= gathered["legacy"] <= 3 * matrix


@pytest.mark.grid
@pytest.mark.topology
@pytest.mark.parametrize(
    ("mesh", "rollout_dtype", "itemsize"),
    [
        ("host_local", None, 2),
        ("auto", "int8", 1),
        pytest.param("auto", None, 2, marks=pytest.mark.long),
        pytest.param("host_local", "int8", 1, marks=pytest.mark.long),
    ],
)
def test_replicated_sends_weights_once_and_nothing_while_it_decodes(
    mesh: str, rollout_dtype: str | None, itemsize: int
) -> None:
    """But for the scalars by which all devices know when to stop."""
    dtype = None if rollout_dtype is None else jnp.dtype(rollout_dtype)
    found = on_v6e_16("generate", mesh, "replicated", rollout_dtype=dtype)
    shapes = model_shapes(OF_0_5B, parse_mesh("auto").build())
    weights = sum(x.size for x in jax.tree.leaves(shapes))
    once = sum(x.num_bytes for x in found if x.loops == 0)
    assert 0.99 * itemsize * weights < once < 1.05 * itemsize * weights
    assert all(x.shapes == "s32[]" for x in found if x.loops)


@pytest.mark.topology
@pytest.mark.parametrize("rollout_dtype", [None, pytest.param("int8", marks=pytest.mark.long)])
def test_tensor_adds_up_twice_a_layer(rollout_dtype: str | None) -> None:
    """And sends nothing else for a layer of a token. Two devices hold each head of keys."""
    config = dataclasses.replace(OF_0_5B, num_attention_heads=16, hidden_size=1024)
    dtype = None if rollout_dtype is None else jnp.dtype(rollout_dtype)
    found = on_v6e_16("generate", "auto", "tensor:4", config=config, rollout_dtype=dtype)
    # Some have an axis of length 1 for the token.
    of_layer = [(x.kind, x.shapes.replace(",1,", ",")) for x in found if x.loops == 2]
    of_group = f"bf16[4,4,{config.hidden_size}]"  # 16 x 4 completions over 4 groups
    assert of_layer == [("all-reduce", of_group)] * 2
    assert max(x.num_bytes for x in found if x.loops == 0) < 2 * config.num_head_parameters


@pytest.mark.topology
@pytest.mark.long
def test_int8_weights_halve_what_a_token_reads() -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    mesh = parse_mesh("auto").build(described_devices("v6e-1"))
    # As many layers as the chip's vector memory does not hold.
    config = dataclasses.replace(OF_0_5B, num_hidden_layers=24, vocab_size=8192)
    shapes = model_shapes(config, mesh)
    read = []
    for dtype in (None, jnp.dtype("int8")):
        runner = runner_of(config, mesh, 128, 128, "replicated", rollout_dtype=dtype)
        lowered = runner.sampler.lower(shapes, 1, 8, 128)
        token, layer = bytes_of_decoding(lowered.compile().as_text())
        read.append(token + config.num_hidden_layers * layer)
    weights = sum(x.size for x in jax.tree.leaves(shapes))
    assert read[0] == pytest.approx(2 * weights, rel=0.1)
    assert read[1] == pytest.approx(weights, rel=0.1)


def bytes_of_decoding(text: str) -> tuple[float, float]:
    """Bytes of memory for a token, without those in its layers, and for one layer."""
    levels = work_levels(text, lambda group: (Route("ici", 1), 0))
    token, layer, *_ = [x for x in levels if x.loops and x.loops[0].scope == TOKENS]
    assert (len(token.loops), len(layer.loops)) == (1, 2)
    return token.work.num_bytes, layer.work.num_bytes


def decoding_program(**fields: Any) -> str:
    """The compiled program of 16 x 4 completions of up to 256 tokens on one described TPU."""
    pytest.importorskip("libtpu", reason="needs the plan extra")
    mesh = parse_mesh("auto").build(described_devices("v6e-1"))
    run = RunSpec.describe(GRPOConfig())
    multiple = make_programs(run, mesh).sampler.options.kv_head_multiple
    runner = runner_of(OF_0_5B, mesh, 128, 256, kv_head_multiple=multiple, **fields)
    lowered = runner.sampler.lower(model_shapes(OF_0_5B, mesh), 16, 4, 128)
    return lowered.compile().as_text()


@pytest.mark.topology
def test_decoding_copies_no_int8_cache() -> None:
    """Written several heads at once, int8 keys would be laid out otherwise than they are read."""
    _, layer = bytes_of_decoding(decoding_program(kv_cache_dtype=jnp.dtype("int8")))
    weights = 2 * OF_0_5B.num_active_parameters / OF_0_5B.num_hidden_layers
    heads = OF_0_5B.num_hidden_layers * 2 * OF_0_5B.num_key_value_heads
    cache = 16 * 4 * heads * 256 * 128  # heads of 64 are filled up to 128
    assert layer < weights + cache / 4


@pytest.mark.topology
def test_decoding_copies_no_cache_of_small_heads() -> None:
    """In a TPU's vectors of 128 elements, heads of 64 are laid out otherwise, unless filled up."""
    program = Program(decoding_program())
    caches = [  # keys or values of several layers
        array.shape
        for each, loops, _ in program.walk(program.entry, 0, "")
        if loops >= 2 and each.kind == "copy"
        for array in each.arrays
        if len(array.sizes) == 6 and array.sizes[0] > 1
    ]
    assert not caches


@pytest.mark.topology
def test_rows_of_several_sizes_fill_whole_vectors_of_a_tpu() -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    mesh = parse_mesh("auto").build(described_devices("v6e-1"))
    for length in (48, 333, 1000):
        run = RunSpec.describe(GRPOConfig(max_completion_length=length))
        assert make_programs(run, mesh).rollout_rows.width % 128 == 0
