"""A rollout's completions as the host sees them: tokens and text."""

import dataclasses
import functools
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation.rollout import Rollout

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Completions:
    """A rollout's completions on the host."""

    ids: list[list[list[int]]]
    """Tokens, `[P][G]`, the end-of-sequence token included."""
    texts: list[list[str]]
    """The same as text, `[P][G]`."""
    finished: Bool[np.ndarray, "P G"]
    """True where the completion ended by itself."""

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: ChatTokenizer) -> "Completions":
        P, G, _ = rollout.completion_ids.shape
        ids, lengths, finished = jax.device_get(
            (rollout.completion_ids, rollout.lengths, rollout.finished)
        )
        rows = zip(ids.reshape(P * G, -1), lengths.reshape(-1), strict=True)
        tokens = [row[:length].tolist() for row, length in rows]
        texts = tokenizer.decode(tokens)
        return cls(_grouped(tokens, G), _grouped(texts, G), finished)

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "P G"]:
        return np.array([[len(ids) for ids in group] for group in self.ids])

    def joined(self, other: "Completions") -> "Completions":
        """These prompts' completions, then the other's."""
        finished = np.concatenate([self.finished, other.finished])
        return Completions(self.ids + other.ids, self.texts + other.texts, finished)

    def of_prompts(self, indices: Int[np.ndarray, " Q"]) -> "Completions":
        """Only those prompts', in that order."""
        ids, texts = ([rows[i] for i in indices] for rows in (self.ids, self.texts))
        return Completions(ids, texts, self.finished[indices])


def _grouped(rows: list[T], size: int) -> list[list[T]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
