"""A rollout's completions as the host sees them: tokens and text."""

import dataclasses
import functools
import itertools

import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation.rollout import Rollout
from grpo_eqx.sharding.arrays import fetch


@dataclasses.dataclass(frozen=True)
class Completions:
    """A rollout's completions on the host."""

    ids: list[list[list[int]]]
    """Tokens, `[P][G]`, including the end-of-sequence token."""
    finished: Bool[np.ndarray, "P G"]
    """True where the completion ended by itself."""
    num_written: Int[np.ndarray, "P G"]
    """Number of tokens that the model wrote."""
    tokenizer: ChatTokenizer

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: ChatTokenizer) -> "Completions":
        ids, mask, written, finished = fetch(
            (rollout.completion_ids, rollout.completion_mask, rollout.written, rollout.finished)
        )
        lengths = mask.sum(axis=-1)
        num_written = lengths if written is None else (mask & written).sum(axis=-1)
        tokens = [
            [row[:length].tolist() for row, length in zip(*group, strict=True)]
            for group in zip(ids, lengths, strict=True)
        ]
        return cls(tokens, finished, num_written, tokenizer)

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "P G"]:
        return np.array([[len(ids) for ids in group] for group in self.ids])

    @functools.cached_property
    def texts(self) -> list[list[str]]:
        """Text of each completion, `[P][G]`."""
        texts = iter(
            self.tokenizer.decode_completions([ids for group in self.ids for ids in group])
        )
        return [list(itertools.islice(texts, len(group))) for group in self.ids]

    def joined(self, other: "Completions") -> "Completions":
        """Returns these prompts' completions followed by those of `other`."""
        finished = np.concatenate([self.finished, other.finished])
        num_written = np.concatenate([self.num_written, other.num_written])
        return Completions(self.ids + other.ids, finished, num_written, self.tokenizer)

    def without_written(self, dropped: Bool[np.ndarray, "P G"]) -> "Completions":
        """Returns the completions, with no token of the dropped ones counted as written."""
        return dataclasses.replace(self, num_written=np.where(dropped, 0, self.num_written))

    def of_prompts(self, indices: Int[np.ndarray, " Q"]) -> "Completions":
        """Returns the completions of the prompts at `indices`, in that order."""
        ids = [self.ids[i] for i in indices]
        return Completions(ids, self.finished[indices], self.num_written[indices], self.tokenizer)
