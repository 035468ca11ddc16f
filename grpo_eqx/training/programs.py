"""The three device programs (generate, score and update), and the helpers between them.

They are pure functions of arrays, compiled once for each set of shapes. The rest of GRPO is a host
loop around them.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from grpo_eqx.common.prng import sample_keys
from grpo_eqx.common.shapes import Number
from grpo_eqx.generation import (
    Prompts,
    Rollout,
    Sampling,
    SlotCounts,
    Stopping,
    generate,
)
from grpo_eqx.generation.prompts import map_prompts_and_completions
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.objective import Metrics, TokenBatch, Totals
from grpo_eqx.objective.high_entropy import entropy_floor
from grpo_eqx.sharding.arrays import shard
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rollout_sharding import lay_out
from grpo_eqx.sharding.rules import (
    BATCH_AXES,
    batch_sharding,
    num_batch_shards,
    optimizer_shardings,
    prompt_sharding,
    replicated,
)
from grpo_eqx.training.batch import Batch, gathered_shardings
from grpo_eqx.training.compile_ahead import CompileAhead
from grpo_eqx.training.expert_use import ExpertUse
from grpo_eqx.training.forward import ForwardPass, forward_pass
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.reference import copied, mixed
from grpo_eqx.training.row_shape import RowShape
from grpo_eqx.training.rows import Rows
from grpo_eqx.training.state import TrainState

Placed = TypeVar("Placed", Rollout, Batch)
Gathered = TypeVar("Gathered")
GENERATE, UPDATE, SCORE, SCORE_REFERENCE = "generate", "update", "score", "score_reference"
SCORE_SHARE = "score_share"
SKIPPED = "skipped_updates"
MICRO_BATCHES = "micro_batches"
"""Scope of the loops over micro-batches."""
"""Metric of an update: 1 where it was skipped, because it was not finite."""


class GenerateKey(NamedTuple):
    """Key in `Programs.ahead` of a program that `generate` calls."""

    num_prompts: int
    num_generations: int
    prompt_width: int
    sampling: Sampling

    def __str__(self) -> str:
        return f"{GENERATE} (prompts of {self.prompt_width} tokens)"


class TokenScores(NamedTuple):
    """Scores of a rollout's tokens under a model, float32, at the sampling temperature."""

    logps: Float[Array, "P G Tc"]
    entropies: Float[Array, "P G Tc"]


