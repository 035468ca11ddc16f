"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen weights."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from grpo_eqx.common.choices import ALL_LINEAR
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.layers import Linear, LowRank
from grpo_eqx.models.registry import init_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters to add to a model, in the terms of PEFT's `LoraConfig`."""

    rank: int
    alpha: float
    """The adapters' product is multiplied by `alpha / rank`."""
    target: tuple[str, ...] | None = None
    """Names of the linear maps with an adapter, such as `q_proj`; `None`: all in the layers."""
    rank_stabilized: bool = False
    """Whether it is multiplied by `alpha / sqrt(rank)` instead (arXiv 2312.03732)."""
    base_in_8bit: bool = False
    """Whether the frozen linear maps are int8, with a scale per output."""

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "Lora | None":
        """Returns the adapters that resolved settings ask for, if any.

        **Arguments:**

        - `settings`: fields of a `GRPOConfig`, by name. Older runs lack those of LoRA.
        """
        if settings.get("lora_rank") is None:
            return None
        names = tuple(name.strip() for name in settings["lora_target"].split(","))
        return cls(
            rank=settings["lora_rank"],
            alpha=settings["lora_alpha"],
            target=None if names == (ALL_LINEAR,) else names,
            rank_stabilized=settings["use_rslora"],
            base_in_8bit=settings["load_in_8bit"],
        )

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def linear_names(model: CausalLM) -> list[str]:
    """Returns the names of the linear maps in a model's layers."""
    fields = dataclasses.fields(model.layers)
    return [each.name for each in fields if isinstance(getattr(model.layers, each.name), Linear)]


def with_adapters(model: CausalLM, lora: Lora, key: PRNGKeyArray) -> CausalLM:
    """Adds float32 adapters, which change nothing yet: `a` is uniform, as in PEFT, and `b` zero.

    Raises `UserError` for targets that the model does not have, and for a rank that is above a
    target's sizes.
    """
    known = linear_names(model)
    targets = known if lora.target is None else _checked(lora.target, known)
    for number, name in enumerate(known):
        if name in targets:
            linear = getattr(model.layers, name)
            adapted = _adapted(linear, name, lora, jax.random.fold_in(key, number))
            model = dataclasses.replace(
                model, layers=dataclasses.replace(model.layers, **{name: adapted})
            )
    return model


def check_fits(config: ModelConfig, lora: Lora) -> None:
    """Raises `UserError` for targets or a rank that models of an architecture do not have."""
    jax.eval_shape(lambda key: with_adapters(init_model(config, key), lora, key), make_key(0))


def prepared(
    model: CausalLM, lora: Lora, dtype: jax.typing.DTypeLike, key: PRNGKeyArray
) -> CausalLM:
    """Returns a model to train adapters of: with these, unless it has some, and frozen weights.

    **Arguments:**

    - `model`: the model.
    - `lora`: the adapters.
    - `dtype`: dtype of the frozen weights that are not int8.
    - `key`: key of the first values of the adapters.
    """
    adapters = model if model.has_adapters else with_adapters(model, lora, key)
    frozen = model.without_adapters()
    frozen = frozen.rounded_linears(dtype) if lora.base_in_8bit else frozen.astype(dtype)
    layers = {
        name: dataclasses.replace(
            getattr(frozen.layers, name), adapter=getattr(adapters.layers, name).adapter
        )
        for name in linear_names(model)
    }
    return dataclasses.replace(frozen, layers=dataclasses.replace(frozen.layers, **layers))


def _checked(target: Iterable[str], known: list[str]) -> set[str]:
    if unknown := [name for name in target if name not in known]:
        raise UserError(
            f"lora_target names {unknown[0]!r}, which the model does not have: use {ALL_LINEAR} or "
            f"any of {', '.join(known)}."
        )
    return set(target)


def _adapted(linear: Linear, name: str, lora: Lora, key: PRNGKeyArray) -> Linear:
    *stack, rows, columns = linear.weight.shape
    if lora.rank > min(rows, columns):
        raise UserError(
            f"lora_rank is {lora.rank}, and {name} has a matrix of {rows} x {columns}: lower it to "
            f"{min(rows, columns)} or less."
        )
    bound = columns**-0.5
    a = jax.random.uniform(key, (*stack, lora.rank, columns), jnp.float32, -bound, bound)
    b = jnp.zeros((*stack, lora.rank, rows), jnp.float32)
    return dataclasses.replace(linear, adapter=LowRank(a, b, lora.scale))
