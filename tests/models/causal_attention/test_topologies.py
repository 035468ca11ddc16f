"""The kernels compile for described TPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.models.causal_attention import MosaicAttention, Visible, best_attention
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.sharding import parse_mesh

pytest.importorskip("libtpu", reason="needs the plan extra")
pytestmark = pytest.mark.topology

R, T = 8, 1300
# Qwen2.5's heads of keys, heads of queries for each, and their size.
HEADS = {
    "0.5B": (2, 7, 64),
    "1.5B": (2, 6, 128),
    "3B": (2, 8, 128),
    "7B": (4, 7, 128),
    "14B": (8, 5, 128),
    "72B": (8, 8, 128),
}


def compiled(
    tpu: str,
    heads: tuple[int, int, int],
    dtype: jnp.dtype,
    shape: str = "1,1,1",
    devices: int = 1,
    softcap: float | None = None,
) -> jax.stages.Compiled:
    """Gradients of packed rows."""
    mesh = parse_mesh(shape).build(described_devices(tpu)[:devices])
    attention = best_attention(mesh)
    assert isinstance(attention, MosaicAttention)
    here = NamedSharding(mesh, PartitionSpec())
    K, repeats, D = heads

    def array(*shape: int, dtype: jnp.dtype = dtype) -> jax.Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def loss(queries: jax.Array, kv: KeyValues, visible: Visible) -> jax.Array:
        return attention(queries, kv, visible, softcap).astype(jnp.float32).sum()

    keys, places = array(R, K, T, D), array(R, T, dtype=jnp.int32)
    return (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(array(R, T, K * repeats, D), KeyValues(keys, keys), Visible(places, places, places))
        .compile()
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    ("tpu", "model"),
    [
        *[(tpu, "3B") for tpu in ("v4-16", "v6e-8")],
        ("v6e-8", "7B"),
        *[pytest.param(tpu, "3B", marks=pytest.mark.long) for tpu in ("v5e-8", "v5p-16")],
        *[
            pytest.param("v6e-8", model, marks=pytest.mark.long)
            for model in HEADS
            if model not in ("3B", "7B")
        ],
    ],
)
def test_kernels_compile_for_every_model(model: str, tpu: str) -> None:
    """The softmax, the gradient of queries, and that of keys and values."""
    text = compiled(tpu, HEADS[model], jnp.bfloat16).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3


def test_and_in_float32() -> None:
    compiled("v4-16", HEADS["72B"], jnp.float32)


def test_and_with_a_soft_cap() -> None:
    """For the TPU with the least vector memory, and heads as large as Gemma 2's."""
    compiled("v4-16", (4, 2, 256), jnp.bfloat16, softcap=50.0)


@pytest.mark.grid
@pytest.mark.parametrize("shape", ["1,4,2", "1,2,4"])
def test_each_device_attends_for_its_own_part(shape: str) -> None:
    """By what it holds for it; two heads of keys are whole on each of four devices."""
    whole = compiled("v6e-8", HEADS["3B"], jnp.bfloat16).memory_analysis().temp_size_in_bytes
    part = compiled("v6e-8", HEADS["3B"], jnp.bfloat16, shape, 8).memory_analysis()
    assert part.temp_size_in_bytes < whole / {"1,4,2": 4, "1,2,4": 1.2}[shape]
