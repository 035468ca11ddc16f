"""One batch of completions, grouped by prompt."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Rollout(eqx.Module):
    """`P` prompts with `G` completions each, padded on the right."""

    prompt_ids: Int[Array, "P Tp"]
    """Tokens of the prompts."""
    prompt_mask: Bool[Array, "P Tp"]
    """True on the prompts' own tokens."""
    completion_ids: Int[Array, "P G Tc"]
    """Tokens of the completions."""
    completion_mask: Bool[Array, "P G Tc"]
    """True on each completion's tokens, its end-of-sequence token included."""
    sampler_logps: Float[Array, "P G Tc"]
    """Log-prob of each token under the distribution it was drawn from; 0 where masked."""
    finished: Bool[Array, "P G"]
    """True where the completion ended by itself, false where the length limit cut it."""

    @property
    def lengths(self) -> Int[Array, "P G"]:
        """Number of tokens in each completion."""
        return self.completion_mask.sum(axis=-1)

    def trimmed(self, length: int) -> "Rollout":
        """Returns the rollout without the padding past `length` completion tokens."""
        return dataclasses.replace(
            self,
            completion_ids=self.completion_ids[..., :length],
            completion_mask=self.completion_mask[..., :length],
            sampler_logps=self.sampler_logps[..., :length],
        )

    def with_prompt_width(self, width: int, pad_id: int) -> "Rollout":
        """Returns the rollout with prompts padded on the right to `width` tokens."""
        pad = ((0, 0), (0, width - self.prompt_ids.shape[1]))
        return dataclasses.replace(
            self,
            prompt_ids=jnp.pad(self.prompt_ids, pad, constant_values=pad_id),
            prompt_mask=jnp.pad(self.prompt_mask, pad),
        )
