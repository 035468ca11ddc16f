"""Weights for sampling on other devices than those that train."""

import jax

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.generation.options import SamplerOptions, sampling_weights
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.sharding.mesh import opposite

SEND = "send"


class WeightSender:
    """Sends weights from the devices that train to those that sample, device to device.

    Each device that trains sends its part, in the dtype of sampling. The devices that sample
    exchange parts among themselves, as a layout of a rollout needs.
    """

    def __init__(
        self,
        options: SamplerOptions,
        training: jax.sharding.Mesh,
        rollout: jax.sharding.Mesh,
        compiler: Compiler,
    ):
        """**Arguments:**

        - `options`: options of the sampler.
        - `training`, `rollout`: the devices that train, and those that sample.
        - `compiler`: compiles the program that puts weights into the form that is sent.
        """
        self._options, self._training, self._rollout = options, training, rollout
        self._compiler, self._opposite = compiler, opposite(training, rollout)
        self._jitted = compiler.jit(SEND, self._program)

    def __call__(self, model: CausalLM) -> CausalLM:
        """Returns the weights on the devices that sample; does not wait for them.

        **Arguments:**

        - `model`: the model, as training holds it.
        """
        self._compiler.ensure(
            SEND, lambda: self.lower(shapes_of(model, model.shardings(self._training)))
        )
        weights = self._jitted(model)
        return jax.device_put(weights, weights.shardings(self._rollout))

    def lower(self, model: CausalLM) -> jax.stages.Lowered:
        """Lowers the program that puts the weights into the form that is sent.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        """
        return self._jitted.lower(model)

    def shapes(self, model: CausalLM) -> CausalLM:
        """Returns the shapes of the weights on the devices that sample.

        **Arguments:**

        - `model`: the shapes of the model, as training holds it.
        """
        weights = self._jitted.eval_shape(model)
        return shapes_of(weights, weights.shardings(self._rollout))

    def _program(self, model: CausalLM) -> CausalLM:
        weights = sampling_weights(model, self._options)
        return jax.lax.with_sharding_constraint(weights, weights.shardings(self._opposite))
