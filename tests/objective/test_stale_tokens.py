"""Completions whose tokens several policies drew: losses and gradients against float64.

The policies are tables: the logits of the next token are a row, chosen by the last token. The
reference is numpy in float64, which goes token by token, and takes its gradients by differences.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from grpo_eqx.common.choices import ImportanceSamplingLevel, LossType, SamplerCorrection
from grpo_eqx.objective import Objective, TokenBatch, Totals

P, G, T, V = 2, 3, 6, 5
EPSILON, EPSILON_HIGH, CAP, LOW, HIGH = 0.1, 0.15, 1.1, 0.7, 1.5
CASES = [
    (loss, level, mode)
    for loss in get_args(LossType)
    for level in get_args(ImportanceSamplingLevel)
    for mode in get_args(SamplerCorrection)
    if (loss, level) != ("cispo", "sequence_token")  # refused: it is the same as sequence
]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def carried_over(seed: int) -> dict[str, np.ndarray]:
    """A batch in which each token has the version of the table that drew it, of four."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(V, V))
    tables = [first + 0.3 * version * rng.normal(size=(V, V)) for version in range(4)]
    ids = np.zeros((P, G, T), int)
    versions = np.sort(rng.integers(4, size=(P, G, T)), axis=-1)
    lengths = rng.integers(1, T + 1, size=(P, G, 1))
    sampler = np.zeros((P, G, T))
    for p, g in np.ndindex(P, G):
        last = 0
        for t in range(T):
            logps = log_softmax(tables[versions[p, g, t]])[last]
            last = ids[p, g, t] = rng.choice(V, p=np.exp(logps))
            sampler[p, g, t] = logps[last]
    return {
        "table": tables[-1] + 0.1 * rng.normal(size=(V, V)),
        "start": tables[-1],
        "ids": ids,
        "sampler": sampler,
        "mask": np.arange(T) < lengths,
        "advantages": rng.normal(size=(P, G)),
    }


def logps_of(table: Any, ids: np.ndarray, log_softmax: Callable[[Any], Any]) -> Any:
    last = np.concatenate([np.zeros((*ids.shape[:-1], 1), int), ids[..., :-1]], axis=-1)
    return log_softmax(table)[last, ids]


def reference(
    batch: dict[str, np.ndarray], table: np.ndarray, fixed: np.ndarray, *case: str
) -> float:
    """Returns the loss in float64; where no gradient flows, values are those at `fixed`."""
    loss_type, level, mode = case
    mask, sampler = batch["mask"], batch["sampler"]
    logps, constant, start = (
        logps_of(x, batch["ids"], log_softmax) for x in (table, fixed, batch["start"])
    )
    total, number = 0.0, int(mask.sum())
    for p, g in np.ndindex(P, G):
        steps = [t for t in range(T) if mask[p, g, t]]
        advantage = batch["advantages"][p, g]
        divided = sampler if mode == "coupled" else start
        logs = {t: logps[p, g, t] - divided[p, g, t] for t in steps}
        constants = {t: constant[p, g, t] - divided[p, g, t] for t in steps}
        weights = {t: start[p, g, t] - sampler[p, g, t] for t in steps}
        of_tokens = []
        for t in steps:
            if level == "token":
                ratio = math.exp(logs[t])
            elif level == "sequence":
                ratio = math.exp(sum(logs.values()) / len(steps))
            else:
                mean = math.exp(sum(constants.values()) / len(steps))
                ratio = mean * math.exp(logps[p, g, t] - constant[p, g, t])
            if loss_type == "cispo":
                log = constants[t] if level == "token" else sum(constants.values()) / len(steps)
                loss = -min(math.exp(log), CAP) * advantage * logps[p, g, t]
            elif loss_type == "sapo":
                sharpness = 1.0 if advantage > 0 else 1.05
                gate = 1 / (1 + math.exp(-sharpness * (ratio - 1)))
                loss = -gate * 4 / sharpness * advantage
            else:
                clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON_HIGH)
                loss = -min(ratio * advantage, clipped * advantage)
            if mode not in ("coupled", "none"):
                of_weight, how = mode.split("_")
                log = weights[t] if of_weight == "token" else sum(weights.values())
                weight = math.exp(log)
                if how == "truncate":
                    weight = min(max(weight, LOW), HIGH)
                elif not LOW <= weight <= HIGH:
                    weight = 0.0
                loss *= weight
            of_tokens.append(loss)
        if loss_type in ("grpo", "sapo"):
            total += sum(of_tokens) / len(steps) / (P * G)
        elif loss_type == "dr_grpo":
            total += sum(of_tokens) / (P * G * T)
        else:
            total += sum(of_tokens) / number
    return total