class Programs:
    """Compiled programs for one mesh, loss backend and optimizer."""

    def __init__(
        self,
        options: ProgramOptions,
        mesh: jax.sharding.Mesh,
        backend: LossBackend,
        optimizer: optax.GradientTransformation,
        on_compile: Callable[[str], None] = lambda name: None,
    ):
        """**Arguments:** settings and strategies; called with the name of a program, `generate`,
        `score` or `update`, before it is compiled.
        """
        self._on_compile = on_compile
        self.options = options
        self.mesh = mesh
        self.backend = backend
        self.optimizer = optax.with_extra_args_support(optimizer)
        # In one array, as every argument of a program is sent to each device by itself.
        numbers, self._numbers_tree = jax.tree.flatten(options.update_numbers)
        self.update_numbers: Float[np.ndarray, " numbers"] = np.asarray(numbers, np.float32)
        self._layouts: dict[tuple[int, int], RolloutLayout] = {}
        self.num_shapes: Counter[str] = Counter()
        """Number of sets of shapes that each of the three programs has been compiled for."""
        self.ahead = CompileAhead()
        """Compilation before calls; its keys are `GenerateKey`, `UPDATE`, and `SCORE`,
        `SCORE_REFERENCE` and `SCORE_SHARE`, which are one program for two kinds of models and,
        under the policy, for a rollout's share."""
        generate = self._counted(GENERATE, self._generate_program)
        self.jitted_generate = jax.jit(generate, static_argnames="group")
        score = self._counted(SCORE, self._score_program)
        self.jitted_score = jax.jit(score)
        update = self._counted(UPDATE, self._update_program)
        self.jitted_update = jax.jit(update, donate_argnames=("model", "opt_state"))
        self._share = jax.jit(self._share_program, static_argnames=("index", "count"))
        self._replace_groups = jax.jit(self._replace_groups_program)
        self._kept = jax.jit(self._kept_program)
        self._copy_reference = jax.jit(copied, static_argnames=("dtype", "mesh"))
        self._mix_reference = jax.jit(mixed, donate_argnames="reference", static_argnames="mesh")

    def _counted(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a program to count how often it is traced, and to say so."""

        @functools.wraps(program)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_shapes[name] += 1
            self._on_compile(name)
            return program(*args, **kwargs)

        return counted

    def init(self, model: CausalLM) -> TrainState:
        """Returns the state before the first update; moments are sharded like their parameters.

        Raises the loss backend's errors if it cannot handle the model or the devices.
        """
        self._try_backend(model)
        init = jax.jit(self.optimizer.init, out_shardings=self.optimizer_shardings(model))
        return TrainState(model, init(eqx.filter(model, model.trainable)))

    def optimizer_shardings(self, model: CausalLM) -> Any:
        """Returns the shardings of the optimizer's state for a model, or for its shapes."""
        params = eqx.filter(model, model.trainable)
        shardings = eqx.filter(model.shardings(self.mesh), model.trainable)
        return optimizer_shardings(self.optimizer, params, shardings)

    def generate(
        self,
        model: CausalLM,
        prompts: Prompts,
        step: int,
        *,
        num_generations: int,
        first_row: int = 0,
        sampling: Sampling | None = None,
    ) -> tuple[Rollout, SlotCounts]:
        """Samples `num_generations` completions of every prompt.

        The draws are a pure function of (seed, step, prompt's row, sample's row); prompts' rows
        are counted from `first_row`.

        **Arguments:** the model on the mesh; the prompts; the step; how to sample, by default as in
        training.
        """
        sampling = sampling or self.options.sampling
        num_prompts, width = prompts.ids.shape
        self.ahead.wait(self.key_of_generate(num_prompts, num_generations, width, sampling))
        layout = self.rollout_layout(num_prompts, num_generations)
        prompts = shard(prompts, layout.sharding(layout.prompts))
        rows = np.arange(first_row, first_row + num_prompts, dtype=np.int32)
        return self.jitted_generate(
            model, prompts, np.uint32(self.options.seed), np.int32(step), rows,
            self.options.stopping,  # no constant of the program: it has an entry for every token
            num_generations, sampling,
        )  # fmt: skip

    def key_of_generate(
        self,
        num_prompts: int,
        num_generations: int,
        prompt_width: int,
        sampling: Sampling | None = None,
    ) -> GenerateKey:
        """Returns the key in `ahead` of the program that `generate` calls.

        **Arguments:** the prompts, and their padded width; the completions of each; how to sample,
        by default as in training.
        """
        sampling = sampling or self.options.sampling
        return GenerateKey(num_prompts, num_generations, prompt_width, sampling)

    def rollout_layout(self, num_prompts: int, num_generations: int) -> RolloutLayout:
        """Returns the layout in which `generate` makes that many completions of each prompt."""
        batch = num_prompts, num_generations
        if batch not in self._layouts:  # a strategy may compare many
            options = self.options
            self._layouts[batch] = lay_out(
                options.rollout_sharding, self.mesh, *batch, options.max_num_seqs
            )
        return self._layouts[batch]

    def replace_groups(
        self, rollout: Rollout, fresh: Rollout, source: Int[np.ndarray, " P"]
    ) -> Rollout:
        """Returns a rollout whose prompt `p` is entry `source[p]` of both, concatenated."""
        return self._replace_groups(rollout, fresh, source)

    def without_dropped(self, rollout: Rollout, dropped: Bool[np.ndarray, "P G"]) -> Rollout:
        """Returns a rollout in which the loss counts no token of the dropped completions."""
        written = self._kept(rollout.loss_mask, dropped)
        return dataclasses.replace(rollout, written=written)

    def row_shape(self, num_prompts: int, num_generations: int) -> RowShape:
        """Returns the shape of the rows of `score` and `update` for batches of that size."""
        options = self.options
        return RowShape.of(
            num_prompts,
            num_generations,
            prompt_length=options.max_prompt_length,
            completion_length=options.max_completion_length,
            num_shards=num_batch_shards(self.mesh),
            size=options.micro_batch_size_per_device,
            most_tokens=options.tokens_per_micro_batch,
            multiple=options.row_multiple,
        )

    def packing(
        self, prompt_lengths: Int[np.ndarray, " P"], lengths: Int[np.ndarray, "P G"]
    ) -> Packing:
        """Plans the rows of `score` and `update` for a batch's prompts and completions."""
        return Packing.plan(prompt_lengths, lengths, self.row_shape(*lengths.shape))

    def score(
        self, model: CausalLM, rollout: Rollout, packing: Packing, *, is_reference: bool = False
    ) -> TokenScores:
        """Computes log-probs and entropies of the completions' tokens under `model`.

        The policy uses the rollout's routes, if there are some; the reference, another model,
        chooses its own.

        **Arguments:** the model; the rollout; the rows for its completions, by `packing`; whether
        the model is the reference.
        """
        for key in (SCORE, SCORE_REFERENCE, SCORE_SHARE):
            self.ahead.wait(key)
        rollout, packing = jax.tree.map(self._on_devices, (rollout, packing))
        # Which tokens the loss counts makes no difference here, and would make another program.
        rollout = dataclasses.replace(rollout, written=None)
        if is_reference:
            rollout = rollout.without_routes()
        return self.jitted_score(model, rollout, packing, np.float32(self.options.temperature))

    def reference(self, model: CausalLM, *, frozen: bool) -> CausalLM:
        """Copies a model for `score`: in its compute dtypes if frozen, or in float32 for mixing."""
        return self._copy_reference(model, self.options.dtype if frozen else None, self.mesh)

    def mix_reference(self, reference: CausalLM, model: CausalLM, alpha: float) -> CausalLM:
        """Returns the reference moved towards the model; `reference` is donated."""
        return self._mix_reference(reference, model, np.float32(alpha), self.mesh)

    def share(self, batch: Batch, index: int, count: int) -> Batch:
        """Computes `batch.share(index, count)` on the devices: the part for one update."""
        return self._share(batch, index, count)

    def update(
        self,
        state: TrainState,
        batch: Batch,
        packing: Packing,
        tokens_per_update: float | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """Takes one optimizer step on the batch; model and moments of `state` are donated.

        A step whose loss, gradient or change is not finite is skipped: model and moments stay as
        they are, and `skipped_updates` of the metrics is 1. Everything is counted over the whole
        batch, so the step is the same for any rows, micro-batches and devices. A share of a rollout
        comes with the rollout's `tokens_per_update`.

        **Arguments:** the state; the batch; the rows for its completions, by `packing`; of a share,
        the tokens that its weights are relative to.
        """
        self.ahead.wait(UPDATE)
        batch, packing = jax.tree.map(self._on_devices, (batch, packing))
        tokens = None if tokens_per_update is None else np.float32(tokens_per_update)
        model, opt_state, metrics = self.jitted_update(
            state.model, state.opt_state, batch, packing, tokens, self.update_numbers
        )
        return dataclasses.replace(state, model=model, opt_state=opt_state), metrics

    def tokens_per_update(
        self, written: Int[np.ndarray, "P G"], finished: Bool[np.ndarray, "P G"], num_shares: int
    ) -> float:
        """Returns the tokens of a rollout that the loss counts, per `share`.

        **Arguments:** the tokens that the model wrote in each completion; where these ended.
        """
        return max(self.num_counted(written, finished), 1) / num_shares

    def num_counted(
        self, written: Int[np.ndarray, "P G"], finished: Bool[np.ndarray, "P G"]
    ) -> int:
        """Returns the tokens of a rollout, as `tokens_per_update` gets it, that the loss counts."""
        counted = written[finished] if self.options.mask_truncated_completions else written
        return int(counted.sum())

    def _try_backend(self, model: CausalLM) -> None:
        """Traces the loss backend for one sequence on each device, without computing anything."""
        options, head = self.options, model.head
        shape = (num_batch_shards(self.mesh), 1, options.max_completion_length)
        jax.eval_shape(
            lambda hidden, head, ids: self.backend(
                hidden,
                head,
                ids,
                options.temperature,
                self.mesh,
                model.config.logit_softcap,
            ),
            jax.ShapeDtypeStruct((*shape, head.shape[1]), options.dtype),
            jax.ShapeDtypeStruct(head.shape, head.dtype),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        )

    def _on_devices(self, x: Array | np.ndarray) -> Array:
        return x if isinstance(x, jax.Array) else shard(x, replicated(self.mesh))

    def _generate_program(
        self,
        model: CausalLM,
        prompts: Prompts,
        seed: UInt[Array, ""],
        step: Int[Array, ""],
        rows: Int[Array, " P"],
        stopping: Stopping,
        group: int,
        sampling: Sampling,
    ) -> tuple[Rollout, SlotCounts]:
        options = self.options
        layout = self.rollout_layout(len(prompts), group)
        # Cast and resharded once for the whole rollout.
        model = self.rollout_model(model)
        for rules in layout.parameter_rules:
            model = jax.lax.with_sharding_constraint(model, model.shardings(layout.mesh, rules))
        rollout, counts = generate(
            model.transposed() if options.decodes_on_cpu else model,
            prompts,
            sample_keys(seed, step, rows, group),
            sampling=sampling,
            max_length=options.max_completion_length,
            stopping=stopping,
            pad_id=options.pad_id,
            num_slots=options.max_num_seqs,
            layout=layout,
            kv_cache_dtype=options.kv_cache_dtype,
            kv_head_multiple=options.kv_head_multiple,
            attention=options.attention.over(layout),
            unrolled=options.decodes_on_cpu,
            records_routes=options.router_replay,
        )
        # Every update reads prompts of one width.
        width = max(prompts.ids.shape[1], options.max_prompt_length)
        rollout = rollout.with_prompt_width(width, options.pad_id)
        # Constrained explicitly: everything that follows takes its layout from here.
        return self._constrain(rollout, len(prompts), group), counts

    def rollout_model(self, model: CausalLM) -> CausalLM:
        """Returns the model with the weights that `generate` reads."""
        dtype, model = self.options.sampling_dtype, model.merged()
        rounds = self.options.rollout_dtype == jnp.int8
        return model.rounded(dtype) if rounds else model.astype(dtype)

    def _constrain(self, tree: Placed, P: int, G: int) -> Placed:
        """Constrains a rollout or batch to the layout of `batch_sharding`."""
        sharding = batch_sharding(self.mesh, P, G)
        constrain = jax.lax.with_sharding_constraint
        return map_prompts_and_completions(
            lambda x: constrain(x, prompt_sharding(sharding)),
            lambda x: constrain(x, sharding),
            tree,
        )

    def _replace_groups_program(
        self, rollout: Rollout, fresh: Rollout, source: Int[Array, " P"]
    ) -> Rollout:
        P, G, _ = rollout.completion_ids.shape
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[source], rollout, fresh)
        return self._constrain(both, P, G)

    def _kept_program(
        self, mask: Bool[Array, "P G Tc"], dropped: Bool[Array, "P G"]
    ) -> Bool[Array, "P G Tc"]:
        kept = mask & ~dropped[..., None]
        sharding = batch_sharding(self.mesh, *dropped.shape)
        return jax.lax.with_sharding_constraint(kept, sharding)

    def _share_program(self, batch: Batch, index: int, count: int) -> Batch:
        return self._gathered(batch.share(index, count))

    def _gathered(self, tree: Gathered) -> Gathered:
        return jax.lax.with_sharding_constraint(tree, gathered_shardings(tree, self.mesh))

    def _rows(self, packing: Packing, micro_batch: Int[Array, ""], group: int) -> Rows:
        """Spells out the rows of a micro-batch, of which every device has its own."""
        sharding = jax.sharding.NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        rows = Rows.of(packing, micro_batch, group)
        return jax.lax.with_sharding_constraint(rows, sharding)

    def _score_program(
        self, model: CausalLM, rollout: Rollout, packing: Packing, temperature: Float[Array, ""]
    ) -> TokenScores:
        group = rollout.completion_ids.shape[1]
        rollout = self._gathered(rollout)

        def score(index: Int[Array, ""], scores: TokenScores) -> TokenScores:
            rows = self._rows(packing, index, group)
            stats = self._forward_pass(model, rollout, rows, temperature).stats
            return TokenScores(
                rows.put(scores.logps, stats.logps), rows.put(scores.entropies, stats.entropies)
            )

        zeros = jnp.zeros(rollout.completion_ids.shape, jnp.float32)
        start = TokenScores(zeros, zeros)
        with jax.named_scope(MICRO_BATCHES):
            scores = jax.lax.fori_loop(jnp.int32(0), packing.number, score, start)
        return self._gathered(scores)

    def _forward_pass(
        self, model: CausalLM, rollout: Rollout, rows: Rows, temperature: Number
    ) -> ForwardPass:
        """Computes statistics of the completions in rows, at the sampling temperature."""
        options = self.options
        return forward_pass(
            model,
            rollout,
            rows,
            backend=self.backend,
            mesh=self.mesh,
            dtype=options.dtype,
            remat=options.remat,
            attention=options.attention,
            temperature=temperature,
        )

    def _token_batch(
        self, batch: Batch, rows: Rows, stats: TokenStats, floor: Array | None
    ) -> TokenBatch:
        """Builds a micro-batch for the objective; `floor` is the minimum entropy that counts."""
        is_here = (rows.completions >= 0)[..., None]
        optional = {
            name: None if x is None else rows.pick(x)
            for name, x in (("old_logps", batch.old_logps), ("ref_logps", batch.ref_logps))
        }
        return TokenBatch(
            logps=stats.logps,
            entropies=stats.entropies,
            sampler_logps=rows.pick(batch.rollout.sampler_logps),
            advantages=rows.pick(batch.advantages),
            mask=rows.pick(self._mask(batch.rollout)) & is_here,
            policy_mask=rows.pick(self._policy_mask(batch, floor)) & is_here,
            **optional,
        )

    def _mask(self, rollout: Rollout) -> Bool[Array, "P G Tc"]:
        """Returns True on the tokens that the loss counts."""
        mask = rollout.loss_mask
        if self.options.mask_truncated_completions:
            return mask & rollout.finished[..., None]
        return mask

    def _policy_mask(self, batch: Batch, floor: Array | None) -> Bool[Array, "P G Tc"]:
        """Returns True on the counted tokens that the policy term acts on."""
        mask = self._mask(batch.rollout)
        return mask if floor is None else mask & (jnp.asarray(batch.entropies) >= floor)

    def _entropy_floor(self, batch: Batch, left_out: Number | None) -> Float[Array, ""] | None:
        """Returns the entropy that `top_entropy_quantile` of the tokens reach; `None` for all."""
        if left_out is None:
            return None
        assert batch.entropies is not None, "top_entropy_quantile needs entropies"
        entropies = jnp.asarray(batch.entropies)
        return entropy_floor(entropies, self._mask(batch.rollout), left_out)

    def _update_program(
        self,
        model: CausalLM,
        opt_state: optax.OptState,
        batch: Batch,
        packing: Packing,
        tokens_per_update: Float[Array, ""] | None,
        numbers: Float[Array, " numbers"],
    ) -> tuple[CausalLM, optax.OptState, dict[str, Array]]:
        temperature, objective, left_out, of_optimizer = jax.tree.unflatten(
            self._numbers_tree, list(numbers)
        )
        batch = self._gathered(batch)
        group = batch.advantages.shape[1]
        floor = self._entropy_floor(batch, left_out)
        totals = Totals.of(
            self._mask(batch.rollout), self._policy_mask(batch, floor), tokens_per_update
        )
        params, frozen = eqx.partition(model, model.trainable)

        def loss(
            params: CausalLM, index: Int[Array, ""]
        ) -> tuple[Float[Array, ""], tuple[Metrics, ExpertUse | None]]:
            rows = self._rows(packing, index, group)
            whole = eqx.combine(params, frozen)
            stats, use = self._forward_pass(whole, batch.rollout, rows, temperature)
            token_batch = self._token_batch(batch, rows, stats, floor)
            part, metrics = objective(token_batch, totals)
            return part, (metrics, use)

        def accumulate(
            index: Int[Array, ""], sums: tuple[CausalLM, Metrics, ExpertUse | None]
        ) -> tuple[CausalLM, Metrics, ExpertUse | None]:
            gradient, metrics, use = sums
            # Taken inside the loop, so that the number of micro-batches can be an argument.
            part_gradient, (part_metrics, part_use) = jax.grad(loss, has_aux=True)(params, index)
            gradient, use = jax.tree.map(jnp.add, (gradient, use), (part_gradient, part_use))
            return gradient, metrics.merged(part_metrics), use

        _, (like, like_use) = jax.eval_shape(loss, params, packing.number)
        zeros, no_use = jax.tree.map(jnp.zeros_like, (params, like_use))
        start = zeros, Metrics.of_nothing(like), no_use
        with jax.named_scope(MICRO_BATCHES):
            gradient, parts, use = jax.lax.fori_loop(
                jnp.int32(0), packing.number, accumulate, start
            )
        metrics = {**parts.values(), "grad_norm": optax.tree.norm(gradient)}
        if use is not None:
            metrics |= use.metrics()
        as_data = {} if of_optimizer is None else {"numbers": of_optimizer}
        updates, next_opt_state = self.optimizer.update(gradient, opt_state, params, **as_data)
        metrics["update_norm"] = optax.tree.norm(updates)
        next_params = optax.apply_updates(params, updates)
        # A selection and no branch: what is selected fuses with the optimizer's arithmetic.
        names = "loss", "grad_norm", "update_norm"
        finite = jnp.isfinite(jnp.stack([metrics[name] for name in names])).all()
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (next_params, next_opt_state),
            (params, opt_state),
        )
        model = eqx.combine(params, frozen)
        model = jax.lax.with_sharding_constraint(model, model.shardings(self.mesh))
        return model, opt_state, {**metrics, SKIPPED: 1.0 - finite.astype(jnp.float32)}
