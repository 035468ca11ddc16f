"""Sampling of completions in turns, between which the host says what they read."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from grpo_eqx.data.trajectory import FinishReason, Trajectory
from grpo_eqx.generation.engine import refill_at_least
from grpo_eqx.generation.options import SamplerOptions
from grpo_eqx.generation.pending import Ahead
from grpo_eqx.generation.sampler import (
    PendingSamples,
    Responder,
    Sampled,
    SamplingCounts,
    Until,
)
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slot_table import SlotTable
from grpo_eqx.generation.slots import Slots
from grpo_eqx.generation.turn_programs import Draws, TurnPrograms
from grpo_eqx.generation.turns import CARRIED_AT_ONCE, MOST_STEPS, TOKENS_AT_ONCE, Report
from grpo_eqx.generation.unread import Unread
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import fetch_own, shard


class Kept(NamedTuple):
    """Slots as a session has left them, with the caches of completions that have not ended."""

    slots: Slots
    completions: dict[int, tuple[int, Trajectory]]
    """Number of each such completion, and what it is so far, by its row."""

    def are_of(self, trajectories: Sequence[Trajectory], width: int) -> bool:
        """Returns whether all of them are among these, under the same numbers.

        **Arguments:**

        - `trajectories`: the completions.
        - `width`: tokens of their padded prompts.
        """
        return self.slots.prompt.visible.shape[1] == width and all(
            each.address == trajectories[number].address
            and np.array_equal(each.ids, trajectories[number].ids)
            for number, each in self.completions.values()
        )


class Session(PendingSamples):
    """Completions in slots: where a turn has ended, a responder says what follows.

    Slots decode while others wait for their replies.
    """

    def __init__(
        self,
        programs: TurnPrograms,
        model: CausalLM,
        prompt_ids: Int[Array, "P Tp"],
        prompt_mask: Bool[Array, "P Tp"],
        draws: Draws,
        sampling: Sampling,
        options: SamplerOptions,
        trajectories: Sequence[Trajectory],
        version: int,
        responder: Responder | None = None,
        until: Until | None = None,
        kept: Kept | None = None,
    ):
        """**Arguments:**

        - `programs`: the programs.
        - `model`: the model, as training holds it.
        - `prompt_ids`, `prompt_mask`: the prompts, on the devices.
        - `draws`, `sampling`: the addresses of draws, and how tokens are drawn.
        - `options`: options of the sampler.
        - `trajectories`: prompts with the addresses of their draws, `P` groups of equal size, and
          the tokens that completions begin with, if any, which leave room for more.
        - `version`: version of the weights.
        - `responder`: says what follows a turn; by default, a completion has one turn.
        - `until`: says when enough completions have ended; by default, when all have. With it,
          there are fewer slots than completions, of which some may have ended before.
        - `kept`: slots that another session has left, for the completions in them. Of others, the
          tokens that they begin with are read anew.
        """
        self._programs, self._sampling = programs, sampling
        self._trajectories, self._version = list(trajectories), version
        self._most_tokens, self._responder = options.max_completion_length, responder
        self._until, self._keeps = until, options.keeps_caches
        assert until is None or programs.is_refilled
        self.kept: Kept | None = None
        """Slots that the next session may go on with, once this one has stopped early."""
        self._ended: list[int] = []
        """Completions that have ended, of which `until` has not been told."""
        self._order: list[int] = []
        """Completions of which it has been told."""
        layout = programs.layout
        self._stopping, self._draws = shard(options.stopping, layout.sharding()), draws
        self._pause_after = np.int32(refill_at_least(programs.num_slots))
        held = {} if kept is None else {row: n for row, (n, _) in kept.completions.items()}
        self._table = table = SlotTable(
            layout, programs.batch, programs.num_slots, trajectories, held
        )
        self._unread = Unread(layout, programs.readers[1], table.size_per_device)
        self._asked = {n for n, each in enumerate(trajectories) if each.awaits_reply}
        """Completions that wait for a reply."""
        self._counts = SamplingCounts()
        self._report: Report | None = None
        first = None
        if programs.is_refilled and kept is None:
            taken = table.refill(self._trajectories)
            first = shard(taken, layout.sharding(layout.prompts))
        slots = None if kept is None else kept.slots
        self._model, self._prompts, self._slots = programs.begin(
            model, prompt_ids, prompt_mask, first, slots
        )
        if slots is None:
            self._read_begun(table.slot)
        else:
            self._admit()
        self._read()
        if not self._are_enough() and table.live.any():
            self._decode()  # while the host goes on

    def result(self) -> Sampled:
        while True:
            if self._report is not None:
                self._take_report(self._report)
            if self._are_enough():
                break
            self._admit()
            self._take_replies()
            self._read()
            if self._table.live.any():
                self._decode()
            else:
                assert self._asked or self._ended, "completions wait for nothing"
        if self._until is not None and self._keeps:
            held = {
                slot[0]: (number, self._trajectories[number])
                for number, slot in self._table.slot.items()
                if self._trajectories[number].finish_reason is None
            }
            self.kept = Kept(self._slots, held)
        del self._model, self._prompts, self._slots  # whoever keeps the session
        return Sampled(self._trajectories, self._counts, ended=self._order)

    def in_background(self) -> PendingSamples:
        return Ahead(self)

    def _are_enough(self) -> bool:
        """Returns whether enough completions have ended."""
        ended, self._ended = sorted(self._ended), []
        self._order += ended
        if self._until is not None:
            return self._until(ended)
        return all(each.finish_reason is not None for each in self._trajectories)

    def _take_replies(self) -> None:
        """Takes the replies that are there; waits for one where nothing else is left to do."""
        if self._responder is None or not self._asked:
            return
        is_idle = not self._table.live.any()
        for number, tokens in self._responder.replies(wait=is_idle):
            self._asked.remove(number)
            trajectory = self._trajectories[number]
            room = self._most_tokens - len(trajectory)
            if tokens is None:
                self._finish(number, "stop")
            elif len(tokens) >= room:
                self._finish(number, "length")  # nothing could follow
            else:
                self._trajectories[number] = trajectory.extended(tokens, version=self._version)
                if number in self._table.slot:
                    self._unread.put(number, tokens, TOKENS_AT_ONCE)
                else:  # it reads all of it as it gets one
                    self._table.wait(number)

    def _finish(self, number: int, reason: FinishReason) -> None:
        self._trajectories[number] = dataclasses.replace(
            self._trajectories[number], finish_reason=reason, awaits_reply=False
        )
        self._ended.append(number)

    def _read_begun(self, numbers: Iterable[int]) -> None:
        """Has the model read the tokens that completions begin with, as they get a slot."""
        at_once = TOKENS_AT_ONCE if self._until is None else CARRIED_AT_ONCE
        for number in numbers:
            if len(trajectory := self._trajectories[number]):
                self._unread.put(number, trajectory.ids.tolist(), at_once)

    def _read(self) -> None:
        """Has the model read all that it is still to read."""
        table = self._table
        while self._unread:
            readers, are_read = self._unread.take(table.place)
            for number, is_read in are_read.items():
                table.live[table.slot[number]] = is_read
            self._slots = self._programs.read(self._model, self._slots, readers)

    def _admit(self) -> None:
        """Gives free slots to completions that wait for one."""
        taken = self._table.refill(self._trajectories)
        if not (taken >= 0).any():
            return
        self._read_begun(taken[taken >= 0].tolist())
        layout = self._programs.layout
        completions = shard(taken, layout.sharding(layout.prompts))
        self._slots = self._programs.admit(self._prompts, self._slots, completions)

    def _decode(self) -> None:
        """Begins to decode until turns have ended."""
        self._slots, self._report = self._programs.decode(
            self._model, self._slots, self._draws, self._stopping, self._pause_after,
            np.int32(MOST_STEPS), self._sampling,
        )  # fmt: skip

    def _take_report(self, report: Report) -> None:
        """Waits until decoding pauses, and hands the turns that ended to the responder."""
        self._report, table = None, self._table
        live, lengths, finished, ids, logps, counts = fetch_own(report)
        steps, slots, cache_share = counts
        num_drawn = 0
        for slot in np.argwhere(table.live).tolist():
            at = tuple(slot)
            number = int(table.completion[at])
            drawn = int(lengths[at]) - len(self._trajectories[number])
            num_drawn += drawn
            trajectory = self._trajectories[number].extended(
                ids[at][:drawn], logps[at][:drawn], version=self._version
            )
            self._trajectories[number] = trajectory
            if live[at]:
                continue
            if not finished[at]:
                self._finish(number, "length")
            elif self._responder is None:
                self._finish(number, "stop")
            else:
                self._asked.add(number)
                self._trajectories[number] = dataclasses.replace(trajectory, awaits_reply=True)
                self._responder.take(number, trajectory)
        table.live = live.copy()
        counted = SamplingCounts(int(steps), int(slots), float(cache_share), num_drawn)
        self._counts = self._counts.plus(counted)
