"""Batches of tokenized prompts, in an order that is a pure function of (seed, step)."""

import hashlib
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.prompts import Prompt, quoted
from grpo_eqx.data.tokenizer import ChatTokenizer

OverlongPrompts = Literal["error", "drop", "truncate_left"]

_SHORTEST_BUCKET = 32
_WORTH_A_PROGRAM = 0.9


class TokenizedPrompts:
    """Problems with their tokens, after the policy for overlong prompts is applied.

    Raises `UserError` for an overlong prompt under the policy `error`, for columns that reward
    functions cannot receive, and where no problem is left.
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
        """**Arguments:**

        - `name`: name of the problems in messages.
        - `prompts`, `tokenizer`: the problems, and what turns them into tokens.
        - `max_length`: limit of tokens.
        - `overlong`: what to do with longer prompts.
        """
        self.name = name
        reserved = {"prompts", "completions", "completion_ids"} & {
            key for p in prompts for key in p.columns
        }
        if reserved:
            raise UserError(
                f"{name} has a column {min(reserved)!r}, the name of an argument of every reward "
                f"function: rename it."
            )
        try:
            tokens = tokenizer.encode_prompts(prompts)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        self.notes = list(tokenizer.notes_on(prompts, tokens))
        """Lines on special tokens in the prompts that are not as expected."""
        too_long = [i for i, ids in enumerate(tokens) if len(ids) > max_length]
        if too_long and overlong == "error":
            first = too_long[0]
            raise UserError(
                f"{name}: problem {first + 1} ({quoted(prompts[first].text)}) has "
                f"{len(tokens[first])} tokens, and max_prompt_length is {max_length}: raise it, or "
                f"set overlong_prompts to drop or truncate_left."
            )
        dropped = set(too_long) if overlong == "drop" else set()
        self.num_dropped = len(dropped)
        self.prompts = [prompt for i, prompt in enumerate(prompts) if i not in dropped]
        self.tokens = [ids[-max_length:] for i, ids in enumerate(tokens) if i not in dropped]
        if not self.prompts:
            without = f" ({self.num_dropped} overlong ones dropped)" if dropped else ""
            raise UserError(f"{name} has no usable problems{without}: add some.")

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """Returns a short hash, equal for the same problems in the same order."""
        digest = hashlib.sha256()
        for prompt, ids in zip(self.prompts, self.tokens, strict=True):
            parts = prompt.content, prompt.columns, ids
            # Anything but plain data counts by its type: a set has another order in each process.
            digest.update(json.dumps(parts, sort_keys=True, default=_type_name).encode())
        return digest.hexdigest()[:12]


def _type_name(value: object) -> str:
    return type(value).__name__


class PromptBatches:
    """Batches of tokenized prompts, reshuffled every epoch, without duplicates in a batch.

    Raises `UserError` where there are fewer prompts than one batch.
    """

    def __init__(self, data: TokenizedPrompts, *, batch_size: int, seed: int):
        """**Arguments:**

        - `batch_size`: prompts in a batch.
        - `seed`: the seed of their order.
        """
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.widths = prompt_widths([len(tokens) for tokens in data.tokens], batch_size)
        self._epoch, self._order = 0, self._shuffled(0)
        if len(data) < batch_size:
            without = f" ({data.num_dropped} overlong ones dropped)" if data.num_dropped else ""
            raise UserError(
                f"{data.name} has {len(data)} problems to train on{without}, and prompts_per_step "
                f"is {batch_size}: lower it or add problems."
            )

    def indices(self, number: int) -> Int[np.ndarray, " P"]:
        """Returns the prompts of a batch: each once per epoch, epochs joined without gaps."""
        size = len(self.data)
        draws = range(number * self.batch_size, (number + 1) * self.batch_size)
        return np.array([self._order_of(i // size)[i % size] for i in draws])

    def width(self, indices: Sequence[int] | Int[np.ndarray, " P"]) -> int:
        """Returns the width, of those of the run, to which these prompts are padded."""
        longest = max(len(self.data.tokens[i]) for i in indices)
        return next(width for width in self.widths if width >= longest)

    def _order_of(self, epoch: int) -> Int[np.ndarray, " problems"]:
        """Returns an epoch's order: shuffled, without repeats in a batch that spans two epochs."""
        if epoch < self._epoch:
            self._epoch, self._order = 0, self._shuffled(0)
        while self._epoch < epoch:
            self._epoch += 1
            shuffled = self._shuffled(self._epoch)
            # Number of prompts that the batch spanning both epochs takes from the previous one.
            taken = self._epoch * len(self.data) % self.batch_size
            fresh = shuffled[~np.isin(shuffled, self._order[len(self.data) - taken :])]
            first = fresh[: self.batch_size - taken]
            rest = shuffled[~np.isin(shuffled, first)]
            self._order = np.concatenate([first, rest])
        return self._order

    def _shuffled(self, epoch: int) -> Int[np.ndarray, " problems"]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.data))


def padded_length(longest: int, max_length: int) -> int:
    """Returns the width for prompts of any run, so that few occur: a power of two, or the limit.

    **Arguments:**

    - `longest`: tokens of the longest prompt.
    - `max_length`: the most tokens that a prompt may have.
    """
    bucket = _SHORTEST_BUCKET
    while bucket < longest:
        bucket *= 2
    return max(longest, min(bucket, max_length))


def prompt_widths(lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Returns the widths that batches of prompts are padded to, ascending: one or two.

    A second, narrower one is worth compiling a program for if batches, drawn at random, are then
    narrower by a tenth on average.
    """
    ordered = np.sort(np.asarray(lengths))
    longest = int(ordered[-1])
    if len(ordered) <= batch_size:  # every batch is of all prompts
        return (longest,)
    widths = np.unique(ordered)
    fit = np.searchsorted(ordered, widths, side="right") / len(ordered)
    means = longest - (longest - widths) * fit**batch_size
    best = int(np.argmin(means))
    narrow = int(widths[best])
    return (narrow, longest) if means[best] <= _WORTH_A_PROGRAM * longest else (longest,)
