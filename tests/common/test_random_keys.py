"""Keys do not depend on JAX's default generator, and noise has the tails that it should."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from grpo_eqx.common import random_keys
from grpo_eqx.common.random_keys import (
    NUM_SEEDS,
    completion_keys,
    gumbel,
    make_key,
    sample_keys,
)

ROOT = Path(__file__).parents[2]
OWN = ROOT / "grpo_eqx" / "common" / "random_keys.py"


@pytest.mark.parametrize("default", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_is_the_same_whatever_the_default_generator(default: str) -> None:
    with jax.default_prng_impl(default):
        key = make_key(5)
    assert jax.random.key_impl(key) == "threefry2x32"
    assert jax.random.key_data(key).tolist() == [0, 5]


def test_keys_are_made_in_one_place() -> None:
    """Nothing that runs makes a key of the default generator, or of a generator of its own."""
    makers = ("jax.random.key", "jax.random.PRNGKey", "jax.random.wrap_key_data")
    for folder in ("grpo_eqx", "benchmarks", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and path != OWN:
                    assert ast.unparse(node) not in makers, path
                # By another name it would go unseen.
                if isinstance(node, ast.ImportFrom) and node.module == "jax":
                    assert "random" not in {alias.name for alias in node.names}, path
                if isinstance(node, ast.ImportFrom):
                    assert node.module != "jax.random", path
                if isinstance(node, ast.Import):
                    assert "jax.random" not in {alias.name for alias in node.names}, path


def test_keys_of_completions_are_those_of_their_batches() -> None:
    batches = sample_keys(7, jnp.array([3, 3, 5]), jnp.array([0, 2, 9]), 4)
    addresses = [(3, 0, 1), (5, 9, 3), (3, 2, 0)]
    steps, prompts, samples = jnp.array(addresses).T
    keys = completion_keys(7, steps, prompts, samples)
    expected = [batches[0, 1], batches[2, 3], batches[1, 0]]
    for key, other in zip(keys, expected, strict=True):
        assert jax.random.key_data(key).tolist() == jax.random.key_data(other).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**31, NUM_SEEDS - 1])
def test_a_seed_is_its_own_key(seed: int) -> None:
    assert jax.random.key_data(make_key(seed)).tolist() == [0, seed]


@pytest.mark.parametrize("seed", [-1, NUM_SEEDS, 2**70])
def test_seeds_that_would_repeat_others_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed {seed} is not between 0 and 4294967295"):
        make_key(seed)


def test_a_key_of_another_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="rbg"):
        gumbel(jax.random.key(0, impl="rbg"), 3)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_noise_is_made_of_jaxs_own_threefry_blocks(seed: int) -> None:
    key = jax.random.fold_in(make_key(seed), 9)
    counts = jnp.arange(1000, dtype=jnp.uint32)
    high, low = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(counts), counts)
    words = np.asarray(high, np.float64) // 2**8 * 2.0**24 + np.asarray(low, np.float64) // 2**8
    uniform = (words + 0.5) * 2.0**-48
    expected = -np.log(-np.log1p(-uniform))
    # Where x is near 1, float32 has steps of 2^-24 for it.
    np.testing.assert_allclose(gumbel(key, 1000), expected, rtol=1e-6, atol=1e-5)


def test_noise_is_a_function_of_key_and_index() -> None:
    keys = jax.random.split(make_key(1), 5)
    noise = jax.jit(gumbel, static_argnames="size")
    together = jax.jit(jax.vmap(lambda key: gumbel(key, 300)))(keys)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_array_equal(noise(key, 300), row)
        np.testing.assert_array_equal(noise(key, 100), row[:100])


def test_noise_has_the_gumbel_distribution() -> None:
    """By its moments, and by Kolmogorov's distance from exp(-exp(-g))."""
    noise = np.sort(np.asarray(gumbel(make_key(2), 1_000_000), np.float64))
    assert np.isfinite(noise).all()
    steps = np.arange(len(noise)) / len(noise)
    distance = np.abs(np.exp(-np.exp(-noise)) - steps).max()
    assert distance < 1.95 / len(noise) ** 0.5  # one in a thousand is farther
    assert np.mean(noise) == pytest.approx(np.euler_gamma, abs=0.005)
    assert np.var(noise) == pytest.approx(np.pi**2 / 6, abs=0.015)


@pytest.mark.parametrize("word", [0, 2**8, 2**20, 2**31])
@pytest.mark.parametrize("other", [0, 2**8, 2**31, 2**32 - 1])
def test_unlikely_values_are_resolved(
    monkeypatch: pytest.MonkeyPatch, word: int, other: int
) -> None:
    """The noise of two words is that of 48 of their bits, to the last ones."""
    words = tuple(jnp.full(1, each, jnp.uint32) for each in (word, other))
    monkeypatch.setattr(random_keys, "_threefry", lambda key, counts: words)
    uniform = ((word >> 8) * 2.0**24 + (other >> 8) + 0.5) * 2.0**-48
    [noise] = gumbel(make_key(0), 1)
    assert float(noise) == pytest.approx(-np.log(-np.log1p(-uniform)), rel=1e-6)


def test_the_least_value_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    highest = jnp.full(1, 2**32 - 1, jnp.uint32)
    monkeypatch.setattr(random_keys, "_threefry", lambda key, counts: (highest, highest))
    assert float(gumbel(make_key(0), 1)[0]) == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)


def test_noise_is_float32_also_where_64_bits_are_on() -> None:
    with jax.enable_x64(True):
        wide = gumbel(make_key(4), 50)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, gumbel(make_key(4), 50))
