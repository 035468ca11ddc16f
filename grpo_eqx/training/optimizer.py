"""Optimizer of a config, whose numbers are data of the compiled update."""

import math
from types import ModuleType
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from grpo_eqx.common.choices import LearningRateCourse
from grpo_eqx.common.shapes import Number
from grpo_eqx.models.interface import CausalLM, parameter_name
from grpo_eqx.settings.config import GRPOConfig

_COURSES: tuple[LearningRateCourse, ...] = get_args(LearningRateCourse)


class LearningRate(eqx.Module):
    """Learning rate by update: linear warm-up, then constant or decaying to 0.

    Decay reaches 0 after the last update.
    """

    peak: Number
    course: Number
    """Place of `lr_scheduler_type` in `LearningRateCourse`."""
    warmup: Number
    """Number of updates of the warm-up."""
    decay: Number
    """Number of updates after it."""

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "LearningRate":
        """Returns the learning rate of resolved settings."""
        assert cfg.learning_rate is not None  # resolved
        warmup = cfg.num_warmup_updates
        decay = max(cfg.steps * cfg.updates_per_step - warmup, 1)
        course = _COURSES.index(cfg.lr_scheduler_type)
        return cls(*map(float, (cfg.learning_rate, course, warmup, decay)))

    def __call__(
        self, update: int | Int[Array, ""] | Float[np.ndarray, " updates"], xp: ModuleType = jnp
    ) -> Any:
        """Returns the rate of an update, counted from 0, or with `numpy` of several."""
        past = xp.clip(update - self.warmup, 0, self.decay)
        # Reciprocals, because that is how XLA divides by a constant.
        linear = 1 - past * (1 / self.decay)
        cosine = 0.5 * (1 + xp.cos(past * (math.pi * (1 / self.decay))))
        factor = xp.where(self.course == 0, 1.0, xp.where(self.course == 1, linear, cosine))
        risen = xp.minimum(update, self.warmup) * (1 / xp.maximum(self.warmup, 1))
        rising = -self.peak * (1 - risen) + self.peak
        return xp.where(update < self.warmup, rising, self.peak * factor)


class Decay(eqx.Module):
    """Decay rate of a moving average, in the place of a number in optax's formulas.

    The other weight, `1 - rate`, is rounded once: the difference of two float32 numbers would have
    lost digits.
    """

    rate: Number
    rest: Number

    @classmethod
    def of(cls, rate: float) -> "Decay":
        """Returns a rate that is known in double precision."""
        return cls(rate, 1 - rate)

    def __rsub__(self, one: int | float) -> Number:
        return self.rest

    def __mul__(self, average: Array) -> Array:
        return self.rate * average

    def __pow__(self, count: Int[Array, ""]) -> Array:
        return jnp.power(self.rate, count)


class OptimizerNumbers(eqx.Module):
    """Numbers of an optimizer, which are data of the compiled update."""

    learning_rate: LearningRate
    beta1: Decay
    beta2: Decay
    weight_decay: Number
    max_grad_norm: Number

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "OptimizerNumbers":
        """Returns the numbers of resolved settings."""
        return cls(
            learning_rate=LearningRate.of(cfg),
            beta1=Decay.of(cfg.adam_beta1),
            beta2=Decay.of(cfg.adam_beta2),
            weight_decay=cfg.weight_decay,
            max_grad_norm=cfg.max_grad_norm,
        )


def learning_rate(cfg: GRPOConfig, update: int) -> float:
    """Returns an update's learning rate, on the host: asking a device would wait for its work."""
    if cfg.lr_scheduler_type == "constant" and cfg.num_warmup_updates == 0:
        assert cfg.learning_rate is not None  # resolved
        return cfg.learning_rate
    numbers = jax.tree.map(np.float32, LearningRate.of(cfg))
    return float(numbers(np.array([update], np.float32), np)[0])


def make_optimizer(cfg: GRPOConfig) -> optax.GradientTransformationExtraArgs:
    """Builds AdamW or Lion with the config's schedule, after clipping to `max_grad_norm`.

    A program that passes `numbers` to `update` takes them as data; by default they are the
    config's, and constants of the program.
    """
    own = OptimizerNumbers.of(cfg)

    def chain(numbers: OptimizerNumbers) -> optax.GradientTransformation:
        build: Any = optax.adamw if cfg.optimizer == "adamw" else optax.lion
        return optax.chain(
            optax.clip_by_global_norm(numbers.max_grad_norm),
            build(
                numbers.learning_rate,
                b1=numbers.beta1,
                b2=numbers.beta2,
                weight_decay=numbers.weight_decay,
                mask=_is_matrix,
            ),
        )

    def update(
        gradient: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        numbers: OptimizerNumbers = own,
        **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return chain(numbers).update(gradient, state, params)

    return optax.GradientTransformationExtraArgs(chain(own).init, update)


def _is_matrix(params: CausalLM) -> CausalLM:
    """Masks weight decay: True for matrices, False for norms and biases."""
    return jax.tree.map_with_path(
        lambda path, _: not parameter_name(path).endswith(("norm", "bias")), params
    )
