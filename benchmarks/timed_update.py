"""An update of a random model on random tokens, compiled, to be timed in turns with others."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import num_batch_shards
from grpo_eqx.training import Forward, Packing, Rows, RowShape, TrainState, UpdateOptions, Updater
from grpo_eqx.training.rows import pack, with_loss


class Batch(NamedTuple):
    """Completions to update on, as many of each prompt."""

    groups: list[Group]
    advantages: Float[np.ndarray, "P G"]


class TimedUpdate:
    """The compiled update of a model on one CPU device, and the state that it moves along."""

    def __init__(self, model: CausalLM, batch: Batch, micro_batch_size: int | None = None):
        mesh = parse_mesh("auto").build(jax.devices()[:1])
        self.updater = cpu_updater(mesh)
        packing = packed(batch.groups, mesh, micro_batch_size)
        self.tokens = int(packing.num_tokens().sum())
        """Through the layers in one update."""
        self.rows = rows_of(batch, packing, mesh)
        model = jax.device_put(model, model.shardings(mesh))
        self.state: TrainState = self.updater.init(model)
        lowered = self.updater.lower(self.state.model, self.state.opt_state, self.rows, None)
        self.temporary_bytes = lowered.compile().memory_analysis().temp_size_in_bytes

    def __call__(self) -> float:
        """One update; its seconds."""
        start = time.perf_counter()
        self.state, metrics = self.updater(self.state, self.rows)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def cpu_updater(mesh: jax.sharding.Mesh) -> Updater:
    """Updates as runs on CPUs make them, by the mean over all tokens: it knows of no groups."""
    forward = Forward(
        backend=ChunkedLoss(),
        mesh=mesh,
        dtype=jnp.dtype("float32"),
        remat="none",
        attention=best_attention(mesh),
    )
    options = UpdateOptions(temperature=1.0, objective=Objective(loss_type="dapo"))
    return Updater(options, forward, optax.adamw(1e-5))


def packed(
    groups: list[Group], mesh: jax.sharding.Mesh, micro_batch_size: int | None = None
) -> Packing:
    """Plans rows as on CPUs, for prompts and completions up to the longest of these."""
    prompt_lengths = np.array([len(group[0].prompt_ids) for group in groups])
    lengths = np.array([[len(each) for each in group] for group in groups])
    shape = RowShape.of(
        *lengths.shape,
        prompt_length=int(prompt_lengths.max()),
        completion_length=int(lengths.max()),
        num_shards=num_batch_shards(mesh),
        size=micro_batch_size,
        most_tokens=1024,
    )
    return Packing.plan(prompt_lengths, lengths, shape)


def rows_of(batch: Batch, packing: Packing, mesh: jax.sharding.Mesh) -> Rows:
    """Rows with all that an update reads; every token counts."""
    written = [each.written for group in batch.groups for each in group]
    rows = pack(batch.groups, packing, mesh)
    return with_loss(rows, packing, mesh, written, batch.advantages.reshape(-1))


def random_batch(
    vocab_size: int, prompts: int, group: int, prompt_length: int, completion_length: int
) -> Batch:
    """Random tokens, all of one length, and random advantages."""
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(vocab_size, size=(prompts, prompt_length))
    ids = rng.integers(vocab_size, size=(prompts, group, completion_length))
    groups = [
        [
            Trajectory(prompt_ids[p].tolist(), Address(0, p, g)).completed(
                ids[p, g].astype(np.int32), finish_reason="length"
            )
            for g in range(group)
        ]
        for p in range(prompts)
    ]
    return Batch(groups, rng.standard_normal((prompts, group)).astype(np.float32))
