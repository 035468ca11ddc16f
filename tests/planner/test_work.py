"""Work of hand-made programs, which is known exactly, and of what compilers write."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.generation.engine import TOKENS
from grpo_eqx.models.causal_attention import BlockSizes
from grpo_eqx.planner.routes import Route
from grpo_eqx.planner.step_time import Rates, program_time
from grpo_eqx.planner.trips import Decoding, Expected
from grpo_eqx.planner.work import Level, Loop, Work, work_levels
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.tracking.device_links import LinkRates
from grpo_eqx.tracking.device_peaks import DevicePeaks

MESH = parse_mesh("1,8,1").build()
LINK = Route("ici", 2)


def levels_of(function, *shapes) -> list[Level]:
    text = jax.jit(function).lower(*shapes).compile().as_text()
    return work_levels(text, lambda group: (LINK, 3))


def total(levels: list[Level], open_trips: float = 1) -> Work:
    """Work of all levels, with as many trips of each open loop."""
    whole = Work()
    for level in levels:
        times = 1.0
        for loop in level.loops:
            times *= open_trips if loop.trips is None else loop.trips
        whole += level.work * times
    return whole


def matrix(*sizes: int, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    sharding = None if spec is None else NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)


def test_one_product() -> None:
    (level,) = levels_of(lambda a, b: a @ b, matrix(32, 48), matrix(48, 80))
    assert level.loops == ()
    assert level.work == Work(2.0 * 32 * 48 * 80, 4.0 * (32 * 48 + 48 * 80 + 32 * 80))


def test_a_loop_of_products_has_the_known_number_of_trips() -> None:
    def power(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 7, lambda _, x: x @ a, a)

    levels = levels_of(power, matrix(64, 64))
    assert [loop.trips for level in levels for loop in level.loops] == [7]
    whole = total(levels)
    assert whole.flops == 7 * 2 * 64**3
    product, copy = 3 * 4 * 64**2, 2 * 4 * 64**2
    # Some compilers copy the argument before the loop, and the result in each trip.
    assert 7 * product <= whole.num_bytes <= 7 * (product + copy + 32) + copy + 32


def test_a_gather_in_a_loop_receives_what_the_others_have() -> None:
    rows = PartitionSpec("fsdp")

    def product(_: jax.Array, x: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec()))
        return jax.lax.with_sharding_constraint(x @ (whole.T @ whole), NamedSharding(MESH, rows))

    levels = levels_of(lambda x: jax.lax.fori_loop(0, 5, product, x), matrix(64, 16, spec=rows))
    gathered = 4 * 64 * 16
    assert total(levels).received == {LINK: pytest.approx(5 * gathered * 7 / 8)}
    assert total(levels).hops == 5 * 3


def test_an_all_reduce_takes_its_hops_twice_and_a_step_of_a_ring_one() -> None:
    def exchanged(x: jax.Array) -> jax.Array:
        ring = [(i, (i + 1) % 8) for i in range(8)]
        return jax.lax.ppermute(jax.lax.psum(x, "fsdp"), "fsdp", ring)

    rows = PartitionSpec("fsdp")
    mapped = jax.shard_map(exchanged, mesh=MESH, in_specs=rows, out_specs=rows, check_vma=False)
    work = total(levels_of(mapped, matrix(64, 16, spec=rows)))
    part = 4 * 8 * 16
    assert work.received == {LINK: pytest.approx(2 * part * 7 / 8 + part)}
    assert work.hops == 2 * 3 + 1


def test_loops_within_a_loop_whose_trips_are_given() -> None:
    def products(a: jax.Array, n: jax.Array) -> jax.Array:
        def outer(_: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 3, lambda _, y: y @ a, x) @ a

        return jax.lax.fori_loop(0, n, outer, a)

    levels = levels_of(products, matrix(64, 64), jax.ShapeDtypeStruct((), jnp.int32))
    trips = [[loop.trips for loop in level.loops] for level in levels if level.work.flops]
    assert trips == [[None], [None, 3]]
    assert total(levels, open_trips=11).flops == 11 * (3 + 1) * 2 * 64**3
    once, twice = (total(levels, open_trips=n).num_bytes for n in (1, 2))
    thrice = total(levels, open_trips=3).num_bytes
    assert thrice - twice == twice - once >= 4 * 3 * 4 * 64**2


def test_slices_read_and_updates_write_what_they_touch() -> None:
    def put(table: jax.Array, i: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(table, i, 1)
        return jax.lax.dynamic_update_slice_in_dim(table, row * 2, i + 1, 0)

    donated = jax.jit(put, donate_argnums=0)
    shapes = matrix(4096, 8), jax.ShapeDtypeStruct((), jnp.int32)
    text = donated.lower(*shapes).compile().as_text()
    assert total(work_levels(text, lambda group: (LINK, 3))).num_bytes < 10 * 4 * 8


def test_of_branches_the_most_counts() -> None:
    def either(a: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.cond(n > 0, lambda x: x @ x @ x, lambda x: x + 1, a)

    levels = levels_of(either, matrix(64, 64), jax.ShapeDtypeStruct((), jnp.int32))
    assert total(levels).flops == 2 * 2 * 64**3


TPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

%fused_computation (p0: bf16[36,64,128], p1: bf16[8,64], p2: s32[]) -> bf16[8,128] {
  %p0 = bf16[36,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %p2 = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p2, %zero, %zero), \
dynamic_slice_sizes={1,64,128}
  %weights = bf16[64,128]{1,0:T(8,128)(2,1)} bitcast(%slice)
  ROOT %product = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} convolution(%p1, %weights), \
dim_labels=bf_io->bf
}

%body (state: (s32[], bf16[8,64], bf16[36,64,128])) -> (s32[], bf16[8,64], bf16[36,64,128]) {
  %state = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, \
bf16[36,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=1
  %stack = bf16[36,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %out = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%stack, %x, %i), kind=kOutput, \
calls=%fused_computation
  %half = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} slice(%out), slice={[0:8], [0:64]}
  %s = (bf16[1,64]{1,0:T(8,128)(2,1)S(1)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) \
all-gather-start(%row), dimensions={0}, replica_groups=[1,8]<=[8]
  %d = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-gather-done(%s)
  %row = bf16[1,64]{1,0:T(8,128)(2,1)S(1)} slice(%half), slice={[0:1], [0:64]}
  ROOT %r = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, \
bf16[36,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%next, %d, %stack)
}

%condition (state: (s32[], bf16[8,64], bf16[36,64,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, \
bf16[36,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(36)
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (w: bf16[36,64,128], x: bf16[8,64]) -> bf16[8,64] {
  %w = bf16[36,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x.1 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(1)
  %cs = (bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, bf16[8,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
copy-start(%x.1)
  %cd = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%cs)
  %start = s32[]{:T(128)} constant(0)
  %first = s32[]{:T(128)} copy(%start)
  %t = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, \
bf16[36,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%first, %cd, %w)
  %loop = (s32[]{:T(128)}, bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, \
bf16[36,64,128]{2,1,0:T(8,128)(2,1)}) while(%t), condition=%condition, body=%body
  ROOT %y = bf16[8,64]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_a_tpu_reads_slices_and_keeps_the_rest_in_vector_memory() -> None:
    once, body = work_levels(TPU_TEXT, lambda group: (Route("ici", len(group)), 3))
    assert once.loops == ()
    assert once.work.num_bytes == 2 * 8 * 128 + 8  # x, in whole tiles, and the counter
    (loop,) = body.loops
    assert (loop.name, loop.trips) == ("loop", 36)  # the compiler does not say so
    assert body.work.flops == 2 * 8 * 64 * 128
    # One layer's weights, for which the counter is read; its increment and its test.
    assert body.work.num_bytes == 2 * 64 * 128 + 4 + 12 + 9
    assert body.work.received == {Route("ici", 8): 2 * 64 * 7}


def test_a_stack_that_a_fusion_lays_out_otherwise_is_read_a_layer_at_a_time() -> None:
    """As a TPU's compiler does where int8 weights enter a product."""
    text = TPU_TEXT.replace("dynamic-slice(%p0, ", "dynamic-slice(%other_layout, ").replace(
        "  %p1 = bf16[8,64]",
        "  %other_layout = bf16[36,64,128]{2,1,0:T(32,128)(4,1)} copy(%p0)\n  %p1 = bf16[8,64]",
        1,
    )
    assert "dynamic-slice(%other_layout, " in text
    assert "copy(%p0)" in text
    _, body = work_levels(text, lambda group: (LINK, 3))
    assert body.work.num_bytes == 2 * 64 * 128 + 4 + 12 + 9


