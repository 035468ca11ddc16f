"""One model, four ways through it: plain, grouped, decoded and rematerialized all agree."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.choices import Remat
from grpo_eqx.models.causal_attention import BlockedAttention, Visible
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.kv_cache import CACHE_BLOCK, GrowingCache, KeyValues, StoredKV
from grpo_eqx.models.layers import rms_norm
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.models.rotary import Rope, Rotary

CONFIG = Qwen2Config(
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=50,
    head_dim=8,
    rope_theta=100.0,
)
LENGTHS = (1, 5)
"""Prompt lengths: the shortest possible and a longer one."""
WIDTH = 6
"""Prompt length with padding."""
GROUP = 3
SIDES = ("left", "right")

logits = jax.jit(Qwen2.logits)
prefill = jax.jit(Qwen2.prefill, static_argnames="remat")


@jax.jit
def decode(
    model: Qwen2, prompt: PromptCache, own: list[GrowingCache], ids: Array, *at: Array
) -> tuple[Array, list[GrowingCache]]:
    """Logits after one more input of each completion, and the caches with it."""
    made = model.extend(prompt, own, ids[..., None], *at)
    return model.project_logits(made.hidden[:, :, 0]), made.own


def random_model(config: Qwen2Config = CONFIG, seed: int = 0) -> Qwen2:
    """A model whose biases and norms matter, and whose attention is not flat."""
    shapes = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)
    model = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)
    norms = (model.norm, model.layers.input_layernorm, model.layers.post_attention_layernorm)
    layers = dataclasses.replace(
        model.layers, input_layernorm=1 + norms[1], post_attention_layernorm=1 + norms[2]
    )
    return dataclasses.replace(model, norm=1 + norms[0], layers=layers)


def random_ids(*shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32))


def pad(rows: list[Array], side: str, length: int, fill: int = 0) -> tuple[Array, Array]:
    """Ids and mask of rows padded to `length`."""
    ids = np.full((len(rows), length), fill, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        where = slice(length - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)


def prompts(side: str, fill: int = 0) -> tuple[Array, Array]:
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    return pad(rows, side, WIDTH, fill)


def group_hidden(
    model: Qwen2,
    prompt_ids: Int[Array, "P Tp"],
    prompt_mask: Bool[Array, "P Tp"],
    completion_ids: Int[Array, "P G Tc"],
    remat: Remat = "none",
) -> Float[Array, "P G Tc H"]:
    """The states that predict each token of the completions, of rows with a prompt and its group.

    Each completion begins with the prompt's last token, of which the prompt's own copy is unseen.
    """
    (P, Tp), (_, G, Tc) = prompt_ids.shape, completion_ids.shape
    first = jnp.argmax(prompt_mask, axis=1)[:, None]
    last = first + prompt_mask.sum(axis=1, keepdims=True) - 1
    last_ids = jnp.take_along_axis(prompt_ids, last, axis=1)
    inputs = jnp.concatenate(
        [jnp.broadcast_to(last_ids[:, None], (P, G, 1)), completion_ids[..., :-1]], axis=-1
    )
    starts = jnp.broadcast_to(Tp + jnp.repeat(jnp.arange(G) * Tc, Tc), (P, G * Tc))
    alone = Visible.of_padded(prompt_mask)
    visible = Visible(
        jnp.concatenate([alone.own_start, starts.astype(jnp.int32)], axis=1),
        *(
            jnp.concatenate([x, jnp.broadcast_to(y, starts.shape).astype(jnp.int32)], axis=1)
            for x, y in zip(alone[1:], (first, last), strict=True)
        ),
    )
    offsets = jnp.tile(jnp.arange(Tc), G)
    positions = [jnp.maximum(jnp.cumsum(prompt_mask, axis=1) - 1, 0), last - first + offsets]
    hidden = model.hidden(
        jnp.concatenate([prompt_ids, inputs.reshape(P, -1)], axis=1),
        jnp.concatenate(positions, axis=1),
        visible,
        remat,
    ).states
    return hidden[:, Tp:].reshape(P, G, Tc, -1)


@jax.jit
def grouped_logits(
    model: Qwen2,
    prompt_ids: Int[Array, "P Tp"],
    prompt_mask: Bool[Array, "P Tp"],
    completion_ids: Int[Array, "P G Tc"],
) -> Float[Array, "P G Tc V"]:
    """The logits that predict each token of the completions."""
    return model.project_logits(group_hidden(model, prompt_ids, prompt_mask, completion_ids))


def assert_close(actual: Any, desired: Any, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest number."""
    desired = np.asarray(desired)
    np.testing.assert_allclose(actual, desired, rtol=0, atol=tolerance * np.abs(desired).max())


