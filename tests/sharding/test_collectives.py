"""What is read from a compiled program's text is what its devices exchange."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.collectives import Collective, collectives

MESH = parse_mesh("2,4,1").build()


def compiled(function: object, *shapes: jax.ShapeDtypeStruct) -> list[Collective]:
    return collectives(jax.jit(function).lower(*shapes).compile().as_text())  # type: ignore[arg-type]


def sharded(shape: tuple[int, ...], *spec: str | tuple[str, ...] | None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def everywhere(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec()))


def test_a_gather_is_found_with_its_bytes() -> None:
    (found,) = compiled(everywhere, sharded((24, 5), "fsdp"))
    assert (found.kind, found.shapes, found.num_bytes) == ("all-gather", "f32[24,5]", 480)
    assert found.loops == 0


def test_a_sum_in_two_loops_is_found_once() -> None:
    def total(x: jax.Array) -> jax.Array:
        def outer(_: jax.Array, n: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, n, lambda i, s: s + jnp.sum(x[i] * s), jnp.float32(1))

        return jax.lax.fori_loop(0, 7, lambda i, s: outer(s, i + 1) + s, jnp.float32(0))

    sums = [x for x in compiled(total, sharded((9, 8), None, "fsdp")) if x.kind == "all-reduce"]
    assert [(x.loops, x.num_bytes) for x in sums] == [(2, 4)]
    assert "while" in sums[0].scope


def test_a_program_of_one_device_exchanges_nothing() -> None:
    assert compiled(jnp.sum, jax.ShapeDtypeStruct((4,), np.dtype("float32"))) == []


def test_started_and_tuple_collectives_count_what_they_yield() -> None:
    text = """HloModule m

%body (p: (f32[4], u32[])) -> (f32[4], u32[]) {
  %s = (bf16[1,8]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) all-gather-start(%x), dimensions={0}
  %d = bf16[4,8]{1,0} all-gather-done(%s)
  ROOT %r = (f32[4]{0}, pred[3]{0}) all-reduce(%a, %b), channel_id=1
}

%cond (p: (f32[4], u32[])) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (f32[4]{0}, u32[]) while(%t), condition=%cond, body=%body, metadata={op_name="jit(f)/while"}
}
"""
    assert collectives(text) == [
        Collective("all-gather", "bf16[4,8]", 64, 1, "jit(f)/while"),
        Collective("all-reduce", "f32[4], pred[3]", 19, 1, "jit(f)/while"),
    ]
