"""What is read from a compiled program's text: what its devices exchange, and its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.planner.hlo import Collective, collectives, largest_buffers
from grpo_eqx.sharding import parse_mesh

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
  %t = ((f32[2]{0}, f32[3]{0}), (f32[8]{0}, f32[12]{0})) all-gather-start(%y, %z), dimensions={0}
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
        Collective("all-gather", "f32[8], f32[12]", 80, 1, "jit(f)/while"),
        Collective("all-reduce", "f32[4], pred[3]", 19, 1, "jit(f)/while"),
    ]


def test_an_array_is_found_with_its_line() -> None:
    def program(x: jax.Array) -> jax.Array:
        table = jnp.sort(x[:, None] * x[None, :], axis=0)  # 4 MiB
        return table.sum(axis=0)

    text = jax.jit(program).lower(jax.ShapeDtypeStruct((1024,), jnp.float32)).compile().as_text()
    largest = largest_buffers(text, 3)[0]
    assert (largest.num_bytes, largest.shape) == (4 * 2**20, "f32[1024,1024]")
    assert largest.source == f"test_hlo.py:{program.__code__.co_firstlineno + 1}"


TPU_TEXT = """HloModule jit_f, is_scheduled=true

%fused_computation (p: f32[8]) -> f32[4096,4096] {
  %p = f32[8]{0} parameter(0)
  ROOT %huge = f32[4096,4096]{1,0:T(8,128)} broadcast(%p), dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  %narrow = f32[1000,1]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation, \
metadata={op_name="jit(f)/mul" source_file="/somewhere/model.py" source_line=7}
  %packed = bf16[16,100]{1,0:T(8,128)(2,1)} convert(%narrow)
  %on_chip = f32[512,512]{1,0:T(8,128)S(1)} copy(%narrow)
  ROOT %out = f32[8]{0:T(128)} reduce(%narrow)
}
"""


def test_tiles_are_filled_up_and_vector_memory_is_none() -> None:
    largest, second = largest_buffers(TPU_TEXT, 2)
    assert (largest.num_bytes, largest.shape) == (1000 * 128 * 4, "f32[1000,1]")
    assert (largest.operation, largest.source) == ("mul", "model.py:7")
    assert (second.num_bytes, second.operation) == (16 * 128 * 2, "convert")
    assert second.source == ""
