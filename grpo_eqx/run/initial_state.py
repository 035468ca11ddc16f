"""The state of a run before its first step, on the devices or as shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import prepared
from grpo_eqx.models.pretrained import shard_model
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.sharding.arrays import relabeled
from grpo_eqx.training.forward import Forward
from grpo_eqx.training.lowering import model_shapes, optimizer_shapes, reference_shapes
from grpo_eqx.training.reference import copied
from grpo_eqx.training.state import TrainState
from grpo_eqx.training.updater import Updater


def initial_state(run: RunSpec, updater: Updater) -> TrainState:
    """Places model, optimizer state and reference on the devices, before the first step."""
    return untrained_state(run, updater, initial_model(run, updater.forward))


def initial_model(run: RunSpec, forward: Forward) -> CausalLM:
    """Places the model on the devices, with the adapters that are to be trained."""
    source = run.cfg.model if run.passed.model is None else run.passed.model
    lora, mesh = run.lora, forward.mesh
    dtype = jnp.dtype(jnp.float32) if lora is None else forward.dtype
    model = raise_on_all_hosts(lambda: shard_model(source, mesh, dtype))
    if lora is not None:
        key = make_key(run.cfg.seed)
        prepare = functools.partial(prepared, lora=lora, dtype=dtype)
        shardings = jax.eval_shape(prepare, model, key=key).shardings(mesh)
        model = jax.jit(prepare, out_shardings=shardings, donate_argnums=0)(model, key=key)
        model = jax.tree.map(relabeled, model, shardings)
    return model


def untrained_state(run: RunSpec, updater: Updater, model: CausalLM) -> TrainState:
    """Places optimizer state and reference beside a model, as before its first update."""
    state = updater.init(model)
    if not _keeps_reference(run):
        return state
    reference = copied(model, _reference_dtype(run, updater.forward), updater.forward.mesh)
    return dataclasses.replace(state, reference=reference)


def _reference_dtype(run: RunSpec, forward: Forward) -> jnp.dtype | None:
    """Returns the dtype of the reference's layers; `None`: float32, to be mixed."""
    return None if run.cfg.sync_ref_model else forward.dtype


def _keeps_reference(run: RunSpec) -> bool:
    """Whether a reference model takes up memory: for a KL term, unless adapters have one."""
    return run.passes.reference and run.lora is None


def state_shapes(run: RunSpec, updater: Updater) -> TrainState:
    """Returns the shapes and shardings of the state, without anything on the devices."""
    forward = updater.forward
    model = model_shapes(run.model, forward.mesh, run.lora, forward.dtype)
    reference = None
    if _keeps_reference(run):
        reference = reference_shapes(model, _reference_dtype(run, forward), forward.mesh)
    return TrainState(model, optimizer_shapes(updater, model), reference)
