"""The sampler's choice of experts, recorded in a rollout and used again by the trainer."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, Int, UInt8

from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.routes import Routes, replaced
from grpo_eqx.models import Decoder, Qwen3MoeConfig
from grpo_eqx.sharding import ReplicatedSharding, TensorSharding
from grpo_eqx.training.lowering import model_shapes
from grpo_eqx.training.rows import pack, take_tokens

from .runner import Batch, Runner, Sample, make_runner

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
L, K = CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok
P, G, TP, TC = 8, 4, 5, 8
TEMPERATURE = 0.7
LENGTHS = np.random.default_rng(1).integers(1, TP + 1, P)
PROMPTS = [
    ids[:length].tolist()
    for ids, length in zip(np.random.default_rng(0).integers(4, 32, (P, TP)), LENGTHS, strict=True)
]


@functools.cache
def runner_on(mesh: str = "auto", num_devices: int = 1, **options: Any) -> Runner:
    options = {"records_routes": True, **options}
    length = options.pop("length", TC)
    return make_runner(
        CONFIG.vocab_size, TP, length, mesh, num_devices, optimizer=optax.sgd(1.0), **options
    )


@functools.cache
def trained() -> Decoder:
    return Decoder.init(CONFIG, jax.random.key(0), std=0.3)


@functools.cache
def sampling_model() -> Decoder:
    """The trained model with other routers, as if rounding had changed their choices."""
    other = 0.3 * jax.random.normal(jax.random.key(1), trained().layers.experts.router.shape)
    experts = dataclasses.replace(
        trained().layers.experts, router=trained().layers.experts.router + other
    )
    layers = dataclasses.replace(trained().layers, experts=experts)
    return dataclasses.replace(trained(), layers=layers)


def on(runner: Runner, model: Decoder) -> Decoder:
    return jax.device_put(jax.tree.map(np.asarray, model), model.shardings(runner.mesh))


@functools.cache
def rollout() -> Sample:
    one = runner_on()
    return on_host(one.sample(on(one, sampling_model()), PROMPTS, G))


def on_host(made: Sample) -> Sample:
    """The sample with routes as numpy arrays, and none on padding."""
    assert made.routes is not None
    prompts, completions = (np.asarray(x).copy() for x in made.routes)
    completions[~made.mask] = 0
    prompts[np.arange(TP) >= LENGTHS[:, None]] = 0
    return dataclasses.replace(made, routes=Routes(prompts, completions))


@functools.cache
def advantages() -> Float[np.ndarray, "P G"]:
    return np.random.default_rng(2).normal(size=(P, G)).astype(np.float32)


class Sequences(NamedTuple):
    """Each completion after its prompt, padded on the right."""

    ids: Int[np.ndarray, "N T"]
    routes: UInt8[np.ndarray, "N T L K"]
    first: Int[np.ndarray, " N"]
    """First token of the completion."""


def sequences(made: Sample) -> Sequences:
    N, T = P * G, TP + TC
    ids, routes = np.zeros((N, T), np.int32), np.zeros((N, T, L, K), np.uint8)
    for n in range(N):
        p, g = divmod(n, G)
        kept, length = LENGTHS[p], made.lengths[p, g]
        ids[n, :kept] = PROMPTS[p]
        ids[n, kept : kept + length] = made.ids[p, g, :length]
        routes[n, : kept - 1] = made.routes.prompts[p, : kept - 1].reshape(-1, L, K)
        inputs = made.routes.completions[p, g, :length].reshape(-1, L, K)
        routes[n, kept - 1 : kept - 1 + length] = inputs
    return Sequences(ids, routes, np.repeat(LENGTHS, G))


def plain(
    model: Decoder, ids: Int[Array, " T"], routes: UInt8[Array, "T L K"] | None
) -> tuple[Float[Array, "T V"], Int[Array, "T L K"]]:
    """Logits of a sequence by every expert for every token, and the routers' choices."""
    config, T = model.config, len(ids)
    half = config.head_size // 2
    angle = jnp.arange(T)[:, None] * config.rope_theta ** (-jnp.arange(half) / half)

    def norm(x: Array, scale: Array) -> Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    def heads(x: Array, weight: Array, scale: Array | None) -> Array:
        x = (x @ weight.T).reshape(T, -1, config.head_size)
        if scale is not None:
            a, b = jnp.split(norm(x, scale), 2, axis=-1)
            cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return jnp.repeat(x, config.num_attention_heads // x.shape[1], axis=1)

    x, choices = model.embed_tokens[ids], []
    for number in range(L):
        layer = jax.tree.map(lambda w, number=number: w[number], model.layers)
        y = norm(x, layer.input_layernorm)
        q = heads(y, layer.q_proj.weight, layer.q_norm)
        k = heads(y, layer.k_proj.weight, layer.k_norm)
        v = heads(y, layer.v_proj.weight, None)
        scores = jnp.einsum("tnd,snd->nts", q, k) / np.sqrt(config.head_size)
        scores = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf))
        x += jnp.einsum("nts,snd->tnd", scores, v).reshape(T, -1) @ layer.o_proj.weight.T
        y = norm(x, layer.post_attention_layernorm)
        scores = jax.nn.softmax(y @ layer.experts.router.T)
        choices.append(jnp.argsort(-scores, axis=-1)[:, :K])
        used = choices[-1] if routes is None else routes[:, number]
        scores *= (used[..., None] == jnp.arange(CONFIG.num_experts)).any(axis=1)
        scores /= scores.sum(axis=-1, keepdims=True)
        gate = jnp.einsum("th,ehi->tei", y, layer.experts.gate_proj)
        up = jnp.einsum("th,ehi->tei", y, layer.experts.up_proj)
        opened = jax.nn.silu(gate) * up
        x += jnp.einsum("te,tei,eih->th", scores, opened, layer.experts.down_proj)
    return norm(x, model.norm) @ model.head.T, jnp.stack(choices, axis=1)


