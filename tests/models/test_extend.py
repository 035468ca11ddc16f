"""Inputs that are read at once are read as one after the other."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.families.gemma3 import Gemma3Config
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.kv_cache import CACHE_BLOCK

SIZES: Mapping[str, Any] = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 50, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "windows": Gemma3Config(
        **SIZES,
        sliding_window=4,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    ),
}
P, G, T = 2, 3, 6
LENGTHS = np.array([[6, 1, 4], [0, 5, 3]])
"""Inputs of each row."""


@pytest.mark.grid
@pytest.mark.parametrize("form", [None, CpuDecoding()], ids=["as_stored", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("length", [30, 2 * CACHE_BLOCK])
@pytest.mark.parametrize("family", CONFIGS)
def test_at_once_is_one_after_the_other(
    family: str, length: int, dtype: str, form: CpuDecoding | None
) -> None:
    """Also across the edge of a block, and for rows that read fewer inputs, or none."""
    rng = np.random.default_rng(length)
    model = Decoder.init(CONFIGS[family], jax.random.key(0), std=0.3)
    prompts = jnp.asarray(rng.integers(50, size=(P, 7)), jnp.int32)
    prompt = model.prefill(prompts, jnp.ones(prompts.shape, bool)).stored(jnp.dtype(dtype))
    if form is not None:
        model, prompt = form(model, prompt)
    own = [each.growing(P, G, length) for each in prompt.kv]
    first = jnp.asarray([[0, length - 6, length // 2 - 2], [length // 2, 1, 9]], jnp.int32)
    ids = jnp.asarray(rng.integers(50, size=(P, G, T)), jnp.int32)
    extend = jax.jit(Decoder.extend)
    at_once = extend(
        model, prompt, own, ids, first, jnp.int32(length), lengths=jnp.asarray(LENGTHS)
    )
    singly = []
    for t in range(T):
        of_rows = jnp.asarray((t < LENGTHS).astype(np.int32))
        made = extend(
            model, prompt, own, ids[..., t : t + 1], first + t, jnp.int32(length), lengths=of_rows
        )
        own = made.own
        singly.append(made.hidden[:, :, 0])
    is_read = np.arange(T) < LENGTHS[..., None]
    expected = np.stack(singly, axis=2)[is_read]
    np.testing.assert_allclose(
        at_once.hidden[is_read], expected, rtol=0, atol=2e-5 * np.abs(expected).max()
    )
    most = 1.01 if dtype == "int8" else 1e-4  # a rounding of int8 may fall to the other side
    for found, each in zip(jax.tree.leaves(at_once.own), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(each, np.float32), atol=most
        )
