"""The router here and in Hugging Face transformers: the same experts, with the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models.architecture import ExpertsShape
from grpo_eqx.models.experts import Routes
from grpo_eqx.models.product import product

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("normalized", [False, True])
def test_tokens_choose_the_same_experts_with_the_same_weights(normalized: bool):
    number, per_token, hidden = 128, 8, 64
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden, num_experts=number, num_experts_per_tok=per_token,
        norm_topk_prob=normalized,
    )  # fmt: skip
    router, rng = modeling.Qwen3MoeTopKRouter(config), np.random.default_rng(0)
    weight = rng.normal(size=(number, hidden)).astype(np.float32) / 4
    x = rng.normal(size=(500, hidden)).astype(np.float32)
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(weight))
        _, weights, chosen = router(torch.from_numpy(x))
    shape = ExpertsShape(
        number=number, per_token=per_token, intermediate_size=16, normalized=normalized
    )
    routes = Routes.of(product("th,eh->te", jnp.asarray(x), jnp.asarray(weight)), shape)
    np.testing.assert_array_equal(routes.chosen, chosen.numpy())
    np.testing.assert_allclose(routes.weights, weights.numpy(), rtol=2e-5)