@jax.jit
def plain_logps(
    model: Decoder, ids: Int[Array, "N T"], routes: UInt8[Array, "N T L K"] | None
) -> Float[Array, "N T"]:
    """Log-prob of each token but the first; that of token `t + 1` at `t`."""
    logits, _ = jax.vmap(plain, in_axes=(None, 0, 0))(model, ids, routes)
    logps = jax.nn.log_softmax(logits / TEMPERATURE)
    return jnp.take_along_axis(logps[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]


def of_completions(x: Float[Array, "N T"], first: Int[np.ndarray, " N"]) -> Float[Array, "P G Tc"]:
    columns = np.minimum(first[:, None] - 1 + np.arange(TC), x.shape[1] - 1)
    return jnp.take_along_axis(x, columns, axis=1).reshape(P, G, TC)


def test_the_record_is_what_the_samplers_routers_choose() -> None:
    made, (ids, routes, first) = rollout(), sequences(rollout())
    assert made.routes.completions.dtype == made.routes.prompts.dtype == np.uint8
    _, choices = jax.jit(jax.vmap(plain, in_axes=(None, 0, None)))(sampling_model(), ids, None)
    lengths = made.lengths.reshape(-1)
    assert lengths.min() < lengths.max()
    for mine, theirs, start, length in zip(routes, choices, first, lengths, strict=True):
        inputs = start - 1 + length  # the last token of a completion is no input
        np.testing.assert_array_equal(mine[:inputs], theirs[:inputs])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "options"),
    [
        ("auto", 1, dict(max_num_seqs=5, decoding_form=CpuDecoding())),  # refilled, then packed
        ("2,2,2", 8, dict(max_num_seqs=16, rollout_sharding=TensorSharding(2))),
        pytest.param(
            "1,4,1", 4, dict(rollout_sharding=ReplicatedSharding()), marks=pytest.mark.slow
        ),
        pytest.param("2,2,2", 8, {}, marks=pytest.mark.slow),
    ],
)
def test_the_record_is_the_same_in_any_slots_and_on_any_devices(
    mesh: str, num_devices: int, options: dict[str, Any]
) -> None:
    runner = runner_on(mesh, num_devices, **options)
    made = on_host(runner.sample(on(runner, sampling_model()), PROMPTS, G))
    np.testing.assert_array_equal(made.ids, rollout().ids)
    jax.tree.map(np.testing.assert_array_equal, made.routes, rollout().routes)


