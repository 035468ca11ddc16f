"""One batch of completions, grouped by prompt."""

import dataclasses

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int, Integer

from grpo_eqx.generation.prompts import Prompts


class Rollout(eqx.Module):
    """`P` prompts with `G` completions each, padded on the right."""

    prompts: Prompts
    completion_ids: Int[Array, "P G Tc"]
    """Tokens of the completions."""
    completion_mask: Bool[Array, "P G Tc"]
    """True on the tokens of each completion, its end-of-sequence token included; false on
    padding."""
    sampler_logps: Float[Array, "P G Tc"]
    """Log-prob of each token under the distribution it was drawn from; 0 where there was none."""
    finished: Bool[Array, "P G"]
    """True where the completion ended by itself, false where the length limit cut it."""
    written: Bool[Array, "P G Tc"] | None = None
    """True on the tokens that the model wrote, which alone the loss counts. `None`: all tokens of
    the completions. Others, such as a tool's answer, are read as context."""
    routes: Integer[Array, "P G Tc Lk"] | None = None
    """Experts that the sampler's routers chose for the input before each token, which for the first
    is the prompt's last token; in the order of `ModelConfig.routes`. `None`: none are replayed."""

    @property
    def lengths(self) -> Int[Array, "P G"]:
        """Number of tokens in each completion."""
        return self.completion_mask.sum(axis=-1)

    @property
    def loss_mask(self) -> Bool[Array, "P G Tc"]:
        """True on the tokens that the loss may count."""
        return self.completion_mask if self.written is None else self.completion_mask & self.written

    def trimmed(self, length: int) -> "Rollout":
        """Returns the rollout without the padding past `length` completion tokens."""
        return dataclasses.replace(
            self,
            completion_ids=self.completion_ids[..., :length],
            completion_mask=self.completion_mask[..., :length],
            sampler_logps=self.sampler_logps[..., :length],
            written=None if self.written is None else self.written[..., :length],
            routes=None if self.routes is None else self.routes[..., :length, :],
        )

    def without_routes(self) -> "Rollout":
        """Returns the rollout of which no router's choice is replayed."""
        if self.routes is None:
            return self
        # Not by its `__init__`: this may be a rollout of shapes.
        return eqx.tree_at(lambda x: (x.routes, x.prompts.routes), self, (None, None))

    def with_prompt_width(self, width: int, pad_id: int) -> "Rollout":
        """Returns the rollout with prompts padded on the right to `width` tokens."""
        return dataclasses.replace(self, prompts=self.prompts.with_width(width, pad_id))
