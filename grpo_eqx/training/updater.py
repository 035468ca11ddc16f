"""Updates of the policy: the gradient over a batch's rows, and one step of the optimizer."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.shapes import Number
from grpo_eqx.generation.routes import Routes
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.objective import Metrics, TokenBatch, Totals
from grpo_eqx.objective.high_entropy import entropy_floor
from grpo_eqx.sharding.rules import num_batch_shards, optimizer_shardings
from grpo_eqx.training.expert_use import ExpertUse
from grpo_eqx.training.forward import Forward, ForwardPass
from grpo_eqx.training.options import UpdateNumbers, UpdateOptions
from grpo_eqx.training.rows import Rows
from grpo_eqx.training.scorer import MICRO_BATCHES
from grpo_eqx.training.state import TrainState

UPDATE = "update"
SKIPPED = "skipped_updates"
"""Metric of an update: 1 where it was skipped, because it was not finite."""


class _Sums(eqx.Module):
    """Sums over micro-batches."""

    gradient: CausalLM
    metrics: Metrics
    expert_use: ExpertUse | None

    def plus(self, other: "_Sums") -> "_Sums":
        gradient, use = jax.tree.map(
            jnp.add, (self.gradient, self.expert_use), (other.gradient, other.expert_use)
        )
        return _Sums(gradient, self.metrics.merged(other.metrics), use)


def update(
    model: CausalLM,
    opt_state: optax.OptState,
    rows: Rows,
    routes: Routes | None,
    numbers: UpdateNumbers,
    forward: Forward,
    optimizer: optax.GradientTransformationExtraArgs,
) -> tuple[CausalLM, optax.OptState, dict[str, Array]]:
    """Takes one optimizer step on the batch in `rows`, unless it is not finite.

    Everything is counted over the whole batch, so the step is the same for any rows, micro-batches
    and devices.

    **Arguments:**

    - `model`, `opt_state`: parameters, and the state of the optimizer.
    - `rows`: the batch, with all that the loss needs.
    - `routes`: the rollout's experts, where the rows replay them.
    - `numbers`: the temperature, the objective and what else is data.
    - `forward`, `optimizer`: strategies.

    **Returns:** the model, the optimizer's state, and metrics.
    """
    policy_mask = _policy_mask(rows, numbers.left_out)
    totals = _totals(rows, policy_mask)
    params, frozen = eqx.partition(model, model.trainable)

    def loss(
        params: CausalLM, index: Int[Array, ""]
    ) -> tuple[Float[Array, ""], tuple[Metrics, ExpertUse | None]]:
        own = rows.micro_batch(index)
        made = forward(eqx.combine(params, frozen), own, routes, numbers.temperature)
        acted_on = jax.lax.dynamic_index_in_dim(policy_mask, index, keepdims=False)
        part, metrics = numbers.objective(_token_batch(own, made, acted_on), totals)
        return part, (metrics, made.expert_use)

    def accumulate(index: Int[Array, ""], sums: _Sums) -> _Sums:
        # Taken inside the loop, so that the number of micro-batches can be an argument.
        gradient, (metrics, use) = jax.grad(loss, has_aux=True)(params, index)
        return sums.plus(_Sums(gradient, metrics, use))

    _, (like, like_use) = jax.eval_shape(loss, params, rows.number)
    zeros, no_use = jax.tree.map(jnp.zeros_like, (params, like_use))
    start = _Sums(zeros, Metrics.of_nothing(like), no_use)
    with jax.named_scope(MICRO_BATCHES):
        sums = jax.lax.fori_loop(jnp.int32(0), rows.number, accumulate, start)
    metrics = {**sums.metrics.values(), "grad_norm": optax.tree.norm(sums.gradient)}
    if sums.expert_use is not None:
        metrics |= sums.expert_use.metrics()
    as_data = {} if numbers.optimizer is None else {"numbers": numbers.optimizer}
    updates, next_opt_state = optimizer.update(sums.gradient, opt_state, params, **as_data)
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
    model = jax.lax.with_sharding_constraint(model, model.shardings(forward.mesh))
    return model, opt_state, {**metrics, SKIPPED: 1.0 - finite.astype(jnp.float32)}


def _policy_mask(rows: Rows, left_out: Number | None) -> Bool[Array, "M R S"]:
    """Returns True on the counted tokens that the policy term acts on: those of high entropy.

    **Arguments:**

    - `rows`: the rows.
    - `left_out`: share of the tokens that is left out; `None` for none.
    """
    assert rows.counted is not None
    if left_out is None:
        return rows.counted
    assert rows.entropies is not None, "top_entropy_quantile needs entropies"
    return rows.counted & (rows.entropies >= entropy_floor(rows.entropies, rows.counted, left_out))


def _totals(rows: Rows, policy_mask: Bool[Array, "M R S"]) -> Totals:
    assert rows.counts is not None
    return Totals(policy_tokens=policy_mask.sum().astype(jnp.float32), **rows.counts._asdict())


def _token_batch(rows: Rows, made: ForwardPass, acted_on: Bool[Array, "R S"]) -> TokenBatch:
    """Lays a micro-batch out by completion for the objective."""
    is_token, by_completion = rows.is_token(), rows.by_completion
    optional = {
        name: None if x is None else by_completion(x)
        for name, x in (("old_logps", rows.old_logps), ("ref_logps", rows.ref_logps))
    }
    assert rows.counted is not None
    assert rows.advantages is not None
    return TokenBatch(
        logps=by_completion(made.stats.logps),
        entropies=by_completion(made.stats.entropies),
        sampler_logps=by_completion(rows.sampler_logps),
        advantages=rows.advantages,
        mask=by_completion(rows.counted) & is_token,
        policy_mask=by_completion(acted_on) & is_token,
        **optional,
    )


class Updater:
    """The compiled `update`, with what it needs besides arrays."""

    def __init__(
        self,
        options: UpdateOptions,
        forward: Forward,
        optimizer: optax.GradientTransformation,
        compiler: Compiler | None = None,
    ):
        """**Arguments:**

        - `options`: settings of the update.
        - `forward`: strategies of the forward pass.
        - `optimizer`: the optimizer.
        - `compiler`: compiles the program; by default one of its own.
        """
        self.options = options
        self.forward = forward
        self.optimizer = optax.with_extra_args_support(optimizer)
        self._compiler = compiler or Compiler()
        # In one array, as every argument of a program is sent to each device by itself.
        numbers, self._tree = jax.tree.flatten(options.numbers)
        self._numbers: Float[np.ndarray, " numbers"] = np.asarray(numbers, np.float32)
        self._jitted = self._compiler.jit(
            UPDATE, self._program, donate_argnames=("model", "opt_state")
        )

    def init(self, model: CausalLM) -> TrainState:
        """Returns the state before the first update; moments are sharded like their parameters.

        Raises the loss backend's errors if it cannot handle the model or the devices.
        """
        self._try_backend(model)
        init = jax.jit(self.optimizer.init, out_shardings=self.shardings(model))
        return TrainState(model, init(eqx.filter(model, model.trainable)))

    def shardings(self, model: CausalLM) -> Any:
        """Returns the shardings of the optimizer's state for a model, or for its shapes."""
        params = eqx.filter(model, model.trainable)
        shardings = eqx.filter(model.shardings(self.forward.mesh), model.trainable)
        return optimizer_shardings(self.optimizer, params, shardings)

    def __call__(
        self, state: TrainState, rows: Rows, routes: Routes | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """Takes one optimizer step on the rows; model and moments of `state` are donated.

        A step whose loss, gradient or change is not finite is skipped: model and moments stay as
        they are, and `skipped_updates` of the metrics is 1.
        """
        self._compiler.wait(UPDATE)
        model, opt_state, metrics = self._jitted(
            state.model, state.opt_state, rows, routes, self._numbers
        )
        return dataclasses.replace(state, model=model, opt_state=opt_state), metrics

    def lower(
        self, model: CausalLM, opt_state: optax.OptState, rows: Rows, routes: Routes | None
    ) -> jax.stages.Lowered:
        """Lowers the program for the shapes of its arguments.

        **Arguments:**

        - `model`, `opt_state`: those of the state.
        - `rows`, `routes`: as of a call.
        """
        return self._jitted.lower(model, opt_state, rows, routes, self._numbers)

    def _program(
        self,
        model: CausalLM,
        opt_state: optax.OptState,
        rows: Rows,
        routes: Routes | None,
        numbers: Float[Array, " numbers"],
    ) -> tuple[CausalLM, optax.OptState, dict[str, Array]]:
        tree = jax.tree.unflatten(self._tree, list(numbers))
        return update(model, opt_state, rows, routes, tree, self.forward, self.optimizer)

    def _try_backend(self, model: CausalLM) -> None:
        """Traces the loss backend for one token on each device, without computing anything."""
        forward, head = self.forward, model.head
        shape = (num_batch_shards(forward.mesh), 1, 1)
        jax.eval_shape(
            lambda hidden, head, ids: forward.backend(
                hidden,
                head,
                ids,
                self.options.temperature,
                forward.mesh,
                model.config.logit_softcap,
            ),
            jax.ShapeDtypeStruct((*shape, head.shape[1]), forward.dtype),
            jax.ShapeDtypeStruct(head.shape, head.dtype),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        )