# A plain pass.


def test_init_has_the_promised_distribution():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    model = jax.jit(lambda key: Qwen2.init(config, key))(jax.random.key(0))
    model = jax.tree.map(np.asarray, model)
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}
    norms = [model.norm, model.layers.input_layernorm, model.layers.post_attention_layernorm]
    biases = [model.layers.q_proj.bias, model.layers.k_proj.bias, model.layers.v_proj.bias]
    assert all((x == 1).all() for x in norms)
    assert all((x == 0).all() for x in biases)
    weights = [x for x in jax.tree.leaves(model) if (x != 0).all() and (x != 1).all()]
    assert len(weights) == 9
    for i, weight in enumerate(weights):
        assert weight.std() == pytest.approx(0.02, rel=0.1)
        assert all(not np.array_equal(weight, other) for other in weights[:i])


def test_a_tied_model_projects_with_its_embedding():
    tied = random_model()
    untied = dataclasses.replace(
        tied,
        lm_head=tied.embed_tokens,
        config=dataclasses.replace(CONFIG, tie_word_embeddings=False),
    )
    ids = random_ids(2, 5)
    assert tied.head is tied.embed_tokens
    np.testing.assert_array_equal(logits(tied, ids), logits(untied, ids))
    other = dataclasses.replace(untied, lm_head=-tied.embed_tokens)
    np.testing.assert_array_equal(logits(other, ids), -logits(untied, ids))


def test_a_token_depends_on_those_before_it_and_none_after():
    model, ids = random_model(), random_ids(1, 8)
    changed = ids.at[0, 4].set((ids[0, 4] + 1) % CONFIG.vocab_size)
    before, after = logits(model, ids)[0], logits(model, changed)[0]
    np.testing.assert_array_equal(before[:4], after[:4])
    assert (np.abs(before - after)[4:].max(axis=-1) > 1e-2).all()


def test_logits_are_float32_whatever_the_model():
    model = random_model().astype(jnp.bfloat16)
    assert model(random_ids(1, 4)).dtype == jnp.bfloat16
    assert model.logits(random_ids(1, 4)).dtype == jnp.float32


@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_nothing(side: str):
    model = random_model()
    ids, mask = prompts(side)
    padded = logits(model, ids, mask)
    for i, length in enumerate(LENGTHS):
        assert_close(padded[i][mask[i]], logits(model, random_ids(1, length, seed=length))[0])


@pytest.mark.parametrize("side", SIDES)
def test_the_content_of_padding_never_matters(side: str):
    model = random_model()
    completions = random_ids(len(LENGTHS), GROUP, 5)
    (ids, mask), (other_ids, _) = prompts(side, fill=0), prompts(side, fill=33)
    assert not np.array_equal(ids, other_ids)
    plain = [logits(model, x, mask)[mask] for x in (ids, other_ids)]
    np.testing.assert_array_equal(*plain)
    grouped = [grouped_logits(model, x, mask, completions) for x in (ids, other_ids)]
    np.testing.assert_array_equal(*grouped)


# The grouped pass.


@pytest.mark.parametrize("side", SIDES)
def test_the_grouped_pass_is_the_plain_pass_over_prompt_and_completion(side: str):
    model = random_model()
    completions = random_ids(len(LENGTHS), GROUP, 5)
    grouped = grouped_logits(model, *prompts(side), completions)
    for i, length in enumerate(LENGTHS):
        prompt = jnp.broadcast_to(random_ids(length, seed=length), (GROUP, length))
        plain = logits(model, jnp.concatenate([prompt, completions[i]], axis=1))
        assert_close(grouped[i], plain[:, length - 1 : -1])


