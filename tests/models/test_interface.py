"""Logits of the model interface."""

import jax.numpy as jnp
import numpy as np

from grpo_eqx.models.interface import _logits_by_entry, _logits_by_row


def test_both_orders_of_the_product_give_the_same_logits() -> None:
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(20, 8)), jnp.float32)
    found, expected = _logits_by_entry(hidden, head), _logits_by_row(hidden, head)
    np.testing.assert_allclose(found, expected, atol=1e-5)