def test_what_updates_a_copy_reads_and_writes_all_of_it() -> None:
    text = """HloModule m

%fused (p0: f32[36,8,128], p1: f32[1,8,128], p2: s32[]) -> f32[36,8,128] {
  %p0 = f32[36,8,128]{2,1,0} parameter(0)
  %p1 = f32[1,8,128]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %whole = f32[36,8,128]{1,2,0} copy(%p0)
  ROOT %put = f32[36,8,128]{1,2,0} dynamic-update-slice(%whole, %p1, %p2, %zero, %zero)
}

ENTRY %main (a: f32[36,8,128], b: f32[1,8,128], i: s32[]) -> f32[36,8,128] {
  %a = f32[36,8,128]{2,1,0} parameter(0)
  %b = f32[1,8,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[36,8,128]{1,2,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""
    layer = 4 * 8 * 128
    (level,) = work_levels(text, lambda group: (LINK, 3))
    assert level.work.num_bytes == 2 * 36 * layer + layer + 4
    (level,) = work_levels(text.replace("slice(%whole", "slice(%p0"), lambda group: (LINK, 3))
    assert level.work.num_bytes == 2 * layer + 4


def test_a_counter_may_grow_by_more_than_one() -> None:
    """As in the rings that a TPU's compiler makes of gathers and products."""
    text = TPU_TEXT.replace(
        "%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(5)"
    )
    _, body = work_levels(text, lambda group: (LINK, 3))
    assert [loop.trips for loop in body.loops] == [8]


