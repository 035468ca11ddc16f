"""Use of a model's experts in an update: how even it is, and whether routers would choose alike."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from grpo_eqx.models.architecture import ExpertsShape
from grpo_eqx.models.config import ModelConfig

_MAX_VIO, _UNUSED, _AGREEMENT = "moe/max_vio", "moe/unused_experts", "moe/routing_agreement"


class ExpertUse(NamedTuple):
    """Counts, over the inputs of completions, of the experts that these use in each layer.

    They are whole numbers, and so the same for any rows, micro-batches and devices. Prompts are
    left out, since rows hold copies of them, of some more than of others.
    """

    uses: Int[Array, "L E"]
    agreed: Int[Array, " L"] | None
    """Uses that the router would have chosen too, where choices are replayed."""

    @classmethod
    def of(
        cls,
        chosen: Integer[Array, "R W Lk"],
        replayed: Integer[Array, "R W Lk"] | None,
        counted: Bool[Array, "R W"],
        shape: ExpertsShape,
    ) -> "ExpertUse":
        """Counts how often the tokens of a micro-batch use each expert.

        **Arguments:**

        - `chosen`, `replayed`: experts that routers choose, and experts that are used in their
          place.
        - `counted`: True on the tokens to include.
        - `shape`: the numbers of experts.
        """
        split = (*counted.shape, -1, shape.per_token)
        chosen = chosen.reshape(split)
        used = chosen if replayed is None else replayed.reshape(split)
        counts = counted[..., None, None]
        is_used = (used[..., None] == jnp.arange(shape.number)) & counts[..., None]
        uses = is_used.sum(axis=(0, 1, 3), dtype=jnp.int32)
        if replayed is None:
            return cls(uses, None)
        agreed = (used[..., None] == chosen[..., None, :]).any(axis=-1) & counts
        return cls(uses, agreed.sum(axis=(0, 1, 3), dtype=jnp.int32))

    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Returns the means over layers, by name.

        `max_vio` is MaxVio of arXiv 2408.15664: the uses of the most used expert, over those of the
        average one, less 1.
        """
        total = jnp.maximum(self.uses.sum(axis=1), 1)
        average = total / self.uses.shape[1]
        metrics = {
            _MAX_VIO: jnp.mean(self.uses.max(axis=1) / average - 1),
            _UNUSED: jnp.mean(self.uses == 0, dtype=jnp.float32),
        }
        if self.agreed is not None:
            metrics[_AGREEMENT] = jnp.mean(self.agreed / total)
        return metrics


def expert_metric_names(config: ModelConfig, replays: bool) -> tuple[str, ...]:
    """Returns the names of the metrics that updates of a model log of its experts."""
    if config.routes is None:
        return ()
    return (_MAX_VIO, _UNUSED, _AGREEMENT) if replays else (_MAX_VIO, _UNUSED)
