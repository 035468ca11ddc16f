"""Tokens come from the distribution that their log-probs claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.generation import Sampling
from grpo_eqx.generation.sampling import GREEDY, sample_tokens
from grpo_eqx.sharding import parse_mesh

ALL = Sampling()
LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))


def draw(sampling: Sampling, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    keys = jax.random.split(jax.random.key(0), count)
    logits = jnp.broadcast_to(LOGITS, (count, 5))
    tokens, logps = sample_tokens(logits, keys, sampling)
    return np.asarray(tokens), np.asarray(logps)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(top_k=9), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(top_p=0.5), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(top_p=0.3), [1, 0, 0, 0, 0]),
        (Sampling(min_p=0.3), [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        (Sampling(temperature=0.5), [0.16, 0.09, 0.0225, 0.01, 0.0025]),
        (Sampling(temperature=0.5, top_k=2), [0.16, 0.09, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_truncated_tempered_distribution(
    sampling: Sampling, expected: list[float]
) -> None:
    probs = np.array(expected) / np.sum(expected)
    tokens, logps = draw(sampling)
    shares = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(shares, probs, atol=0.012)
    assert (shares[probs == 0] == 0).all()
    np.testing.assert_allclose(logps, np.log(probs[tokens]), atol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "logits", "kept"),
    [
        (Sampling(top_p=0.5), [0.0, 0.0, 0.0, 0.0], [0, 1]),
        (Sampling(top_p=0.6), [0.0, 0.0, 0.0, 0.0], [0, 1, 2]),
        (Sampling(top_p=0.6), [0.0, 1.0, 0.0, 0.0], [0, 1]),
        (Sampling(top_k=1), [0.0, 1.0, 1.0, 0.0], [1]),
        (Sampling(top_k=3), [0.0, 1.0, 0.0, 0.0], [0, 1, 2]),
        (Sampling(top_k=3, top_p=0.5), [0.0, 1.0, 1.0, 1.0], [1, 2]),
    ],
    ids=str,
)
def test_of_equally_likely_tokens_truncation_keeps_the_first(
    sampling: Sampling, logits: list[float], kept: list[int]
) -> None:
    keys = jax.random.split(make_key(3), 500)
    tokens, logps = sample_tokens(jnp.broadcast_to(jnp.array(logits), (500, 4)), keys, sampling)
    assert set(tokens.tolist()) == set(kept)
    probs = jax.nn.softmax(jnp.array(logits)[jnp.array(kept)])
    of_token = dict(zip(kept, jnp.log(probs).tolist(), strict=True))
    expected = [of_token[token] for token in tokens.tolist()]
    np.testing.assert_allclose(logps, expected, atol=1e-6)


def test_entries_of_several_parts_have_their_probabilities() -> None:
    """Pearson's chi-square over all entries of a vocabulary of ten parts."""
    vocab_size, count = 1280, 200_000
    logits = jax.random.normal(make_key(4), (vocab_size,)).at[::7].set(-jnp.inf)
    draws = jax.jit(lambda keys: sample_tokens(jnp.broadcast_to(logits, (1000, 1280)), keys, ALL))
    keys = jax.random.split(make_key(5), (count // 1000, 1000))
    tokens, logps = (np.concatenate(x) for x in zip(*map(draws, keys), strict=True))
    expected = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(logps, expected[tokens], atol=1e-5)
    counts = np.bincount(tokens, minlength=vocab_size)
    means = count * np.exp(np.asarray(expected, np.float64))
    assert (counts[means == 0] == 0).all()
    drawn = means > 0
    chi_square = ((counts - means)[drawn] ** 2 / means[drawn]).sum()
    freedom = drawn.sum() - 1
    assert abs(chi_square - freedom) < 3.3 * (2 * freedom) ** 0.5  # one in a thousand is farther


def test_rounding_changes_hardly_any_draw() -> None:
    """An inverted cumulative sum would change some thirty of these, and more in a larger one."""
    logits = 0.1 * jax.random.normal(make_key(6), (5000, 1280))
    keys = jax.random.split(make_key(7), 5000)
    rounding = jax.random.uniform(make_key(8), logits.shape, minval=-1e-3, maxval=1e-3)
    tokens = sample_tokens(logits, keys, ALL)[0]
    rounded = sample_tokens(logits + rounding, keys, ALL)[0]
    assert jnp.sum(tokens != rounded) <= 8


def test_draws_are_the_same_where_devices_share_the_vocabulary() -> None:
    """Of which parts are not whole on any device."""
    mesh = parse_mesh("1,2,4").build()
    logits = jax.random.normal(make_key(10), (6, 4, 3000))
    keys = jax.random.split(make_key(11), (6, 4))
    shared = NamedSharding(mesh, PartitionSpec("fsdp", None, "tp"))
    draw = jax.jit(lambda logits: sample_tokens(logits, keys, ALL))
    whole, found = draw(logits), draw(jax.device_put(logits, shared))
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_allclose(found[1], whole[1], atol=1e-6)


def test_truncation_reaches_over_parts() -> None:
    logits = jnp.zeros((500, 1280)).at[:, jnp.array([3, 700, 1279])].set(5.0)
    tokens, logps = sample_tokens(logits, jax.random.split(make_key(9), 500), Sampling(top_k=3))
    assert set(tokens.tolist()) == {3, 700, 1279}
    np.testing.assert_allclose(logps, -np.log(3), atol=1e-6)


@pytest.mark.slow
def test_the_tail_of_a_real_vocabulary_is_drawn_as_often_as_it_should() -> None:
    """Pearson's chi-square over one token of 0.99, and the rest of Qwen2.5's vocabulary in bins."""
    vocab_size, rounds, rows, num_bins = 151_936, 128, 64, 4
    tail = np.full(vocab_size, 0.01 / (vocab_size - 1))
    tail[7] = 0.99
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(tail, jnp.float32)), (rows, vocab_size))
    # The tests' programs are hardly optimized, and this one has a billion draws.
    optimized = {"xla_backend_optimization_level": 3}
    sample = jax.jit(
        lambda keys: sample_tokens(logits, keys, Sampling())[0], compiler_options=optimized
    )
    keys = jax.random.split(make_key(0), (rounds, rows))
    tokens = np.concatenate([sample(of_round) for of_round in keys])
    bins = np.where(tokens == 7, num_bins, tokens * num_bins // vocab_size)
    counts = np.bincount(bins, minlength=num_bins + 1)
    expected = len(tokens) * np.array([0.01 / num_bins] * num_bins + [0.99])
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Four degrees of freedom: one in a thousand exceeds 18.5.
    assert chi_square < 18.5, counts


def test_greedy_takes_the_likeliest_with_certainty() -> None:
    tokens, logps = draw(GREEDY, count=10)
    assert (tokens == 0).all()
    assert (logps == 0).all()


def test_each_row_draws_with_its_own_key() -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 50))
    together = sample_tokens(logits, keys, Sampling())[0]
    alone = [int(sample_tokens(logits[i], keys[i], Sampling())[0]) for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}]
)
def test_values_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)
