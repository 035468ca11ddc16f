"""Batches of tokenised prompts, in an order that is a pure function of (seed, step)."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from grpo_eqx._types import PromptIds, PromptMask
from grpo_eqx.data.prompts import Prompt
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

    @property
    def lengths(self) -> Int[np.ndarray, " P"]:
        return np.asarray(self.mask).sum(axis=1)


class TokenizedPrompts:
    """Problems with their tokens, under the policy for over-long prompts.

    Raises `UserError` for an over-long prompt under the policy `error`, for columns that reward
    functions could not receive, and where nothing is left.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt],
        tokenizer: ChatTokenizer,
        *,
        max_length: int,
        overlong: OverlongPrompts,
    ):
        """**Arguments:** what to call the problems in messages; the limit in tokens, and what
        becomes of longer prompts.
        """
        self.name = name
        reserved = {"prompts", "completions", "completion_ids"} & {
            key for p in prompts for key in p.columns
        }
        if reserved:
            raise UserError(
                f"{name} has a column {min(reserved)!r}, which is what reward functions call their "
                f"own argument: rename it."
            )
        tokens = tokenizer.encode([prompt.text for prompt in prompts])
        too_long = [i for i, ids in enumerate(tokens) if len(ids) > max_length]
        if too_long and overlong == "error":
            first = too_long[0]
            raise UserError(
                f"{name}: problem {first} ({prompts[first].text[:40]!r}...) has "
                f"{len(tokens[first])} tokens, and max_prompt_length is {max_length}: raise it, or "
                f"set overlong_prompts to drop or truncate_left."
            )
        dropped = set(too_long) if overlong == "drop" else set()
        self.num_dropped = len(dropped)
        self.prompts = [prompt for i, prompt in enumerate(prompts) if i not in dropped]
        self.tokens = [ids[-max_length:] for i, ids in enumerate(tokens) if i not in dropped]
        if not self.prompts:
            without = f" ({self.num_dropped} over-long ones dropped)" if dropped else ""
            raise UserError(f"{name} has no problems to use{without}: bring more.")

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """The same for the same problems in the same order, in short."""
        digest = hashlib.sha256()
        for prompt, ids in zip(self.prompts, self.tokens, strict=True):
            parts = prompt.text, prompt.columns, ids
            # Of what is not plain data its type: a set has another order in each process.
            digest.update(json.dumps(parts, sort_keys=True, default=_type_name).encode())
        return digest.hexdigest()[:12]


def _type_name(value: object) -> str:
    return type(value).__name__


class PromptBatches:
    """Batches of tokenised prompts, shuffled anew in every epoch.

    Raises `UserError` where there are fewer prompts than one batch.
    """

    def __init__(
        self, data: TokenizedPrompts, *, batch_size: int, pad_id: int, max_length: int, seed: int
    ):
        """**Arguments:** `batch_size` prompts a step, padded with `pad_id` to `max_length` at
        most; the seed of the order.
        """
        self.data = data
        self.batch_size = batch_size
        self.pad_id = pad_id
        self.max_length = max_length
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}
        if len(data) < batch_size:
            without = f" ({data.num_dropped} over-long ones dropped)" if data.num_dropped else ""
            raise UserError(
                f"{data.name} has {len(data)} problems{without}, and prompts_per_step is "
                f"{batch_size}: lower it or bring more problems."
            )

    def batch(self, step: int) -> PromptBatch:
        """The prompts of a step: each once per epoch, epochs joined without gaps."""
        size = len(self.data)
        draws = range(step * self.batch_size, (step + 1) * self.batch_size)
        chosen = [self._order(i // size)[i % size] for i in draws]
        tokens = [self.data.tokens[i] for i in chosen]
        ids, mask = pad_prompts(tokens, self.pad_id, self.max_length)
        return PromptBatch([self.data.prompts[i] for i in chosen], ids, mask)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data))
            self._orders = {epoch: order}  # one is enough: batches go forward
        return self._orders[epoch]


def padded_length(longest: int, max_length: int) -> int:
    """What prompts of which the longest has so many tokens are padded to."""
    bucket = _SHORTEST_BUCKET
    while bucket < longest:
        bucket *= 2
    return max(longest, min(bucket, max_length))


def pad_prompts(
    tokens: Sequence[Sequence[int]], pad_id: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, padded on the right to the next power of two (so that few shapes occur)."""
    bucket = padded_length(max(len(row) for row in tokens), max_length)
    ids = np.full((len(tokens), bucket), pad_id, np.int32)
    mask = np.zeros((len(tokens), bucket), bool)
    for i, row in enumerate(tokens):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = True
    return ids, mask
