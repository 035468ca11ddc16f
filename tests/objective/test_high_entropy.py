"""The floor that the entropies of a share of the tokens reach."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.objective.high_entropy import entropy_floor


def kept(entropies: np.ndarray, share: float, mask: np.ndarray | None = None) -> np.ndarray:
    """Which tokens are at or above the floor."""
    shaped = jnp.asarray(entropies, jnp.float32).reshape(1, 1, -1)
    counts = jnp.ones(shaped.shape, bool) if mask is None else jnp.asarray(mask).reshape(1, 1, -1)
    floor = entropy_floor(shaped, counts, 1 - share)
    return np.asarray((shaped >= floor) & counts)[0, 0]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("count", [1, 2, 5, 10, 11, 21, 101, 1001])
def test_what_reaches_the_quantile_is_kept(share: float, count: int) -> None:
    rng = np.random.default_rng(count)
    entropies = rng.permutation(count) / 8
    floor = np.quantile(entropies, 1 - share) - 1e-9
    assert kept(entropies, share).tolist() == (entropies >= floor).tolist()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45, 0.5, 0.62, 0.9])
def test_equal_entropies_are_kept_together(share: float) -> None:
    """Interpolation between two of them can round to more than either, and none would be left."""
    assert kept(np.full(97, np.float32(1.1)), share).all()
    entropies = np.concatenate([np.zeros(5), np.full(90, 0.7), np.full(5, 2.0)])
    assert kept(entropies, share).tolist() == (entropies > 0).tolist()


def test_entropies_that_differ_by_rounding_are_equal() -> None:
    """Another order of sums, on other devices, gives other last digits."""
    rng = np.random.default_rng(0)
    entropies = np.concatenate([np.full(50, 1.5), np.full(50, 3.0)])
    for _ in range(20):
        rounded = entropies * (1 + rng.uniform(-1e-6, 1e-6, 100))
        assert kept(rounded, 0.2).tolist() == (entropies == 3.0).tolist()


def test_masked_tokens_neither_count_nor_stay() -> None:
    entropies = np.array([9.0, 1.0, 2.0, 3.0, 4.0, np.nan])
    mask = np.array([False, True, True, True, True, False])
    assert kept(entropies, 0.5, mask).tolist() == [False, False, False, True, True, False]
    assert not kept(entropies, 0.5, np.zeros(6, bool)).any()