def test_levels_survive_json() -> None:
    levels = work_levels(TPU_TEXT, lambda group: (Route("ici", len(group)), 3))
    assert [Level.from_json(level.to_json()) for level in levels] == levels


def test_levels_of_a_batch_that_is_a_window() -> None:
    """A TPU writes a product of a batch as a convolution that meets one position in each window."""
    text = """HloModule m

ENTRY %main (a: f32[8,32,16], b: f32[8,16,24]) -> f32[8,32,24] {
  %a = f32[8,32,16]{2,1,0} parameter(0)
  %b = f32[8,16,24]{2,1,0} parameter(1)
  ROOT %c = f32[8,32,24]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, \
dim_labels=0bf_0io->0bf
}
"""
    (level,) = work_levels(text, lambda group: (LINK, 3))
    assert level.work.flops == 2 * 8 * 32 * 16 * 24


@pytest.mark.topology
def test_products_for_a_described_tpu() -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    from grpo_eqx.planner.devices import described_devices

    device = described_devices("v6e-1")[0]
    here = jax.sharding.SingleDeviceSharding(device)

    def program(x: jax.Array, stack: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, stack)
        return x, jnp.einsum("bij,bkj->bik", batch, batch)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=here)

    lowered = jax.jit(program).lower(shape(64, 256), shape(6, 256, 256), shape(4, 128, 64))
    levels = work_levels(lowered.compile().as_text(), lambda group: (LINK, 3))
    assert [[loop.trips for loop in level.loops] for level in levels] == [[], [6]]
    assert levels[0].work.flops == 2 * 4 * 128 * 128 * 64
    assert levels[1].work.flops == 2 * 64 * 256 * 256
    assert levels[1].work.num_bytes == pytest.approx(2 * 256 * 256, rel=0.01)


works = st.builds(
    Work,
    st.floats(0, 1e15),
    st.floats(0, 1e12),
    st.dictionaries(
        st.builds(Route, st.sampled_from(["ici", "network", "memory"]), st.integers(1, 6)),
        st.floats(0, 1e12),
    ),
)
loops = st.lists(st.sampled_from([Loop("a", 3, ""), Loop("b", None, "", TOKENS)]), max_size=2)
DECODING = Decoding(
    num_completions=8,
    num_slots=8,
    num_shards=1,
    max_length=32,
    prompt_length=8,
    attention_blocks=BlockSizes(8, 8),
    cache_parts=1,
)


@given(
    levels=st.lists(st.tuples(loops.map(tuple), works), min_size=1, max_size=4),
    more=works,
    length=st.integers(1, 32),
)
def test_more_work_never_takes_less_time(levels, more, length) -> None:
    """A collective, or any other instruction."""
    rates = Rates(DevicePeaks(1e14, 1e12), LinkRates(1e11, 2e10))

    def time(extra: Work):
        made = [Level(path, work + extra * float(i == 0)) for i, (path, work) in enumerate(levels)]
        return program_time(made, DECODING, 1, Expected(length), rates).total

    before, after = time(Work()), time(more)
    assert before.least <= before.most
    assert after.least >= before.least
    assert after.most >= before.most


def test_the_loop_that_receives_most_is_named() -> None:
    rates = Rates(DevicePeaks(1e14, 1e12), LinkRates(1e11, 2e10))

    def level(num_bytes: float, *loops: Loop) -> Level:
        return Level(loops, Work(received={LINK: num_bytes}))

    tokens = Loop("tokens", None, "", TOKENS)
    levels = [
        level(500.0),
        level(1.0, tokens, Loop("layers", 4, "decoder.py:2")),
        level(2.0, tokens, Loop("mine", 20, "mine.py:3"), Loop("ring", 4, "layers.py:4")),
    ]
    time = program_time(levels, DECODING, 1, Expected(16), rates)
    assert time is not None
    assert time.received_most == ("mine.py:3", pytest.approx(32 * 160 / (500 + 32 * 164)))
    nothing = program_time([Level((), Work(flops=1.0))], DECODING, 1, Expected(16), rates)
    assert nothing is not None
    assert nothing.received_most is None