def test_what_follows_a_completion_never_matters():
    model = random_model()
    completions = random_ids(len(LENGTHS), GROUP, 5)
    changed = completions.at[:, :, 3:].set(7)
    before = grouped_logits(model, *prompts("left"), completions)
    after = grouped_logits(model, *prompts("left"), changed)
    # The token at 3 is predicted from those before it, and is an input only afterwards.
    np.testing.assert_array_equal(before[:, :, :4], after[:, :, :4])
    assert np.abs(before - after)[:, :, 4].max() > 1e-2


@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_cache_leaves_the_last_token_to_the_completions(side: str):
    ids, mask = prompts(side)
    cache = prefill(random_model(), ids, mask)
    last = [random_ids(length, seed=length)[-1] for length in LENGTHS]
    np.testing.assert_array_equal(cache.last_ids, last)
    np.testing.assert_array_equal(cache.last_positions, np.array(LENGTHS) - 1)
    np.testing.assert_array_equal(cache.visible.sum(axis=1), np.array(LENGTHS) - 1)
    assert not (cache.visible & ~mask).any()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head_multiple", [1, 16], ids=["as_computed", "filled"])
def test_decoding_step_by_step_is_the_grouped_pass(side: str, head_multiple: int):
    """Also from a cache that holds zeros after each head."""
    model = random_model()
    completions = random_ids(len(LENGTHS), GROUP, 5)
    P, G, Tc = completions.shape
    cache = prefill(model, *prompts(side)).stored(jnp.dtype("float32"), head_multiple)
    # Rubbish where nothing is written yet: no step may look at it.
    head_size = cache.kv[0].head_size
    assert head_size == max(CONFIG.head_size, head_multiple)
    shape = (CONFIG.num_hidden_layers, P, G, CONFIG.num_key_value_heads, Tc, head_size)
    own = [GrowingCache((StoredKV(jnp.full(shape, 1e3), jnp.full(shape, 1e3)),))]
    inputs, steps = jnp.broadcast_to(cache.last_ids[:, None], (P, G)), []
    for index in range(Tc):
        places = jnp.full((P, G), index)
        step, own = decode(model, cache, own, inputs, places, jnp.asarray(index + 1))
        steps.append(step)
        inputs = completions[:, :, index]
    grouped = grouped_logits(model, *prompts(side), completions)
    assert_close(jnp.stack(steps, axis=2), grouped)


def test_completions_at_different_places_decode_as_alone_to_the_last_bit():
    """Also where the others make attention read further blocks of the cache."""
    model = random_model()
    cache = prefill(model, *prompts("left")).stored(jnp.dtype("float32"))
    P, S = len(LENGTHS), 3 * CACHE_BLOCK
    shape = (CONFIG.num_hidden_layers, P, GROUP, CONFIG.num_key_value_heads, S, CONFIG.head_size)
    kv = StoredKV(*jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32))
    own = [GrowingCache((kv,))]
    places = jnp.asarray([[0, 5, CACHE_BLOCK], [CACHE_BLOCK - 1, CACHE_BLOCK + 1, 300]])
    inputs = random_ids(P, GROUP)
    together, new = decode(model, cache, own, inputs, places, places.max() + 1)
    for p, g in np.ndindex(P, GROUP):
        there = jnp.full_like(places, places[p, g])
        alone, new_alone = decode(model, cache, own, inputs, there, places[p, g] + 1)
        np.testing.assert_array_equal(together[p, g], alone[p, g])
        jax.tree.map(
            lambda x, y, p=p, g=g: np.testing.assert_array_equal(x[:, p, g], y[:, p, g]),
            new,
            new_alone,
        )


# Rematerialization.


