"""Experts: grouped by the tokens that chose them, they compute what a loop over tokens does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from grpo_eqx.models.architecture import ExpertsShape
from grpo_eqx.models.experts import Experts, Routes
from grpo_eqx.models.layers import swiglu
from grpo_eqx.sharding import parse_mesh

HIDDEN = 6


def shape_of(normalized: bool) -> ExpertsShape:
    return ExpertsShape(number=5, per_token=2, intermediate_size=4, normalized=normalized)


def random_experts() -> Experts:
    stacked = Experts.init(shape_of(True), 1, HIDDEN, jax.random.key(0), std=0.7)
    return jax.tree.map(lambda x: x[0], stacked)


def by_token(
    experts: Experts, x: np.ndarray, shape: ExpertsShape, replayed: np.ndarray | None = None
) -> np.ndarray:
    """In float64: each token through its experts, or those given, one after the other."""
    router, gate, up, down = (np.asarray(each, np.float64) for each in jax.tree.leaves(experts))
    result = np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        scores = np.exp(router @ token)
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: shape.per_token] if replayed is None else replayed[t]
        total = scores[chosen].sum() if shape.normalized else 1.0
        for e in chosen:
            opened = token @ gate[e]
            hidden = opened / (1 + np.exp(-opened)) * (token @ up[e])
            result[t] += scores[e] / total * (hidden @ down[e])
    return result


def of_all(
    experts: Experts,
    x: Float[Array, "T H"],
    shape: ExpertsShape,
    replayed: np.ndarray | None = None,
) -> Float[Array, "T H"]:
    """By automatic differentiation of every expert for every token."""
    scores = jax.nn.softmax(x @ experts.router.T)
    least = jnp.sort(scores)[:, -shape.per_token, None]
    used = scores >= least
    if replayed is not None:
        used = (replayed[..., None] == np.arange(shape.number)).any(axis=1)
    scores = jnp.where(used, scores, 0.0)
    if shape.normalized:
        scores /= scores.sum(axis=1, keepdims=True)
    gate = jnp.einsum("th,ehi->tei", x, experts.gate_proj)
    up = jnp.einsum("th,ehi->tei", x, experts.up_proj)
    return jnp.einsum("te,tei,eih->th", scores, jax.nn.silu(gate) * up, experts.down_proj)


def applied(
    experts: Experts,
    x: Float[Array, "T H"],
    shape: ExpertsShape,
    replayed: np.ndarray | None = None,
) -> Float[Array, "T H"]:
    if replayed is not None:
        replayed = jnp.asarray(replayed)[:, None, None]
    return experts(x[:, None, None], shape, swiglu, None, replayed)[0][:, 0, 0]


def other_choices(number: int) -> np.ndarray:
    """Any two experts for each token, in any order."""
    rng = np.random.default_rng(4)
    return np.stack([rng.permutation(5)[:2] for _ in range(number)]).astype(np.uint8)


def random_tokens(number: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(number, HIDDEN)).astype(np.float32)


@pytest.mark.grid
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("number", [1, 3, 40])
def test_each_token_is_the_weighted_sum_of_its_experts(normalized: bool, number: int) -> None:
    """With one token, most experts have none."""
    experts, x, shape = random_experts(), random_tokens(number), shape_of(normalized)
    found = applied(experts, jnp.asarray(x), shape)
    np.testing.assert_allclose(found, by_token(experts, x, shape), rtol=0, atol=1e-5)


def test_the_shape_of_a_batch_does_not_matter() -> None:
    experts, x, shape = random_experts(), jnp.asarray(random_tokens(12)), shape_of(True)
    found, _ = experts(x.reshape(2, 3, 2, HIDDEN), shape, swiglu)
    np.testing.assert_array_equal(found.reshape(x.shape), applied(experts, x, shape))


def test_no_token_is_dropped_where_all_choose_the_same_experts() -> None:
    experts, shape = random_experts(), shape_of(True)
    x = np.tile(random_tokens(1), (30, 1))
    found = applied(experts, jnp.asarray(x), shape)
    np.testing.assert_allclose(found, by_token(experts, x, shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalized", [False, True])
def test_experts_that_are_replayed_are_used_with_the_weights_of_the_router(
    normalized: bool,
) -> None:
    experts, x, shape = random_experts(), random_tokens(40), shape_of(normalized)
    other = other_choices(40)
    found = applied(experts, jnp.asarray(x), shape, other)
    np.testing.assert_allclose(found, by_token(experts, x, shape, other), rtol=0, atol=1e-5)
    assert np.abs(found - by_token(experts, x, shape)).max() > 0.1


def test_experts_that_the_router_would_never_choose_can_be_replayed() -> None:
    logits = jnp.array([[200.0, 150.0, 0.0, -10.0, 0.0]])
    for chosen in ([[2, 3]], [[0, 0]]):  # the latter are those of padding
        routes = Routes.replayed(logits, jnp.array(chosen, jnp.uint8), shape_of(True))
        np.testing.assert_allclose(routes.weights.sum(axis=-1), 1, rtol=1e-6)


def test_the_routers_own_choice_replayed_changes_nothing() -> None:
    experts, x, shape = random_experts(), jnp.asarray(random_tokens(40)), shape_of(True)
    result, own = experts(x[:, None, None], shape, swiglu)
    assert own.dtype == np.uint8
    again, chosen = experts(x[:, None, None], shape, swiglu, None, own)
    np.testing.assert_array_equal(again, result)
    np.testing.assert_array_equal(chosen, own)


@pytest.mark.parametrize(("number", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_choices_take_as_few_bytes_as_number_the_experts(number: int, dtype: type) -> None:
    shape = ExpertsShape(number=number, per_token=8, intermediate_size=4, normalized=True)
    assert shape.dtype == dtype


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("replayed", [None, other_choices(9)], ids=["own", "replayed"])
def test_gradients_are_those_of_all_experts(normalized: bool, replayed: np.ndarray | None) -> None:
    """Of tokens, every expert's weights, and the router's, through the weights of the sum."""
    experts, x, shape = random_experts(), jnp.asarray(random_tokens(9)), shape_of(normalized)
    slope = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), x.dtype)

    def found(experts: Experts, x: Array) -> Array:
        return (applied(experts, x, shape, replayed) * slope).sum()

    def expected(experts: Experts, x: Array) -> Array:
        return (of_all(experts, x, shape, replayed) * slope).sum()

    for a, b in zip(
        jax.tree.leaves(jax.grad(found, (0, 1))(experts, x)),
        jax.tree.leaves(jax.grad(expected, (0, 1))(experts, x)),
        strict=True,
    ):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_experts_are_chosen_in_float32_whatever_the_tokens_are() -> None:
    logits = jnp.array([[1.0, 1.0 + 2**-20, 0.0, 1.0 - 2**-20, 0.5]])
    routes = Routes.of(logits, shape_of(True))
    np.testing.assert_array_equal(routes.chosen, [[1, 0]])
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_experts())
    x = jnp.asarray(random_tokens(40), jnp.bfloat16)
    found = applied(experts, x, shape_of(True))
    assert found.dtype == jnp.bfloat16
    expected = by_token(experts, np.asarray(x, np.float32), shape_of(True))
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected, rtol=0, atol=0.02 * np.abs(expected).max()
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ("2,2,2", (4, 1, 3)),  # tokens over dp and fsdp
        ("2,2,2", (2, 2, 3)),  # groups over fsdp
        ("2,2,2", (2, 1, 3)),  # the same tokens on both devices of fsdp
        ("2,2,2", (1, 1, 3)),  # and of dp
        ("1,4,1", (4, 1, 3)),
        ("1,1,4", (1, 1, 3)),
    ],
)
@pytest.mark.parametrize("replays", [False, True])
def test_values_and_gradients_are_the_same_over_a_mesh(
    mesh: str, shape: tuple[int, ...], replays: bool
) -> None:
    built = parse_mesh(mesh).build(jax.devices()[: math.prod(map(int, mesh.split(",")))])
    stacked = Experts.init(shape_of(True), 1, 8, jax.random.key(0), std=0.7)
    experts = jax.tree.map(lambda x: x[0], stacked)
    rng = np.random.default_rng(3)
    x, slope = (jnp.asarray(rng.normal(size=(*shape, 8)), jnp.float32) for _ in range(2))

    replayed = jnp.asarray(other_choices(math.prod(shape)).reshape(*shape, 2)) if replays else None

    def applied(experts: Experts, x: Array, devices: jax.sharding.Mesh | None) -> Array:
        result, own = experts(x, shape_of(True), swiglu, devices, replayed)
        return (result * slope).sum(), (result, own)

    run = jax.jit(jax.value_and_grad(applied, (0, 1), has_aux=True), static_argnames="devices")
    for a, b in zip(
        jax.tree.leaves(run(experts, x, devices=built)),
        jax.tree.leaves(run(experts, x, devices=None)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
