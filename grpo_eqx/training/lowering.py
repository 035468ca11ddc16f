"""Shapes of a run's state, from which programs are lowered without weights or devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.lora import Lora, prepared
from grpo_eqx.models.registry import init_model
from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.training.reference import copied
from grpo_eqx.training.updater import Updater


def model_shapes(
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    lora: Lora | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> CausalLM:
    """Returns the shapes of a model's parameters, float32 where trained, with their shardings.

    **Arguments:**

    - `config`: the architecture.
    - `mesh`: the devices.
    - `lora`: the adapters to train, if any.
    - `dtype`: the dtype of what then is frozen.
    """

    def init(key: PRNGKeyArray) -> CausalLM:
        model = init_model(config, key)
        return model if lora is None else prepared(model, lora, dtype, key)

    shapes = jax.eval_shape(init, make_key(0))
    return shapes_of(shapes, shapes.shardings(mesh))


def reference_shapes(model: CausalLM, dtype: jnp.dtype | None, mesh: jax.sharding.Mesh) -> CausalLM:
    """Returns the shapes of the reference model, from the arguments of `copied` with shapes."""
    shapes = jax.eval_shape(lambda model: copied(model, dtype, mesh), model)
    return shapes_of(shapes, model.shardings(mesh))


def optimizer_shapes(updater: Updater, model: CausalLM) -> optax.OptState:
    """Returns the shapes of the optimizer's state for a model's shapes."""
    params = eqx.filter(model, model.trainable)
    shapes = jax.eval_shape(updater.optimizer.init, params)
    return shapes_of(shapes, updater.shardings(model))