def test_scores_are_those_of_the_recorded_experts() -> None:
    """And not of those that the trained router would choose, but with its weights."""
    one, made, (ids, routes, first) = runner_on(), rollout(), sequences(rollout())
    mask, model = made.mask, on(runner_on(), trained())
    found = one.score(model, made).logps
    expected = of_completions(plain_logps(trained(), ids, routes), first)
    np.testing.assert_allclose(found[mask], expected[mask], atol=2e-5)
    own = of_completions(plain_logps(trained(), ids, None), first)
    assert np.abs(own - expected)[mask].max() > 0.1
    without = one.score(model, dataclasses.replace(made, routes=None)).logps
    np.testing.assert_allclose(without[mask], own[mask], atol=2e-5)
    reference = one.score(model, made, is_reference=True).logps
    np.testing.assert_array_equal(reference, without)


def step_of(runner: Runner, batch: Batch) -> tuple[Decoder, dict[str, float]]:
    """The change of every parameter in one update, and its metrics."""
    state = runner.updater.init(on(runner, trained()))
    state, metrics = runner.update(state, batch)
    change = jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), trained(), state.model)
    return change, {name: float(x) for name, x in metrics.items()}


@functools.cache
def whole_step() -> tuple[Decoder, dict[str, float]]:
    return step_of(runner_on(), Batch(rollout(), advantages()))


def assert_same(found: Decoder, expected: Decoder) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) < 2e-5 * np.linalg.norm(b)


def test_gradients_are_those_of_the_recorded_experts() -> None:
    """The routers' too: they weight the experts that are replayed."""
    made, (ids, routes, first) = rollout(), sequences(rollout())
    weights = made.mask * advantages()[..., None] / made.mask.sum()

    @jax.grad
    def gradient(model: Decoder) -> Array:
        logps = of_completions(plain_logps(model, ids, routes), first)
        return -jnp.sum(logps * weights, where=made.mask)

    assert_same(whole_step()[0], jax.tree.map(lambda x: -np.asarray(x), gradient(trained())))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "options"),
    [
        ("auto", 1, dict(micro=1, remat="full")),
        ("2,2,2", 8, dict(micro=4, remat="dots")),
        pytest.param("1,2,1", 2, {}, marks=pytest.mark.slow),
        pytest.param("1,1,4", 4, {}, marks=pytest.mark.slow),
    ],
)
def test_the_update_is_the_same_in_any_rows_and_on_any_devices(
    mesh: str, num_devices: int, options: dict[str, Any]
) -> None:
    change, metrics = step_of(
        runner_on(mesh, num_devices, **options), Batch(rollout(), advantages())
    )
    assert_same(change, whole_step()[0])
    for name, value in whole_step()[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_load_is_that_of_the_recorded_experts() -> None:
    made, metrics = rollout(), whole_step()[1]
    ids, routes, first = sequences(made)
    _, choices = jax.jit(jax.vmap(plain, in_axes=(None, 0, 0)))(trained(), ids, routes)
    used, agreed = [], []
    for n, length in enumerate(made.mask.sum(axis=-1).reshape(-1)):
        inputs = slice(first[n] - 1, first[n] - 1 + length)
        used.append(routes[n, inputs])
        both = routes[n, inputs, ..., None] == np.asarray(choices)[n, inputs, :, None]
        agreed.append(both.any(axis=-1))
    counts = np.stack(
        [np.bincount(x.reshape(-1), minlength=6) for x in np.moveaxis(np.concatenate(used), 1, 0)]
    )
    violation = counts.max(axis=1) / counts.mean(axis=1) - 1
    np.testing.assert_allclose(metrics["moe/max_vio"], violation.mean(), rtol=1e-6)
    assert metrics["moe/unused_experts"] == np.mean(counts == 0)
    agreement = np.concatenate(agreed).mean()
    np.testing.assert_allclose(metrics["moe/routing_agreement"], agreement, rtol=1e-6)
    assert agreement < 0.95


def test_ratios_are_exactly_1_on_policy() -> None:
    one = runner_on()
    model = on(one, trained())
    made = one.sample(model, PROMPTS, G)
    old = one.score(model, made).logps
    _, metrics = step_of(one, Batch(made, advantages(), old))
    assert metrics["policy_ratio/min"] == metrics["policy_ratio/max"] == 1
    assert metrics["moe/routing_agreement"] == 1
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5


def test_routes_stay_with_their_tokens_where_groups_are_replaced() -> None:
    kept = jax.tree.map(jnp.asarray, rollout().routes)
    fresh = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), kept)
    source = np.arange(P, dtype=np.int32) + np.where(np.arange(P) % 2, P, 0).astype(np.int32)
    both = replaced(kept, fresh, source, runner_on().mesh)
    for found, old, new in zip(both, kept, fresh, strict=True):
        np.testing.assert_array_equal(found[::2], old[::2])
        np.testing.assert_array_equal(found[1::2], new[1::2])


