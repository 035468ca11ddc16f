"""The objective against the numbers of TRL and of the papers that `make_goldens.py` wrote."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from grpo_eqx.objective import Objective, TokenBatch, Totals

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-5
"""Of losses, and of gradients as a share of the largest."""

INPUTS = dict(np.load(GOLDENS / "inputs.npz"))
FIELDS = ("logps", "entropies", "sampler_logps", "advantages", "mask", "old_logps", "ref_logps")


class Case(NamedTuple):
    name: str
    objective: Objective
    inputs: dict[str, str | None]
    """The input of each of `TokenBatch`'s fields."""
    loss: float
    gradients: tuple[np.ndarray, np.ndarray]
    """With respect to log-probs and entropies."""


def load_cases() -> list[Case]:
    with np.load(GOLDENS / "goldens.npz") as goldens:
        described = [json.loads(text) for text in goldens["cases"]]
        losses = goldens["losses"].tolist()
        gradients = zip(goldens["logps_gradients"], goldens["entropies_gradients"], strict=True)
        return [
            Case(
                case["name"],
                Objective(**case["objective"]),
                {**{field: field for field in FIELDS}, **case["batch"]},
                loss,
                of_case,
            )
            for case, loss, of_case in zip(described, losses, gradients, strict=True)
        ]


CASES = load_cases()
MIXED = ("-no_kl-no_weights", "-k3_unbiased-sequence_mask", "-everything")
"""Cases of every loss at every level: the simplest, and those with the most in them."""


class ShareCase(NamedTuple):
    objective: Objective
    num_shares: int
    losses: np.ndarray
    """Of each share."""
    gradient: np.ndarray
    """With respect to log-probs, of all shares."""

    def __str__(self) -> str:
        return f"{self.objective.loss_type}-{self.num_shares}"


def load_share_cases() -> tuple[list[ShareCase], dict[str, np.ndarray]]:
    arrays = dict(np.load(GOLDENS / "shares.npz"))
    described = [json.loads(text) for text in arrays.pop("cases")]
    columns = arrays.pop("losses"), arrays.pop("logps_gradients")
    cases = [
        ShareCase(Objective(**case["objective"]), case["num_shares"], losses, gradient)
        for case, losses, gradient in zip(described, *columns, strict=True)
    ]
    return cases, arrays


SHARE_CASES, SHARE_INPUTS = load_share_cases()


def case_name(case: Case) -> str:
    return case.name


def make_batch(case: Case) -> TokenBatch:
    arrays = {field: name and jnp.asarray(INPUTS[name]) for field, name in case.inputs.items()}
    return TokenBatch(**arrays)


def make_totals(batch: TokenBatch) -> Totals:
    return Totals.of(batch.mask, batch.mask if batch.policy_mask is None else batch.policy_mask)


def micro_batches(batch: TokenBatch) -> TokenBatch:
    """Micro-batches of one completion each, stacked: prompts are apart, and groups cut up."""
    return jax.tree.map(lambda x: x.reshape(-1, 1, 1, *x.shape[2:]), batch)


def assert_golden(case: Case, loss: Array, gradients: tuple[Array, Array]) -> None:
    np.testing.assert_allclose(loss, case.loss, rtol=TOLERANCE, atol=TOLERANCE)
    for gradient, expected in zip(gradients, case.gradients, strict=True):
        atol = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=atol)


@pytest.mark.grid
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name.endswith(MIXED) else pytest.mark.long)
        for case in CASES
    ],
    ids=case_name,
)
def test_loss_and_gradients_are_the_golden_ones(case: Case):
    batch = make_batch(case)
    totals = make_totals(batch)

    def loss(logps: Array, entropies: Array) -> Float[Array, ""]:
        return case.objective(batch._replace(logps=logps, entropies=entropies), totals)[0]

    result = jax.value_and_grad(loss, argnums=(0, 1))(batch.logps, batch.entropies)
    assert_golden(case, *result)


@pytest.mark.grid
@pytest.mark.parametrize("case", [c for c in CASES if c.name.endswith(MIXED)], ids=case_name)
def test_micro_batches_add_up_to_the_golden_ones(case: Case):
    batch = make_batch(case)
    totals = make_totals(batch)

    def loss(logps: Array, entropies: Array) -> Float[Array, ""]:
        parts = micro_batches(batch._replace(logps=logps, entropies=entropies))
        return jax.vmap(lambda part: case.objective(part, totals)[0])(parts).sum()

    result = jax.value_and_grad(loss, argnums=(0, 1))(batch.logps, batch.entropies)
    assert_golden(case, *result)


@pytest.mark.parametrize("case", SHARE_CASES, ids=str)
def test_updates_on_unequal_shares_of_a_rollout_are_the_golden_ones(case: ShareCase) -> None:
    """TRL divides by the tokens of the whole rollout, whichever update a token falls in."""
    tokens_per_update = jnp.float32(SHARE_INPUTS["mask"].sum() / case.num_shares)
    of_shares = [
        {name: jnp.asarray(x[index :: case.num_shares]) for name, x in SHARE_INPUTS.items()}
        for index in range(case.num_shares)
    ]
    assert len({int(share["mask"].sum()) for share in of_shares}) == case.num_shares

    for index, share in enumerate(of_shares):
        batch = TokenBatch(**share)
        totals = Totals.of(batch.mask, batch.mask, tokens_per_update)

        def loss(logps: Array, batch: TokenBatch = batch, totals: Totals = totals) -> Array:
            return case.objective(batch._replace(logps=logps), totals)[0]

        value, gradient = jax.value_and_grad(loss)(batch.logps)
        np.testing.assert_allclose(value, case.losses[index], rtol=TOLERANCE, atol=TOLERANCE)
        expected = case.gradient[index :: case.num_shares]
        atol = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=atol)
