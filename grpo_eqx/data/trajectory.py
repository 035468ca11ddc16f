"""Trajectories: what sampling leaves of each completion, on the host."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

FinishReason = Literal["stop", "length"]
"""Why a completion ended: an end token or stop string, or the limit of its length."""


class Address(NamedTuple):
    """Address of a completion's draws: with the seed, all that decides them."""

    step: int
    prompt: int
    """Row of the prompt among those that are sampled for the step."""
    sample: int
    """Number of the completion among those of its prompt."""


def _no_tokens(dtype: type) -> np.ndarray:
    return np.zeros(0, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and its completion so far.

    A sampler takes trajectories without tokens and gives them back completed. Arrays have an entry
    for each token of the completion, its end token included.
    """

    prompt_ids: Sequence[int]
    """Tokens of the prompt."""
    address: Address
    ids: Int[np.ndarray, " T"] = dataclasses.field(default_factory=lambda: _no_tokens(np.int32))
    written: Bool[np.ndarray, " T"] = dataclasses.field(default_factory=lambda: _no_tokens(bool))
    """True on the tokens that the model wrote, which alone the loss counts. Others, such as a
    tool's answer, are read as context."""
    sampler_logps: Float[np.ndarray, " T"] = dataclasses.field(
        default_factory=lambda: _no_tokens(np.float32)
    )
    """Log-prob of each token under the distribution it was drawn from."""
    versions: Int[np.ndarray, " T"] = dataclasses.field(
        default_factory=lambda: _no_tokens(np.int32)
    )
    """Version of the weights that drew each token."""
    finish_reason: FinishReason | None = None
    """Why it ended; `None` where it goes on."""
    awaits_reply: bool = False
    """Whether it goes on with a reply to its last turn, which is not there yet."""
    forks: Sequence["Trajectory"] = ()
    """Further trajectories of the sample, whose agent rewrote its history or began another
    dialogue. The sample's advantage counts for each."""

    def __len__(self) -> int:
        """Returns the number of tokens of the completion."""
        return len(self.ids)

    @property
    def all_of_sample(self) -> "Iterator[Trajectory]":
        """All trajectories of the sample, this one first."""
        yield self
        yield from self.forks

    def completed(
        self,
        ids: Int[np.ndarray, " T"],
        sampler_logps: Float[np.ndarray, " T"] | None = None,
        *,
        version: int = 0,
        finish_reason: FinishReason = "stop",
    ) -> "Trajectory":
        """Returns the trajectory of a prompt with a completion that the model wrote alone.

        **Arguments:**

        - `ids`: the tokens.
        - `sampler_logps`: their log-probs; by default 0, for tokens that nothing drew.
        - `version`: version of the weights that drew them.
        - `finish_reason`: why the completion ended.
        """
        # The same for every token: a single value in memory, whatever the length.
        written, versions, zeros = (
            np.broadcast_to(x, len(ids)) for x in (True, np.int32(version), np.float32(0))
        )
        return dataclasses.replace(
            self,
            ids=ids,
            written=written,
            sampler_logps=zeros if sampler_logps is None else sampler_logps,
            versions=versions,
            finish_reason=finish_reason,
        )

    def extended(
        self,
        ids: Sequence[int] | Int[np.ndarray, " t"],
        sampler_logps: Float[np.ndarray, " t"] | None = None,
        *,
        version: int = 0,
    ) -> "Trajectory":
        """Returns the trajectory with more tokens.

        **Arguments:**

        - `ids`: the tokens.
        - `sampler_logps`: their log-probs, of tokens that the model drew; by default, others wrote
          them.
        - `version`: version of the weights that drew them.
        """
        written = sampler_logps is not None
        logps = np.zeros(len(ids)) if sampler_logps is None else sampler_logps
        return dataclasses.replace(
            self,
            ids=np.concatenate([self.ids, ids]).astype(np.int32),
            written=np.concatenate([self.written, np.full(len(ids), written)]),
            sampler_logps=np.concatenate([self.sampler_logps, logps]).astype(np.float32),
            versions=np.concatenate([self.versions, np.full(len(ids), version)]).astype(np.int32),
            awaits_reply=False,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the completion ended by itself."""
        return self.finish_reason == "stop"


_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


def arrays_of(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Returns all that a sampler has added to trajectories, which it alone has written."""
    return {
        "lengths": np.array([len(x) for x in trajectories], np.int32),
        "reasons": np.array([_REASONS.index(x.finish_reason) for x in trajectories], np.int32),
        "ids": joined((x.ids for x in trajectories), np.int32),
        "sampler_logps": joined((x.sampler_logps for x in trajectories), np.float32),
        "versions": joined((x.versions for x in trajectories), np.int32),
    }


def with_arrays(
    trajectories: Sequence[Trajectory], arrays: Mapping[str, np.ndarray]
) -> list[Trajectory]:
    """Returns prompts with what a sampler has added to them, from `arrays_of`."""
    if not trajectories:
        return []
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = (np.split(arrays[name], ends) for name in ("ids", "sampler_logps", "versions"))
    return [
        Trajectory(
            each.prompt_ids, each.address, ids, np.ones(len(ids), bool), logps, versions,
            _REASONS[int(reason)],
        )
        for each, ids, logps, versions, reason in zip(
            trajectories, *parts, arrays["reasons"], strict=True
        )
    ]  # fmt: skip


def joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    """Returns the parts one after the other."""
    return np.concatenate([np.zeros(0, dtype), *parts])


Group = list[Trajectory]
"""The completions of one prompt."""