@functools.cache
def gradient(remat: Remat) -> tuple[Qwen2, int]:
    """The gradient of a loss that reads every completion token, and its bytes of scratch memory."""
    (ids, mask), completions = prompts("left"), random_ids(len(LENGTHS), GROUP, 16)
    # Deep enough that what is kept for all layers exceeds what one layer needs at once.
    model = random_model(dataclasses.replace(CONFIG, num_hidden_layers=8))

    def loss(model: Qwen2) -> Float[Array, ""]:
        hidden = group_hidden(model, ids, mask, completions, remat)
        logps = jax.nn.log_softmax(model.project_logits(hidden))
        return -jnp.take_along_axis(logps, completions[..., None], axis=-1).mean()

    compiled = jax.jit(jax.grad(loss)).lower(model).compile()
    return compiled(model), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(remat: Remat):
    (plain, _), (rematerialized, _) = gradient("none"), gradient(remat)
    for x, y in zip(jax.tree.leaves(rematerialized), jax.tree.leaves(plain), strict=True):
        assert_close(x, y)
        assert np.abs(y).max() > 0


@pytest.mark.slow
def test_the_more_is_recomputed_the_less_memory_a_gradient_takes():
    (_, full), (_, dots), (_, none) = gradient("full"), gradient("dots"), gradient("none")
    assert full < dots < none


# Rotary positions.


def logits_at(
    model: Qwen2, ids: Int[Array, "B T"], positions: Int[Array, " T"]
) -> Float[Array, "B T V"]:
    """The plain pass, spelled out layer by layer, with chosen positions."""
    B, T = ids.shape
    rotary = Rotary.at(jnp.broadcast_to(positions, (B, 1, T)), CONFIG.head_size, CONFIG.rope)
    visible = Visible.of_padded(jnp.ones((B, T), bool))
    x = model.embed_tokens[ids][:, None]
    for i in range(CONFIG.num_hidden_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], model.layers)
        queries, kv = layer.project(x, rotary, CONFIG)
        kv = KeyValues(kv.keys[:, 0], kv.values[:, 0])
        attended = BlockedAttention()(queries[:, 0], kv, visible)
        x, _ = layer.finish(x, attended[:, None], CONFIG)
    return model.project_logits(rms_norm(x[:, 0], model.norm, CONFIG.rms_norm_eps))


def test_only_distances_between_positions_matter():
    model, ids = random_model(), random_ids(2, 8)
    positions, at = jnp.arange(8), jax.jit(logits_at)
    plain = at(model, ids, positions)
    assert_close(plain, logits(model, ids))
    assert_close(at(model, ids, positions + 1), plain)
    assert_close(at(model, ids, positions + 1000), plain, tolerance=1e-4)  # angles up to 1000
    stretched = at(model, ids, 2 * positions)
    assert np.abs(stretched - plain).max() > 0.05 * np.abs(plain).max()


def test_rotation_turns_pairs_half_a_head_apart_by_known_angles():
    positions = jnp.array([[[0, 1, 5]]])
    x = np.random.default_rng(0).normal(size=(1, 1, 3, 1, 4)).astype(np.float32)
    turned = Rotary.at(positions, head_dim=4, rope=Rope(100.0)).rotate(jnp.asarray(x))
    for t, position in enumerate([0, 1, 5]):
        for pair, frequency in enumerate([1.0, 0.1]):  # 100 ** (-2 * pair / 4)
            z = complex(x[0, 0, t, 0, pair], x[0, 0, t, 0, pair + 2])
            z *= np.exp(1j * position * frequency)
            assert turned[0, 0, t, 0, pair] == pytest.approx(z.real, abs=1e-5)
            assert turned[0, 0, t, 0, pair + 2] == pytest.approx(z.imag, abs=1e-5)


def test_a_prompt_cache_of_one_token_shows_nothing():
    cache = random_model().prefill(jnp.array([[3]]), jnp.array([[True]]))
    assert isinstance(cache, PromptCache)
    assert not cache.visible.any()
    assert (cache.last_ids[0], cache.last_positions[0]) == (3, 0)