def differences(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Central differences of a function."""
    found, step = np.zeros_like(x), 1e-6
    for at in np.ndindex(*x.shape):
        moved = np.zeros_like(x)
        moved[at] = step
        found[at] = (f(x + moved) - f(x - moved)) / (2 * step)
    return found


@partial(jax.jit, static_argnums=(0,))
def gradient_of_table(
    case: tuple[Any, Any, Any],
    table: Float[Array, "V V"],
    ids: Int[Array, "P G T"],
    batch: TokenBatch,
) -> tuple[Float[Array, ""], Float[Array, "V V"]]:
    loss_type, level, mode = case
    objective = Objective(
        loss_type=loss_type, importance_sampling_level=level, importance_sampling_mode=mode,
        epsilon=EPSILON, epsilon_high=CAP if loss_type == "cispo" else EPSILON_HIGH,
        importance_sampling_clip_min=LOW, importance_sampling_clip_max=HIGH,
        max_completion_length=T,
    )  # fmt: skip
    first = jnp.zeros((*ids.shape[:-1], 1), ids.dtype)
    last = jnp.concatenate([first, ids[..., :-1]], axis=-1)

    def loss(table: Float[Array, "V V"]) -> Float[Array, ""]:
        logps = jax.nn.log_softmax(table)[last, ids]
        return objective(batch._replace(logps=logps), Totals.of(batch.mask, batch.mask))[0]

    return jax.value_and_grad(loss)(table)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gradients_are_those_of_a_reference_that_knows_the_policy_of_each_token(
    case: tuple[LossType, ImportanceSamplingLevel, SamplerCorrection],
) -> None:
    for seed in range(3):
        batch = carried_over(seed)
        single = {name: jnp.float32(batch[name]) for name in ("table", "sampler", "advantages")}
        start = logps_of(batch["start"], batch["ids"], log_softmax)
        tokens = TokenBatch(
            logps=jnp.zeros((P, G, T)), entropies=jnp.zeros((P, G, T)),
            sampler_logps=single["sampler"], advantages=single["advantages"],
            mask=jnp.asarray(batch["mask"]), old_logps=jnp.float32(start),
        )  # fmt: skip
        loss, gradient = gradient_of_table(case, single["table"], jnp.asarray(batch["ids"]), tokens)
        fixed = batch["table"]
        np.testing.assert_allclose(
            loss, reference(batch, fixed, fixed, *case), rtol=2e-5, atol=2e-6
        )
        expected = differences(lambda x, b=batch: reference(b, x, b["table"], *case), fixed)
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=2e-6)


def test_without_clipping_the_mean_gradient_is_that_of_the_expected_reward() -> None:
    """Over all completions of three tokens, each as likely as the policies that draw them make it:
    the first token by an old policy, the others by a newer one.
    """
    rng, length = np.random.default_rng(0), 3
    current, *older = (rng.normal(size=(V, V)) for _ in range(3))
    ids = np.array(list(itertools.product(range(V), repeat=length)))[None]
    rewards = rng.normal(size=ids.shape[:2])
    by_version = [logps_of(older[int(t > 0)], ids, log_softmax)[..., t] for t in range(length)]
    sampler = np.stack(by_version, axis=-1)
    chances = np.exp(sampler.sum(axis=-1))
    np.testing.assert_allclose(chances.sum(), 1)
    objective = Objective(
        loss_type="dr_grpo", importance_sampling_mode="sequence_truncate",
        importance_sampling_clip_min=1e-12, max_completion_length=1,
    )  # fmt: skip
    first = jnp.zeros((*ids.shape[:-1], 1), int)
    last = jnp.concatenate([first, jnp.asarray(ids[..., :-1])], axis=-1)

    def mean_loss(table: Float[Array, "V V"]) -> Float[Array, ""]:
        logps = jax.nn.log_softmax(table)[last, ids]
        mask = jnp.ones(ids.shape, bool)
        number = ids.shape[1]  # by which the loss divides
        batch = TokenBatch(
            logps, jnp.zeros(ids.shape), jnp.float32(sampler),
            jnp.float32(rewards * chances * number), mask,
        )  # fmt: skip
        return objective(batch, Totals.of(mask, mask))[0]

    def expected_reward(table: np.ndarray) -> float:
        chances = np.exp(logps_of(table, ids, log_softmax).sum(axis=-1))
        return float((chances * rewards).sum())

    found = -jax.grad(mean_loss)(jnp.float32(current))
    np.testing.assert_allclose(found, differences(expected_reward, current), rtol=1e-3, atol=1e-5)
