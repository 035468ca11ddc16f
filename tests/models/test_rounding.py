"""Weights as int8: how far they are off, and that what they generate is what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_eqx import GRPOConfig
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.layers import Linear
from grpo_eqx.models.pretrained import from_pretrained
from grpo_eqx.models.rounding import RoundedTable, rounded_rows
from grpo_eqx.sharding import parse_mesh, parse_rollout_sharding
from grpo_eqx.training.lowering import model_shapes


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-20, 1e20))
def test_a_weight_is_off_by_at_most_half_a_step(seed: int, scale: float) -> None:
    """A step is a 127th of the largest magnitude of its row."""
    weight = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32) * np.float32(scale)
    weight[1] = 0
    values, scales = map(np.asarray, rounded_rows(jnp.asarray(weight)))
    restored = values.astype(np.float64) * scales[:, None].astype(np.float64)
    step = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(restored - weight) <= step * (0.5 + 1e-5)).all()
    assert np.abs(values[[0, 2]]).max(axis=1).tolist() == [127, 127]
    assert not restored[1].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_a_product_is_that_of_the_restored_weight(dtype: jnp.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    weight, bias, x = (rng.normal(size=shape) for shape in [(7, 16), (7,), (2, 3, 16)])
    rounded = Linear(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32)).rounded(
        jnp.dtype(dtype)
    )
    assert rounded.scales is not None
    restored = np.asarray(rounded.weight, np.float64) * np.asarray(rounded.scales)[:, None]
    x = np.asarray(jnp.asarray(x, dtype), np.float64)
    expected = x @ restored.T + np.asarray(rounded.bias, np.float64)
    found = rounded(jnp.asarray(x, dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * 20)


def test_a_table_is_looked_up_and_projected_as_restored() -> None:
    table = RoundedTable.of(jnp.asarray(np.random.default_rng(0).normal(size=(11, 8)), jnp.float32))
    restored = np.asarray(table.values, np.float64) * np.asarray(table.scales)[:, None]
    ids, hidden = np.array([[3, 10]]), np.random.default_rng(1).normal(size=(2, 8))
    np.testing.assert_allclose(table[jnp.asarray(ids)], restored[ids], rtol=1e-6)
    logits = table.project(jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(logits, hidden @ restored.T, atol=1e-5)


def test_the_embedded_model_samples_nearly_the_same_distribution() -> None:
    """Its Kullback-Leibler divergence from float32 is below 1e-3 in the mean, and 0.02 at most."""
    model = from_pretrained(GRPOConfig().model)
    ids = jax.random.randint(jax.random.key(0), (16, 48), 4, model.config.vocab_size)
    both = model, model.rounded(jnp.dtype("float32"))
    exact, rounded = (jax.nn.log_softmax(each.logits(ids)) for each in both)
    divergence = np.asarray((jnp.exp(exact) * (exact - rounded)).sum(axis=-1))
    assert 1e-7 < divergence.mean() < 1e-3
    assert divergence.max() < 0.02


@pytest.mark.parametrize("tied", [False, True])
def test_rounded_weights_are_split_like_the_others(tied: bool) -> None:
    """Scales are where the rows are that they belong to."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    mesh = parse_mesh("1,4,2").build()
    layout = parse_rollout_sharding("tensor:2").layout(mesh, 8, 8)
    model = jax.eval_shape(lambda m: m.rounded(jnp.dtype("float32")), model_shapes(config, mesh))
    for rules in layout.parameter_rules:
        of = model.shardings(layout.mesh, rules)
        for linear in (of.layers.q_proj, of.layers.o_proj):
            assert linear.scales.spec[:2] == linear.weight.spec[:2]
        table = of.output_table
        assert table.scales.spec[0] == table.values.spec[0]
    assert isinstance(model.embed_tokens, RoundedTable) == tied
    assert isinstance(model, Qwen2)