def test_rows_of_a_share_replay_the_routes_of_its_prompts() -> None:
    """The routes stay those of the whole rollout."""
    one, made, model = runner_on(), rollout(), on(runner_on(), trained())
    whole = one.score(model, made).logps
    own = range(1, P, 2)
    share = made.picked(slice(1, None, 2))
    packing = one.packing(share)
    rows = pack(share.groups, packing, one.mesh, own)
    logps = take_tokens(np.asarray(one.scorer(model, rows, made.routes).logps), packing)
    for n, found in enumerate(logps):
        p, g = own[n // G], n % G
        np.testing.assert_allclose(found, whole[p, g, : len(found)], atol=2e-5)


def test_without_replay_nothing_is_recorded() -> None:
    off = runner_on(records_routes=False)
    made = off.sample(on(off, sampling_model()), PROMPTS, G)
    assert made.routes is None
    np.testing.assert_array_equal(made.ids, rollout().ids)
    np.testing.assert_array_equal(made.logps, rollout().logps)
    _, metrics = step_of(off, Batch(made, advantages()))
    assert {name for name in metrics if "moe" in name} == {"moe/max_vio", "moe/unused_experts"}


def test_programs_are_compiled_ahead_for_rollouts_with_routes() -> None:
    runner = runner_on("2,2,2", 8)
    model = on(runner, trained())
    made = runner.sample(model, PROMPTS, G)
    shapes = model_shapes(CONFIG, runner.mesh)
    scored = runner.scorer.lower(model, runner.rows(made), made.routes)
    assert runner.lower_score(shapes, P, G).as_text() == scored.as_text()
    alone = runner.scorer.lower(model, runner.rows(dataclasses.replace(made, routes=None)), None)
    assert runner.lower_score(shapes, P, G, is_reference=True).as_text() == alone.as_text()
    state, rows = runner.updater.init(model), runner.rows_of(Batch(made, advantages()))
    updated = runner.updater.lower(model, state.opt_state, rows, made.routes)
    assert runner.lower_update(shapes, P, G).as_text() == updated.as_text()


def test_no_device_holds_all_routes() -> None:
    """Each has a part of every token's, wherever rows and slots take and put them."""
    length, size = 11, 4 * K
    runner = runner_on("2,4,1", 8, max_num_seqs=16, length=length)
    shapes = model_shapes(dataclasses.replace(CONFIG, num_hidden_layers=4), runner.mesh)
    for lowered in (runner.sampler.lower(shapes, P, G, TP), runner.lower_update(shapes, P, G)):
        text = lowered.compile().as_text()
        assert f"u8[{P * G},{length},{size // 8}]" in text
        assert f"u8[{P * G},{length},{size}]" not in text
        assert f"u8[{P},{G},{length},{size}]" not in text
