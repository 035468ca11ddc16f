"""Batches of tokenised prompts, in an order that is a pure function of (seed, step)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from grpo_eqx._types import PromptIds, PromptMask
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.errors import UserError

OverlongPrompts = Literal["error", "drop", "truncate_left"]

_SHORTEST_BUCKET = 32


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """`P` prompts and their tokens, padded on the right to a bucket's length."""

    prompts: list[Prompt]
    ids: PromptIds
    mask: PromptMask


class PromptBatches:
    """All prompts of a source, tokenised once, shuffled anew in every epoch.

    Raises `UserError` at construction: for an over-long prompt under the policy `error`, and
    where fewer prompts than one batch are left.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: ChatTokenizer,
        *,
        batch_size: int,
        max_length: int,
        overlong: OverlongPrompts,
        seed: int,
    ):
        """**Arguments:** `batch_size` prompts a step; the limit in tokens and what becomes of
        longer prompts; the seed of the order.
        """
        self.tokenizer = tokenizer
        self.name = source.name
        self.batch_size = batch_size
        self.max_length = max_length
        self.seed = seed
        prompts = [source[i] for i in range(len(source))]
        tokens = tokenizer.encode([prompt.text for prompt in prompts])
        too_long = [i for i, ids in enumerate(tokens) if len(ids) > max_length]
        if too_long and overlong == "error":
            first = too_long[0]
            raise UserError(
                f"{source.name}: problem {first} ({prompts[first].text[:40]!r}...) has "
                f"{len(tokens[first])} tokens, and max_prompt_length is {max_length}: raise it, or "
                f"set overlong_prompts to drop or truncate_left."
            )
        dropped = set(too_long) if overlong == "drop" else set()
        self.num_dropped = len(dropped)
        self.prompts = [prompt for i, prompt in enumerate(prompts) if i not in dropped]
        self.tokens = [ids[-max_length:] for i, ids in enumerate(tokens) if i not in dropped]
        if len(self.prompts) < batch_size:
            without = f" ({self.num_dropped} over-long ones dropped)" if dropped else ""
            raise UserError(
                f"{source.name} has {len(self.prompts)} problems{without}, and prompts_per_step is "
                f"{batch_size}: lower it or bring more problems."
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> PromptBatch:
        """The prompts of a step: each once per epoch, epochs joined without gaps."""
        draws = range(step * self.batch_size, (step + 1) * self.batch_size)
        chosen = [self._order(i // len(self))[i % len(self)] for i in draws]
        ids, mask = pad_prompts(
            [self.tokens[i] for i in chosen], self.tokenizer.pad_id, self.max_length
        )
        return PromptBatch([self.prompts[i] for i in chosen], ids, mask)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - lives as long as the run
    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))


def pad_prompts(
    tokens: Sequence[Sequence[int]], pad_id: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, padded on the right to the next power of two (so that few shapes occur)."""
    longest = max(len(row) for row in tokens)
    bucket = _SHORTEST_BUCKET
    while bucket < longest:
        bucket *= 2
    bucket = max(longest, min(bucket, max_length))
    ids = np.full((len(tokens), bucket), pad_id, np.int32)
    mask = np.zeros((len(tokens), bucket), bool)
    for i, row in enumerate(tokens):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = True
    return ids, mask
