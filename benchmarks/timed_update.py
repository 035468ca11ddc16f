"""An update of a random model on random tokens, compiled, to be timed in turns with others."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_eqx.generation import Prompts, Rollout, Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import best_attention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training.batch import Batch
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.programs import Programs
from grpo_eqx.training.state import TrainState


class TimedUpdate:
    """The compiled update of a model on one CPU device, and the state that it moves along."""

    def __init__(self, model: CausalLM, batch: Batch, micro_batch_size: int | None = None):
        mesh = parse_mesh("auto").build(jax.devices()[:1])
        (_, prompt_length), (*_, length) = (
            x.shape for x in (batch.rollout.prompts.ids, batch.rollout.completion_ids)
        )
        options = ProgramOptions(
            sampling=Sampling(),
            max_prompt_length=prompt_length,
            max_completion_length=length,
            stopping=Stopping.of_ids((), model.config.vocab_size),
            pad_id=0,
            seed=0,
            dtype=jnp.dtype("float32"),
            remat="none",
            attention=best_attention(mesh),
            # The mean over all tokens, with advantages as given: it knows of no groups.
            objective=Objective(loss_type="dapo"),
            micro_batch_size_per_device=micro_batch_size,
            tokens_per_micro_batch=1024,
        )
        programs = Programs(options, mesh, ChunkedLoss(), optax.adamw(1e-5))
        self.batch = batch
        masks = batch.rollout.prompts.mask, batch.rollout.completion_mask
        packing = programs.packing(*(np.asarray(mask).sum(axis=-1) for mask in masks))
        self.tokens = int(packing.num_tokens().sum())
        """Through the layers in one update."""
        self.packing = jax.tree.map(jnp.asarray, packing)
        self.state: TrainState = programs.init(model)
        self.numbers = programs.update_numbers
        self.program = programs.jitted_update.lower(*self.arguments).compile()

    def __call__(self) -> float:
        """One update; its seconds."""
        start = time.perf_counter()
        model, opt_state, metrics = self.program(*self.arguments)
        self.state = TrainState(model, opt_state)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the program."""
        state = self.state
        return state.model, state.opt_state, self.batch, self.packing, None, self.numbers

    @property
    def temporary_bytes(self) -> int:
        return self.program.memory_analysis().temp_size_in_bytes


def random_batch(
    vocab_size: int, prompts: int, group: int, prompt_length: int, completion_length: int
) -> Batch:
    """Random tokens without any padding, and random advantages."""
    rng = np.random.default_rng(0)
    shape = prompts, group, completion_length

    def tokens(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(vocab_size, size=shape), jnp.int32)

    rollout = Rollout(
        Prompts(tokens(prompts, prompt_length), jnp.ones((prompts, prompt_length), bool)),
        completion_ids=tokens(*shape),
        completion_mask=jnp.ones(shape, bool),
        sampler_logps=jnp.zeros(shape, jnp.float32),
        finished=jnp.zeros((prompts, group), bool),
    )
    return Batch(rollout, jnp.asarray(rng.standard_normal((prompts, group)), jnp.float32))
