"""Randomness on devices: Threefry keys, each with an address, and noise that is drawn with them.

Every key names its generator, because users can change JAX's default (`JAX_DEFAULT_PRNG_IMPL`), and
with `rbg`, a draw depends on the draws made alongside it.
"""

from numbers import Integral

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Key, UInt32

NUM_SEEDS = 2**32
"""Exclusive upper bound of seeds: larger seeds would repeat the draws of smaller seeds."""

_GENERATOR = "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_BELOW_ONE = 1 - 2.0**-24


def make_key(seed: int | Integer[Array, ""]) -> Key[Array, ""]:
    """Returns the key of a seed, for any default generator of JAX.

    Raises `ValueError` for a seed that is negative, or not below `NUM_SEEDS`.
    """
    if isinstance(seed, Integral):
        if not 0 <= seed < NUM_SEEDS:
            raise ValueError(f"seed {seed} is not between 0 and {NUM_SEEDS - 1}")
        seed = jnp.uint32(int(seed))
    return jax.random.key(seed, impl=_GENERATOR)


def sample_keys(
    seed: int | Integer[Array, ""],
    steps: Int[Array, ""] | Int[Array, " P"],
    prompt_indices: Int[Array, " P"],
    num_generations: int,
) -> Key[Array, "P G"]:
    """Derives the key of every completion: a pure function of (seed, step, prompt, sample).

    **Arguments:**

    - `seed`: the seed.
    - `steps`: the step of each prompt, or of all.
    - `prompt_indices`: the row of each prompt in its step's batch.
    - `num_generations`: completions of each prompt.

    Raises `ValueError` for a seed that `make_key` rejects.
    """
    seed_key = make_key(seed)

    def of_prompt(step: Int[Array, ""], index: Int[Array, ""]) -> Key[Array, " G"]:
        key = jax.random.fold_in(jax.random.fold_in(seed_key, step), index)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_generations))

    return jax.vmap(of_prompt)(jnp.broadcast_to(steps, prompt_indices.shape), prompt_indices)


def completion_keys(
    seed: int | Integer[Array, ""],
    steps: Int[Array, " N"],
    prompt_indices: Int[Array, " N"],
    samples: Int[Array, " N"],
) -> Key[Array, " N"]:
    """Derives the keys of completions, those of `sample_keys`, from the address of each.

    **Arguments:**

    - `seed`: the seed.
    - `steps`: the step of each completion.
    - `prompt_indices`: the row of its prompt in its step's batch.
    - `samples`: its number among those of its prompt.

    Raises `ValueError` for a seed that `make_key` rejects.
    """
    keys = jnp.broadcast_to(make_key(seed), steps.shape)
    for part in (steps, prompt_indices, samples):
        keys = jax.vmap(jax.random.fold_in)(keys, part)
    return keys


def token_keys(keys: Key[Array, "*n"], positions: Int[Array, "*n"]) -> Key[Array, "*n"]:
    """Derives the keys of tokens from their completions' keys and their positions."""
    return jnp.vectorize(jax.random.fold_in)(keys, positions)


def gumbel(key: Key[Array, ""], size: int) -> Float[Array, " size"]:
    """Draws standard Gumbel noise, float32; entry `i` is a function of the key and `i` alone.

    The noise is -log(-log(1 - x)), where x is uniform on (0, 1) with steps of 2^-48 near 0. So
    large values, which make unlikely tokens win, have the right frequency, up to 34. JAX's default
    has steps of 2^-23 and ends at 15.9: it never draws a token of probability 1e-8. JAX's more
    exact modes hash twice; this function uses both words of one block.

    Raises `ValueError` for a key of another generator.
    """
    if jax.random.key_impl(key) != _GENERATOR:
        raise ValueError(
            f"the key uses {jax.random.key_impl(key)}: make keys with {make_key.__name__}"
        )
    high, low = _threefry(jax.random.key_data(key), jnp.arange(size, dtype=jnp.uint32))
    # Processors convert signed integers to floats faster than unsigned ones.
    coarse, fine = ((word >> 8).astype(jnp.int32).astype(jnp.float32) for word in (high, low))
    tail = coarse * 2.0**-24 + (fine + 0.5) * 2.0**-48
    return -jnp.log(-jnp.log1p(-jnp.minimum(tail, _BELOW_ONE)))


def _threefry(
    key: UInt32[Array, "2"], counts: UInt32[Array, " size"]
) -> tuple[UInt32[Array, " size"], UInt32[Array, " size"]]:
    """Encrypts the blocks (0, count) with Threefry-2x32 of 20 rounds, into two words each.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). On CPUs, JAX's own version
    loops over the rounds, each of which goes through memory. This version fuses with later code.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY)
    left, right = jnp.broadcast_to(keys[0], counts.shape), counts + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            left = left + right
            right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        left = left + keys[(i + 1) % 3]
        right = right + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return left, right
