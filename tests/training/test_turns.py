"""Tokens that the model did not write are read as context, and nothing is learned of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.families.gemma3 import Gemma3Config
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.objective import Objective

from .runner import Batch, Sample, make_runner

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "windows": Gemma3Config(
        **SIZES, sliding_window=5, layer_types=("sliding_attention", "full_attention")
    ),
}
P, G, TP, TC, TEMPERATURE, RATE = 4, 2, 6, 24, 0.7, 32.0
runner_on = functools.cache(functools.partial(make_runner, SIZES["vocab_size"], TP, TC))


def dialogue(prompt: list[int], address: Address) -> Trajectory:
    """Turns of random lengths, and what others wrote between them."""
    rng = np.random.default_rng(address[1:])
    trajectory, longest = Trajectory(prompt, address), int(rng.integers(6, TC + 1))
    while (room := longest - len(trajectory)) > 0:
        ids = rng.integers(4, 32, size=min(room, rng.integers(1, 6)))
        is_turn = len(trajectory) == 0 or not trajectory.written[-1]
        logps = rng.normal(-2, 0.1, len(ids)) if is_turn else None
        trajectory = trajectory.extended(ids, logps)
    return dataclasses.replace(trajectory, finish_reason="stop")


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 32, size=n).tolist() for n in (6, 1, 4, 3)]
    groups = [
        [dialogue(prompt, Address(0, p, g)) for g in range(G)] for p, prompt in enumerate(prompts)
    ]

    def padded(name: str) -> np.ndarray:
        return np.array(
            [[np.pad(getattr(x, name), (0, TC - len(x))) for x in group] for group in groups]
        )

    lengths = np.array([[len(x) for x in group] for group in groups])
    sample = Sample(
        groups, padded("ids"), np.arange(TC) < lengths[..., None], padded("sampler_logps"),
        np.ones((P, G), bool),
    )  # fmt: skip
    assert not padded("written")[sample.mask].all()
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    return Batch(sample, advantages, counted=padded("written"))


def by_hand(model: Decoder, batch: Batch) -> Decoder:
    """The gradient, one whole sequence after the other, in which nothing is shared."""
    every = [x for group in batch.sample.groups for x in group]
    number = sum(int(x.written.sum()) for x in every)

    def loss(model: Decoder) -> jax.Array:
        total = jnp.float32(0)
        for each, advantage in zip(every, batch.advantages.reshape(-1), strict=True):
            ids = jnp.asarray([*each.prompt_ids, *each.ids])
            logps = jax.nn.log_softmax(model.logits(ids[None])[0] / TEMPERATURE)
            own = jnp.arange(len(each.prompt_ids), len(ids))[each.written]
            total -= advantage * logps[own - 1, ids[own]].sum()
        return total / number

    return jax.jit(jax.grad(loss))(model)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"), [("auto", 1, None), ("auto", 1, 2), ("2,2,2", 8, 4)]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_an_update_learns_from_written_tokens_alone(
    family: str, mesh: str, num_devices: int, micro: int | None, batch: Batch
) -> None:
    model = Decoder.init(CONFIGS[family], jax.random.key(0), std=0.2)
    expected = jax.tree.map(np.asarray, by_hand(model, batch))
    runner = runner_on(mesh, num_devices, micro=micro, objective=Objective(loss_type="dapo"))
    before = jax.tree.map(np.asarray, model)
    on_mesh = jax.device_put(model, model.shardings(runner.mesh))
    state, metrics = runner.update(runner.updater.init(on_mesh), batch)
    found = jax.tree.map(lambda b, a: (b - np.asarray(a)) / RATE, before, state.model)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-4 * np.abs(other).max() + 1e-7)
    assert np.isfinite(list(jax.device_get(metrics).values())).all()


def test_what_others_wrote_is_read(batch: Batch) -> None:
    """Another answer gives another gradient; another log-prob of it does not."""
    runner, model = (
        runner_on(objective=Objective(loss_type="dapo")),
        Decoder.init(CONFIGS["qwen2"], jax.random.key(0), std=0.2),
    )

    def change(batch: Batch) -> np.ndarray:
        state, _ = runner.update(runner.updater.init(jax.tree.map(jnp.copy, model)), batch)
        return np.asarray(state.model.embed_tokens)

    def altered(name: str, value: Any) -> Batch:
        groups = [
            [
                dataclasses.replace(x, **{name: np.where(x.written, getattr(x, name), value)})
                for x in group
            ]
            for group in batch.sample.groups
        ]
        return dataclasses.replace(batch, sample=dataclasses.replace(batch.sample, groups=groups))

    np.testing.assert_array_equal(change(altered("sampler_logps", np.float32(-9))), change(batch))
    assert np.abs(change(altered("ids", np.int32(5))) - change(batch)).max() > 1e-3
