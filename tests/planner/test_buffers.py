"""The largest arrays of a program, by its text."""

import jax
import jax.numpy as jnp

from grpo_eqx.planner.buffers import largest_buffers


def test_an_array_is_found_with_its_line() -> None:
    def program(x: jax.Array) -> jax.Array:
        table = jnp.sort(x[:, None] * x[None, :], axis=0)  # 4 MiB
        return table.sum(axis=0)

    text = jax.jit(program).lower(jax.ShapeDtypeStruct((1024,), jnp.float32)).compile().as_text()
    largest = largest_buffers(text, 3)[0]
    assert (largest.num_bytes, largest.shape) == (4 * 2**20, "f32[1024,1024]")
    assert largest.source == f"test_buffers.py:{program.__code__.co_firstlineno + 1}"


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
