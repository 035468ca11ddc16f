"""The loss on logits: against float64 by hand, on-policy and off-policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from grpo_eqx import UserError, grpo_loss
from grpo_eqx.objective import Objective

B, T, V = 4, 6, 50
EPSILON, EPSILON_HIGH = 0.2, 0.28


class Inputs:
    """Logits of up to 80, tokens of which some do not count, and an older policy's log-probs."""

    def __init__(self, seed: int, temperature: float):
        rng = np.random.default_rng(seed)
        self.temperature = temperature
        # Few bits, so that the float32 and the float64 of them are the same.
        self.logits = np.round(rng.normal(size=(B, T, V)) * rng.choice([1, 25], (B, T, 1)) * 8) / 8
        self.ids = rng.integers(V, size=(B, T))
        self.mask = rng.random((B, T)) < 0.8
        self.advantages = rng.normal(size=B).astype(np.float32)
        self.old_logps = (self.logps() + 0.3 * rng.normal(size=(B, T))).astype(np.float32)

    def logprobs(self) -> Float[np.ndarray, "B T V"]:
        z = self.logits / self.temperature
        z = z - z.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))

    def logps(self) -> Float[np.ndarray, "B T"]:
        return np.take_along_axis(self.logprobs(), self.ids[..., None], axis=-1)[..., 0]

    def expected(
        self, old_logps: Float[np.ndarray, "B T"]
    ) -> tuple[float, Float[np.ndarray, "B T V"]]:
        """-min(r A, clip(r) A), averaged over the tokens that count, and its gradient."""
        ratios = np.exp(self.logps() - old_logps)
        advantages = self.advantages[:, None].astype(np.float64)
        clipped = np.clip(ratios, 1 - EPSILON, 1 + EPSILON_HIGH)
        taken = np.minimum(ratios * advantages, clipped * advantages)
        weights = self.mask / self.mask.sum()
        # Where the clipped term is the smaller one, no gradient.
        of_logps = -weights * np.where(taken == ratios * advantages, ratios * advantages, 0.0)
        gradient = np.eye(V)[self.ids] - np.exp(self.logprobs())
        return -(weights * taken).sum(), of_logps[..., None] * gradient / self.temperature


def run(
    inputs: Inputs, logits: Array, old_logps: Array | None
) -> tuple[tuple[Array, dict[str, Array]], Array]:
    def loss(logits: Array) -> tuple[Array, dict[str, Array]]:
        return grpo_loss(
            logits,
            jnp.asarray(inputs.ids),
            jnp.asarray(inputs.advantages),
            jnp.asarray(inputs.mask),
            old_logps=old_logps,
            temperature=inputs.temperature,
            objective=Objective(epsilon=EPSILON, epsilon_high=EPSILON_HIGH),
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_and_gradient_are_the_float64_reference(on_policy: bool, temperature: float) -> None:
    inputs = Inputs(0, temperature)
    old_logps = None if on_policy else jnp.asarray(inputs.old_logps)
    (loss, metrics), gradient = run(inputs, jnp.asarray(inputs.logits, jnp.float32), old_logps)
    expected, expected_gradient = inputs.expected(
        inputs.logps() if on_policy else inputs.old_logps.astype(np.float64)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        gradient, expected_gradient, atol=1e-5 * abs(expected_gradient).max()
    )
    assert (metrics["policy_ratio/mean"] == 1) == on_policy


def test_the_gradient_has_the_dtype_of_the_logits() -> None:
    inputs = Inputs(1, 1.0)
    logits = jnp.asarray(inputs.logits, jnp.bfloat16)
    inputs.logits = np.asarray(logits, np.float64)
    (loss, _), gradient = run(inputs, logits, jnp.asarray(inputs.old_logps))
    expected, expected_gradient = inputs.expected(inputs.old_logps.astype(np.float64))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert gradient.dtype == jnp.bfloat16
    scale = abs(expected_gradient).max()
    np.testing.assert_allclose(gradient.astype(jnp.float32), expected_gradient, atol=scale / 2**8)


def test_tokens_that_do_not_count_get_no_gradient_whatever_their_logits_are() -> None:
    inputs = Inputs(2, 1.0)
    logits = jnp.asarray(inputs.logits, jnp.float32)
    (loss, _), gradient = run(inputs, logits, None)
    spoiled = jnp.where(inputs.mask[..., None], logits, jnp.nan)
    (same_loss, _), same_gradient = run(inputs, spoiled, None)
    assert same_loss == loss
    np.testing.assert_array_equal(same_gradient, gradient)
    inputs.ids = np.where(inputs.mask, inputs.ids, -100)
    inputs.mask = np.ones_like(inputs.mask)
    np.testing.assert_array_equal(run(inputs, spoiled, None)[1], gradient)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("forbidden", [-np.inf, np.finfo(np.float32).min])
def test_entries_that_may_not_be_drawn_add_nothing(forbidden: float, temperature: float) -> None:
    """Their logits masked, as for padding of the vocabulary: as if they were not there."""
    inputs = Inputs(3, temperature)
    logits = jnp.asarray(inputs.logits, jnp.float32)
    old_logps = jnp.asarray(inputs.old_logps)
    (loss, metrics), gradient = run(inputs, logits, old_logps)
    wider = jnp.pad(logits, ((0, 0), (0, 0), (0, 7)), constant_values=forbidden)
    (same_loss, same_metrics), wide_gradient = run(inputs, wider, old_logps)
    np.testing.assert_allclose(same_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(same_metrics["entropy"], metrics["entropy"], rtol=1e-6)
    np.testing.assert_allclose(wide_gradient[..., :V], gradient, rtol=1e-6, atol=1e-9)
    assert (wide_gradient[..., V:] == 0).all()


def test_masks_of_numbers_are_masks() -> None:
    inputs = Inputs(4, 1.0)
    arguments = [jnp.asarray(x) for x in (inputs.logits, inputs.ids, inputs.advantages)]
    expected = grpo_loss(*arguments, jnp.asarray(inputs.mask))[0]
    assert 0 < inputs.mask.sum() < inputs.mask.size
    inputs.mask = inputs.mask.astype(np.float32)
    assert run(inputs, arguments[0], None)[0][0] == expected


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (Objective(beta=0.1), {}, "the objective's beta is 0.1: pass ref_logps"),
        (Objective(), {"ref_logps": jnp.zeros((B, T))}, "is 0: leave ref_logps out"),
        (Objective(loss_type="dr_grpo"), {}, "set it in the Objective"),
        (Objective(), {"temperature": 0.0}, "temperature is 0.0: it must be a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(
    objective: Objective, arguments: dict[str, object], message: str
) -> None:
    logits, ids, advantages = jnp.zeros((B, T, V)), jnp.zeros((B, T), jnp.int32), jnp.zeros(B)
    with pytest.raises(UserError, match=message):
        grpo_loss(logits, ids, advantages, objective=objective, **arguments)
