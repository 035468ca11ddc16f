"""The forms in which CPUs decode compute what the model computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.generation.cpu import CpuDecoding, KeysByElement, TransposedLinear
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.kv_cache import CACHE_BLOCK
from grpo_eqx.models.layers import Linear

CONFIG = Qwen2Config(
    hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, vocab_size=50, head_dim=8, rope_theta=100.0,
)  # fmt: skip
P, G = 2, 3
jitted_extend = jax.jit(Qwen2.extend)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("length", [4, 2 * CACHE_BLOCK, 6 * CACHE_BLOCK])
def test_the_model_decodes_as_in_its_own_form(length: int, dtype: str) -> None:
    """From a prompt on, with places in every part of the cache."""
    rng = np.random.default_rng(length)
    model = Qwen2.init(CONFIG, jax.random.key(0), std=0.3)
    ids = jnp.asarray(rng.integers(50, size=(P, 7)), jnp.int32)
    stored = model.prefill(ids, jnp.ones(ids.shape, bool)).stored(jnp.dtype(dtype))
    places = jnp.asarray([[0, length - 1, length // 2], [1, length // 3, length - 2]])
    found = []
    for own_model, prompt in ((model, stored), CpuDecoding()(model, stored)):
        own = [each.growing(P, G, length) for each in prompt.kv]
        assert {each.length for each in own} == {length}
        if prompt is not stored:
            assert len(own) == CONFIG.num_hidden_layers
            assert {len(each.parts) for each in own} == {CpuDecoding().num_parts(length)}
            assert {type(part) for each in own for part in each.parts} == {KeysByElement}
        made = []
        for step in range(3):
            inputs = jnp.full((P, G), 5 + step, jnp.int32)
            at = jnp.minimum(places + step, length - 1)
            made.append(jitted_extend(own_model, prompt, own, inputs[..., None], at, at.max() + 1))
            own = made[-1].own
        found.append(np.stack([step.hidden for step in made]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5 * np.abs(found[0]).max())


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_transposed_weight_is_the_same_map(is_rounded: bool) -> None:
    rng = np.random.default_rng(0)
    linear = Linear(
        *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [(7, 16), (7,)])
    )
    linear = linear.rounded(jnp.dtype("float32")) if is_rounded else linear
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    np.testing.assert_allclose(TransposedLinear.of(linear)(x), linear(x), rtol=0, atol=1e-5)
