"""A rollout's completions as the host sees them: tokens and text."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from grpo_eqx.data.prompts import Prompt
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
    sampler_logps: list[list[Float[np.ndarray, " _"]]] | None = None
    """Log-prob of each token under the distribution it was drawn from, `[P][G]`, if recorded."""

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: ChatTokenizer) -> "Completions":
        """Fetches the completions of a rollout from the devices, those of all hosts."""
        ids, mask, written, finished, logps = fetch(
            (
                rollout.completion_ids,
                rollout.completion_mask,
                rollout.written,
                rollout.finished,
                rollout.sampler_logps,
            )
        )
        lengths = mask.sum(axis=-1)
        num_written = lengths if written is None else (mask & written).sum(axis=-1)
        tokens = [[row.tolist() for row in rows] for rows in _cut(ids, lengths)]
        return cls(tokens, finished, num_written, tokenizer, _cut(logps, lengths))

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "P G"]:
        """Number of tokens in each completion."""
        return np.array([[len(ids) for ids in group] for group in self.ids])

    @property
    def all_ids(self) -> Iterator[int]:
        """The tokens of all completions, one after the other."""
        return (i for group in self.ids for ids in group for i in ids)

    @functools.cached_property
    def texts(self) -> list[list[str]]:
        """Text of each completion, `[P][G]`."""
        texts = iter(
            self.tokenizer.decode_completions([ids for group in self.ids for ids in group])
        )
        return [list(itertools.islice(texts, len(group))) for group in self.ids]

    def tagged_texts(self, prompts: Sequence[Prompt]) -> list[list[str]]:
        """Returns the texts as built-in rewards read them, `[P][G]`: with the layout's tags.

        **Arguments:** the prompts of the completions.
        """
        return self.tokenizer.with_tags(prompts, self.ids, self.texts)

    def joined(self, other: "Completions") -> "Completions":
        """Returns these prompts' completions followed by those of `other`."""
        finished = np.concatenate([self.finished, other.finished])
        num_written = np.concatenate([self.num_written, other.num_written])
        logps = None
        if self.sampler_logps is not None and other.sampler_logps is not None:
            logps = self.sampler_logps + other.sampler_logps
        return Completions(self.ids + other.ids, finished, num_written, self.tokenizer, logps)

    def without_written(self, dropped: Bool[np.ndarray, "P G"]) -> "Completions":
        """Returns the completions, with no token of the dropped ones counted as written."""
        return dataclasses.replace(self, num_written=np.where(dropped, 0, self.num_written))

    def of_prompts(self, indices: Int[np.ndarray, " Q"]) -> "Completions":
        """Returns the completions of the prompts at `indices`, in that order."""
        ids, logps = [self.ids[i] for i in indices], self.sampler_logps
        if logps is not None:
            logps = [logps[i] for i in indices]
        return Completions(
            ids, self.finished[indices], self.num_written[indices], self.tokenizer, logps
        )


def _cut(
    rows: Shaped[np.ndarray, "P G Tc"], lengths: Int[np.ndarray, "P G"]
) -> list[list[Shaped[np.ndarray, " _"]]]:
    """Returns rows without their padding, `[P][G]`."""
    return [
        [row[:length] for row, length in zip(*group, strict=True)]
        for group in zip(rows, lengths, strict=True)
    ]
