"""Rows of one micro-batch: their tokens, and the completions that the tokens belong to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from grpo_eqx.generation import Rollout
from grpo_eqx.models.causal_attention import Visible
from grpo_eqx.training.packing import Packing


class Places(NamedTuple):
    """Place that holds each column of a row, of places that begin and end somewhere in it."""

    place: Int[Array, "R W"]
    offset: Int[Array, "R W"]
    """Column, counted from the start of its place."""
    held: Bool[Array, "R W"]
    """False on columns of no place; elsewhere the other fields mean nothing."""

    @classmethod
    def of(cls, starts: Int[Array, "R C"], lengths: Int[Array, "R C"], width: int) -> "Places":
        """Finds the first place, if any, that has each of `width` columns."""
        columns = jnp.arange(width, dtype=jnp.int32)[:, None]
        inside = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
        place = jnp.argmax(inside, axis=-1).astype(jnp.int32)
        start = jnp.take_along_axis(starts, place, axis=1)
        return cls(place, columns[:, 0] - start, inside.any(axis=-1))

    def pick(self, x: Int[Array, "R C"]) -> Int[Array, "R W"]:
        """Returns each column's value of one per place."""
        return jnp.take_along_axis(x, self.place, axis=1)


class Rows(NamedTuple):
    """Rows of `W` tokens, with `S` of them to score and `C` places for completions.

    See `Packing`, of which this is one micro-batch, spelled out.
    """

    completions: Int[Array, "R C"]
    prompts: Int[Array, "R W"]
    """Prompt of the batch that each column belongs to, alone or with a completion."""
    prompt_offsets: Int[Array, "R W"]
    """Token of the prompt; its last on a completion's columns."""
    of_completion: Int[Array, "R W"]
    """Completion of the batch that each column belongs to; -1 on prompts."""
    offsets: Int[Array, "R W"]
    """Inputs of the completion before this one; the first is the prompt's last token."""
    visible: Visible
    scored: Int[Array, "R S"]
    """Column whose state predicts the token."""
    scored_completions: Int[Array, "R S"]
    """Completion that the token belongs to; -1 where there is none."""
    scored_offsets: Int[Array, "R S"]
    scored_starts: Int[Array, "R C"]
    """Start of each completion's tokens among those that are scored."""

    @classmethod
    def of(cls, packing: Packing, micro_batch: Int[Array, ""], group: int) -> "Rows":
        """Spells out a micro-batch of completions that come in groups of `group`."""
        completions, lengths, starts, prompt_starts, prompt_lengths = (
            jax.lax.dynamic_index_in_dim(jnp.asarray(x), micro_batch, keepdims=False)
            for x in (
                packing.completions, packing.lengths, packing.starts, packing.prompt_starts,
                packing.prompt_lengths,
            )
        )  # fmt: skip
        width = packing.shape.width
        own = Places.of(starts, lengths, width)
        prompt = Places.of(prompt_starts, prompt_lengths - 1, width)
        kept = own.pick(prompt_lengths) - 1
        columns = jnp.arange(width, dtype=jnp.int32)
        start = jnp.where(prompt.held, prompt.pick(prompt_starts), columns)
        before = jnp.where(own.held, own.pick(prompt_starts), 0)
        scored_starts = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
        scored = Places.of(scored_starts, lengths, packing.shape.num_scored)
        holder = jnp.where(own.held, own.pick(completions), prompt.pick(completions))
        return cls(
            completions=completions,
            prompts=jnp.maximum(holder, 0) // group,
            prompt_offsets=jnp.where(own.held, kept, jnp.where(prompt.held, prompt.offset, 0)),
            of_completion=jnp.where(own.held, holder, -1),
            offsets=jnp.where(own.held, own.offset, 0),
            visible=Visible(
                own_start=jnp.where(own.held, own.pick(starts), start),
                prompt_start=before,
                prompt_end=jnp.where(own.held, before + kept, 0),
            ),
            scored=jnp.where(scored.held, scored.pick(starts) + scored.offset, 0),
            scored_completions=jnp.where(scored.held, scored.pick(completions), -1),
            scored_offsets=scored.offset,
            scored_starts=scored_starts,
        )

    @property
    def positions(self) -> Int[Array, "R W"]:
        """Positions of the tokens in their sequences."""
        return self.prompt_offsets + self.offsets

    def inputs(self, rollout: Rollout) -> Int[Array, "R W"]:
        """Gathers the rows' tokens."""
        of_prompt = jnp.asarray(rollout.prompts.ids)[self._of_prompts(rollout)]
        before = jnp.maximum(self.of_completion, 0), jnp.maximum(self.offsets - 1, 0)
        return jnp.where(self.offsets > 0, _flat(rollout.completion_ids)[before], of_prompt)

    def routes(self, rollout: Rollout) -> Integer[Array, "R W Lk"]:
        """Gathers the experts that the sampler chose for the rows' tokens."""
        assert rollout.routes is not None
        assert rollout.prompts.routes is not None
        of_prompt = jnp.asarray(rollout.prompts.routes)[self._of_prompts(rollout)]
        own = jnp.asarray(_flat(rollout.routes))[jnp.maximum(self.of_completion, 0), self.offsets]
        return jnp.where((self.of_completion < 0)[..., None], of_prompt, own)

    def _of_prompts(self, rollout: Rollout) -> tuple[Int[Array, "R W"], Int[Array, "R W"]]:
        """Returns the prompt of each column, and where in the prompt's padded row it is."""
        first = jnp.argmax(rollout.prompts.mask, axis=1).astype(jnp.int32)[self.prompts]
        return self.prompts, first + self.prompt_offsets

    def targets(self, rollout: Rollout) -> Int[Array, "R S"]:
        """Gathers the tokens to score; -1 where there is none."""
        at = jnp.maximum(self.scored_completions, 0), self.scored_offsets
        return jnp.where(self.scored_completions < 0, -1, _flat(rollout.completion_ids)[at])

    def pick(self, x: Shaped[Array | np.ndarray, "P G *rest"]) -> Shaped[Array, "R C *rest"]:
        """Gathers the completions' values from those of the batch; those of empty places too."""
        return _flat(jnp.asarray(x))[jnp.maximum(self.completions, 0)]

    def by_completion(self, x: Shaped[Array, "R S"], length: int) -> Shaped[Array, "R C T"]:
        """Gathers scores as `length` per completion; past its end they are meaningless."""
        columns = self.scored_starts[..., None] + jnp.arange(length, dtype=jnp.int32)
        columns = jnp.minimum(columns, x.shape[1] - 1)
        return jnp.take_along_axis(x[:, None], columns, axis=2)

    def put(
        self, whole: Shaped[Array, "P G T"], x: Shaped[Array, "R C T"]
    ) -> Shaped[Array, "P G T"]:
        """Puts the completions' values in their place in those of the batch."""
        P, G, T = whole.shape
        index = jnp.where(self.completions < 0, P * G, self.completions)
        return _flat(whole).at[index].set(x, mode="drop").reshape(P, G, T)


def _flat(x: Shaped[Array, "P G *rest"]) -> Shaped[Array, "completions *rest"]:
    return x.reshape(-1, *x.shape[2:])
