"""The three programs that run on devices: generate, score and update.

They are pure functions of arrays, compiled once for each set of shapes. Everything else of GRPO is
a host loop around them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from grpo_eqx._types import PromptIds, PromptMask, Remat, TokenFloats
from grpo_eqx.generation import Rollout, Sampling, generate, sample_keys
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.micro_batches import Batch, MicroBatches
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.objective import clipped_policy_loss
from grpo_eqx.sharding.rules import (
    batch_sharding,
    optimizer_shardings,
    prompt_sharding,
    replicated,
)


class TrainState(NamedTuple):
    """What training changes."""

    model: Qwen2
    """Parameters in float32."""
    opt_state: optax.OptState


class UpdateSums(NamedTuple):
    """Sums over the tokens of a micro-batch, which add up to those of the batch."""

    loss: Float[Array, ""]
    entropy: Float[Array, ""]
    clipped_low: Float[Array, ""]
    clipped_high: Float[Array, ""]
    logp_gap: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """What the programs need to know besides their arrays."""

    sampling: Sampling
    max_completion_length: int
    eos_ids: Sequence[int]
    pad_id: int
    seed: int
    dtype: jnp.dtype
    remat: Remat
    epsilon: float
    epsilon_high: float
    micro_batch_size_per_device: int | None


class Programs:
    """The compiled programs for one mesh, loss backend and optimiser."""

    def __init__(
        self,
        options: ProgramOptions,
        mesh: jax.sharding.Mesh,
        backend: LossBackend,
        optimizer: optax.GradientTransformation,
    ):
        self.options = options
        self.mesh = mesh
        self.backend = backend
        self.optimizer = optimizer
        self._generate = jax.jit(self._generate_program, static_argnames=("group", "sampling"))
        self._score = jax.jit(self._score_program)
        self._update = jax.jit(
            self._update_program, donate_argnames="state", static_argnames="micro_batches"
        )

    def init(self, model: Qwen2) -> TrainState:
        """The state before the first update, with the optimiser's moments sharded as parameters."""
        shardings = optimizer_shardings(self.optimizer, model, model.shardings(self.mesh))
        return TrainState(model, jax.jit(self.optimizer.init, out_shardings=shardings)(model))

    def generate(
        self,
        model: Qwen2,
        prompt_ids: PromptIds,
        prompt_mask: PromptMask,
        step: int,
        *,
        num_generations: int,
        first_row: int = 0,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Samples `num_generations` completions of every prompt.

        The draws are a pure function of (seed, step, prompt's row, sample's row), where prompts'
        rows are counted from `first_row`.
        """
        sharding = prompt_sharding(batch_sharding(self.mesh, len(prompt_ids), num_generations))
        ids, mask = jax.device_put((prompt_ids, prompt_mask), sharding)
        rows = np.arange(first_row, first_row + len(prompt_ids), dtype=np.int32)
        return self._generate(
            model, ids, mask, np.int32(step), rows, num_generations,
            sampling or self.options.sampling,
        )  # fmt: skip

    def score(self, model: Qwen2, rollout: Rollout) -> TokenFloats:
        """Log-probs of the completions' tokens under `model`, float32 `[P, G, Tc]`."""
        return self._score(model, rollout)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """One optimiser step on the batch; `state` is donated.

        The loss is the mean over all tokens of the batch (DAPO, arXiv 2503.14476, eq. 8), so the
        step is the same for any number of micro-batches and devices.
        """
        batch = jax.tree.map(self._place, batch)
        return self._update(state, batch, self._micro_batches(batch))

    def _place(self, x: Array | np.ndarray) -> Array:
        return x if isinstance(x, jax.Array) else jax.device_put(x, replicated(self.mesh))

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        P, G = batch.advantages.shape
        sharding = batch_sharding(self.mesh, P, G)
        return MicroBatches.plan(P, G, sharding, self.options.micro_batch_size_per_device)

    def _generate_program(
        self,
        model: Qwen2,
        prompt_ids: Int[Array, "P Tp"],
        prompt_mask: Array,
        step: Int[Array, ""],
        rows: Int[Array, " P"],
        group: int,
        sampling: Sampling,
    ) -> Rollout:
        options = self.options
        rollout = generate(
            model.astype(options.dtype),
            prompt_ids,
            prompt_mask,
            sample_keys(options.seed, step, rows, group),
            sampling=sampling,
            max_length=options.max_completion_length,
            eos_ids=options.eos_ids,
            pad_id=options.pad_id,
        )
        # Stated, because everything that follows is laid out by it.
        ids, mask, logps, finished = jax.lax.with_sharding_constraint(
            (rollout.completion_ids, rollout.completion_mask, rollout.sampler_logps,
             rollout.finished),
            batch_sharding(self.mesh, len(prompt_ids), group),
        )  # fmt: skip
        return Rollout(rollout.prompt_ids, rollout.prompt_mask, ids, mask, logps, finished)

    def _score_program(self, model: Qwen2, rollout: Rollout) -> TokenFloats:
        return self._token_stats(model, rollout).logps

    def _token_stats(self, model: Qwen2, rollout: Rollout) -> TokenStats:
        """Statistics of the completions' tokens at the sampling temperature."""
        options = self.options
        # The table of embeddings stays in float32: many tokens add to one row of its gradient.
        compute = eqx.tree_at(
            lambda m: m.embed_tokens, model.astype(options.dtype), model.embed_tokens
        )
        prompt = compute.prefill(rollout.prompt_ids, rollout.prompt_mask, options.remat)
        hidden = compute.completion_hidden(prompt, rollout.completion_ids, options.remat)
        # The head in float32: its gradient is summed over all tokens before it is rounded.
        return self.backend(
            hidden, model.head, rollout.completion_ids, options.sampling.temperature
        )

    def _micro_batch_loss(
        self, model: Qwen2, batch: Batch, num_tokens: Float[Array, ""]
    ) -> tuple[Float[Array, ""], tuple[UpdateSums, Float[Array, ""]]]:
        """One micro-batch's part of the loss, its sums, and its largest sampler gap."""
        stats = self._token_stats(model, batch.rollout)
        mask = batch.rollout.completion_mask
        old_logps = jax.lax.stop_gradient(
            stats.logps if batch.old_logps is None else jnp.asarray(batch.old_logps)
        )
        tokens = clipped_policy_loss(
            stats.logps,
            old_logps,
            jnp.asarray(batch.advantages),
            epsilon=self.options.epsilon,
            epsilon_high=self.options.epsilon_high,
        )
        gap = jnp.where(mask, jnp.abs(old_logps - batch.rollout.sampler_logps), 0.0)
        terms = (tokens.losses, stats.entropies, tokens.clipped_low, tokens.clipped_high, gap)
        sums = UpdateSums(*(jnp.sum(x, where=mask) / num_tokens for x in terms))
        return sums.loss, (sums, gap.max())

    def _update_program(
        self, state: TrainState, batch: Batch, micro_batches: MicroBatches
    ) -> tuple[TrainState, dict[str, Array]]:
        num_tokens = jnp.maximum(batch.rollout.completion_mask.sum(), 1).astype(jnp.float32)
        gradient_of = jax.grad(self._micro_batch_loss, has_aux=True)

        def accumulate(
            carry: tuple[Qwen2, UpdateSums, Float[Array, ""]], micro_batch: Batch
        ) -> tuple[tuple[Qwen2, UpdateSums, Float[Array, ""]], None]:
            gradient, (sums, gap_max) = gradient_of(state.model, micro_batch, num_tokens)
            total = jax.tree.map(jnp.add, carry[:2], (gradient, sums))
            return (*total, jnp.maximum(carry[2], gap_max)), None

        zeros = jax.tree.map(jnp.zeros_like, state.model)
        start = (zeros, UpdateSums(*[jnp.zeros(())] * len(UpdateSums._fields)), jnp.zeros(()))
        (gradient, sums, gap_max), _ = jax.lax.scan(accumulate, start, micro_batches.split(batch))
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        shardings = state.model.shardings(self.mesh)
        model = jax.lax.with_sharding_constraint(model, shardings)
        metrics = {
            "loss": sums.loss,
            "entropy": sums.entropy,
            "grad_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(updates),
            "clip_ratio/low_mean": sums.clipped_low,
            "clip_ratio/high_mean": sums.clipped_high,
            "clip_ratio/region_mean": sums.clipped_low + sums.clipped_high,
            "sampling/sampling_logp_difference/mean": sums.logp_gap,
            "sampling/sampling_logp_difference/max": gap_max,
        }
        return TrainState(model, opt_state), metrics
