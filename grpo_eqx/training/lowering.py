"""Lowering of the programs from shapes alone, without weights or devices."""

from collections.abc import Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding
from jaxtyping import PRNGKeyArray

from grpo_eqx.common.prng import make_key
from grpo_eqx.generation import Prompts, Rollout, Sampling
from grpo_eqx.generation.prompts import map_prompts_and_completions
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import Lora, prepared
from grpo_eqx.models.registry import init_model
from grpo_eqx.sharding.rules import (
    batch_sharding,
    prompt_sharding,
    replicated,
)
from grpo_eqx.training.batch import Batch, gathered_shardings
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.programs import Programs


def model_shapes(
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    lora: Lora | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> CausalLM:
    """Returns the shapes of a model's parameters, float32 where trained, with their shardings.

    **Arguments:** the architecture; the devices; the adapters to train, if any, and the dtype of
    what then is frozen.
    """

    def init(key: PRNGKeyArray) -> CausalLM:
        model = init_model(config, key)
        return model if lora is None else prepared(model, lora, dtype, key)

    shapes = jax.eval_shape(init, make_key(0))
    return jax.tree.map(_sharded, shapes, shapes.shardings(mesh))


def shapes_of(model: CausalLM, mesh: jax.sharding.Mesh) -> CausalLM:
    """Returns the shapes of a model that is at hand, with the shardings of its parameters."""
    return jax.tree.map(_sharded, model, model.shardings(mesh))


def lower_generate(
    programs: Programs,
    model: CausalLM,
    num_prompts: int,
    num_generations: int,
    prompt_length: int,
    sampling: Sampling | None = None,
) -> jax.stages.Lowered:
    """Lowers `generate` for a model's and a batch's shapes, by default with training's sampling."""
    layout = programs.rollout_layout(num_prompts, num_generations)
    prompts = jax.eval_shape(lambda: _prompts_of_nothing(num_prompts, prompt_length))
    return programs.jitted_generate.lower(
        model,
        jax.tree.map(lambda x: _sharded(x, layout.sharding(layout.prompts)), prompts),
        jax.ShapeDtypeStruct((), jnp.uint32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((num_prompts,), jnp.int32),
        programs.options.stopping,
        num_generations,
        sampling or programs.options.sampling,
    )


def reference_shapes(programs: Programs, model: CausalLM, *, frozen: bool) -> CausalLM:
    """Returns the shapes of the reference model for a model's shapes."""
    shapes = jax.eval_shape(lambda model: programs.reference(model, frozen=frozen), model)
    return jax.tree.map(_sharded, shapes, model.shardings(programs.mesh))


def optimizer_shapes(programs: Programs, model: CausalLM) -> optax.OptState:
    """Returns the shapes of the optimizer's state for a model's shapes."""
    params = eqx.filter(model, model.trainable)
    shapes = jax.eval_shape(programs.optimizer.init, params)
    return jax.tree.map(_sharded, shapes, programs.optimizer_shardings(model))


def lower_score(
    programs: Programs,
    model: CausalLM,
    num_prompts: int,
    num_generations: int,
    *,
    is_share: bool = False,
    is_reference: bool = False,
) -> jax.stages.Lowered:
    """Lowers `score` for a model's and a rollout's shapes, or a share's of a rollout."""
    batch = _batch_shapes(programs, model, num_prompts, num_generations, is_share=is_share)
    rollout = batch.rollout.without_routes() if is_reference else batch.rollout
    packing = _packing_shapes(programs, num_prompts, num_generations)
    temperature = jax.ShapeDtypeStruct((), jnp.float32)
    return programs.jitted_score.lower(model, rollout, packing, temperature)


def lower_update(
    programs: Programs,
    model: CausalLM,
    num_prompts: int,
    num_generations: int,
    scored: Collection[str] = (),
    *,
    is_share: bool = False,
    drops: bool = False,
) -> jax.stages.Lowered:
    """Lowers `update` for a model's and a batch's shapes.

    **Arguments:** besides shapes, which of `old_logps`, `ref_logps` and `entropies` the batch has,
    whether it is a share of a rollout, and whether completions are dropped (`without_dropped`).
    """
    batch = _batch_shapes(programs, model, num_prompts, num_generations, scored, is_share, drops)
    packing = _packing_shapes(programs, num_prompts, num_generations)
    tokens = jax.ShapeDtypeStruct((), jnp.float32) if is_share else None
    opt_state = optimizer_shapes(programs, model)
    return programs.jitted_update.lower(
        model, opt_state, batch, packing, tokens, programs.update_numbers
    )


def _batch_shapes(
    programs: Programs,
    model: CausalLM,
    num_prompts: int,
    group: int,
    scored: Collection[str] = (),
    is_share: bool = False,
    drops: bool = False,
) -> Batch:
    options, mesh = programs.options, programs.mesh
    tokens = num_prompts, group, options.max_completion_length
    prompts = num_prompts, options.max_prompt_length
    routes = model.config.routes if options.router_replay else None
    shapes = jax.eval_shape(lambda: _batch_of_nothing(prompts, tokens, scored, drops, routes))
    whole = replicated(mesh)
    if is_share:
        shardings = gathered_shardings(shapes.rollout, mesh)
        rollout = jax.tree.map(_sharded, shapes.rollout, shardings)
    else:
        by_group = batch_sharding(mesh, num_prompts, group)
        rollout = map_prompts_and_completions(
            lambda x: _sharded(x, prompt_sharding(by_group)),
            lambda x: _sharded(x, by_group),
            shapes.rollout,
        )
    batch = jax.tree.map(lambda x: _sharded(x, whole), shapes)
    return eqx.tree_at(lambda x: x.rollout, batch, rollout)


def _packing_shapes(programs: Programs, num_prompts: int, group: int) -> Packing:
    nothing = np.ones(num_prompts, np.int32), np.zeros((num_prompts, group), np.int32)
    whole = replicated(programs.mesh)
    return jax.tree.map(lambda x: _sharded(x, whole), programs.packing(*nothing))


def _prompts_of_nothing(
    num_prompts: int, length: int, routes: jax.ShapeDtypeStruct | None = None
) -> Prompts:
    shape = num_prompts, length
    return Prompts(
        ids=jnp.zeros(shape, jnp.int32),
        mask=jnp.zeros(shape, bool),
        routes=_routes_of_nothing(shape, routes),
    )


def _routes_of_nothing(
    tokens: tuple[int, ...], routes: jax.ShapeDtypeStruct | None
) -> jax.Array | None:
    return None if routes is None else jnp.zeros((*tokens, *routes.shape), routes.dtype)


def _batch_of_nothing(
    prompts: tuple[int, int],
    tokens: tuple[int, int, int],
    scored: Collection[str],
    drops: bool,
    routes: jax.ShapeDtypeStruct | None,
) -> Batch:
    rollout = Rollout(
        prompts=_prompts_of_nothing(*prompts, routes),
        completion_ids=jnp.zeros(tokens, jnp.int32),
        completion_mask=jnp.zeros(tokens, bool),
        sampler_logps=jnp.zeros(tokens, jnp.float32),
        finished=jnp.zeros(tokens[:2], bool),
        written=jnp.zeros(tokens, bool) if drops else None,
        routes=_routes_of_nothing(tokens, routes),
    )
    scores: dict[str, Any] = {name: jnp.zeros(tokens, jnp.float32) for name in scored}
    return Batch(rollout, jnp.zeros(tokens[:2], jnp.float32), **scores)


def _sharded(
    x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: Sharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
