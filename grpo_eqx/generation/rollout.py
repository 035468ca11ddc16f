"""One batch of completions, grouped by prompt."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx._types import CompletionIds, CompletionMask, PromptIds, PromptMask, TokenFloats


class Rollout(eqx.Module):
    """`P` prompts with `G` completions each, padded on the right."""

    prompt_ids: PromptIds
    prompt_mask: PromptMask
    completion_ids: CompletionIds
    completion_mask: CompletionMask
    """True on each completion's tokens, its end-of-sequence token included."""
    sampler_logps: TokenFloats
    """Log-prob of each token under the distribution it was drawn from; 0 where masked."""
    finished: Bool[jax.Array | np.ndarray, "P G"]
    """True where the completion ended by itself, false where the length limit cut it."""

    @property
    def lengths(self) -> Int[jax.Array | np.ndarray, "P G"]:
        """Tokens of each completion."""
        return self.completion_mask.sum(axis=-1)

    def trimmed(self, length: int) -> "Rollout":
        """The same rollout without the padding past `length` completion tokens."""
        return Rollout(
            self.prompt_ids,
            self.prompt_mask,
            self.completion_ids[..., :length],
            self.completion_mask[..., :length],
            self.sampler_logps[..., :length],
            self.finished,
        )
