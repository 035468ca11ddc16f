"""Sampling of completions in several turns, between which the host says what they read."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Array, Bool, Int

from grpo_eqx.data.trajectory import FinishReason, Trajectory
from grpo_eqx.generation.engine import refill_at_least
from grpo_eqx.generation.options import SamplerOptions
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, SamplingCounts
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.turn_programs import Draws, TurnPrograms
from grpo_eqx.generation.turns import TOKENS_AT_ONCE, Readers, Report
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import fetch, shard
from grpo_eqx.sharding.rules import num_shards


class Session(PendingSamples):
    """Completions of several turns in slots: where a turn has ended, a responder says what follows.

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
        responder: Responder,
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
        - `responder`: says what follows a turn.
        """
        self._programs, self._sampling = programs, sampling
        self._trajectories, self._version = list(trajectories), version
        self._most_tokens, self._responder = options.max_completion_length, responder
        N, P, layout = len(trajectories), len(prompt_ids), programs.layout
        self._stopping, self._draws = shard(options.stopping, layout.sharding()), draws
        num_slots = programs.num_slots
        self._model, self._prompts, self._slots = programs.begin(model, prompt_ids, prompt_mask)
        shards = layout.num_prompt_shards
        self._pause_after = np.int32(refill_at_least(num_slots))
        of_shards = np.arange(N).reshape(shards, -1)
        first = of_shards[:, : num_slots // shards].reshape(-1)
        shape = (P, N // P) if num_slots == N else (num_slots, 1)
        self._completion = first.reshape(shape)
        """The completion of each slot."""
        self._slot = {int(n): divmod(i, shape[1]) for i, n in enumerate(first)}
        """The slot of each completion that has one."""
        self._slots_per_device = num_slots // layout.num_shards
        self._waiting = [deque(x[num_slots // shards :].tolist()) for x in of_shards]
        self._unread: dict[int, list[int]] = {}
        """Tokens of others that the model is still to read."""
        self._live = np.ones(shape, bool)
        self._asked: set[int] = set()
        """Completions that wait for a reply."""
        self._counts = SamplingCounts()
        self._report: Report | None = None
        self._read_begun(self._slot)
        self._read()
        if self._live.any():
            self._decode()  # while the host goes on

    def result(self) -> Sampled:
        while True:
            if self._report is not None:
                self._take_report(self._report)
            if all(each.finish_reason is not None for each in self._trajectories):
                break
            self._admit()
            self._take_replies()
            self._read()
            if self._live.any():
                self._decode()
        del self._model, self._prompts, self._slots  # whoever keeps the session
        return Sampled(self._trajectories, self._counts)

    def _take_replies(self) -> None:
        """Takes the replies that are there; waits for one where nothing else is left to do."""
        if not self._asked:
            return
        is_idle = not self._live.any()
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
                self._unread[number] = list(tokens)

    def _finish(self, number: int, reason: FinishReason) -> None:
        ended = dataclasses.replace(self._trajectories[number], finish_reason=reason)
        self._trajectories[number] = ended

    def _read_begun(self, numbers: Iterable[int]) -> None:
        """Has the model read the tokens that completions begin with, as they get a slot."""
        for number in numbers:
            if len(trajectory := self._trajectories[number]):
                self._unread[number] = trajectory.ids.tolist()

    def _read(self) -> None:
        """Has the model read all that others wrote."""
        while self._unread:
            readers = self._next_readers()
            self._slots = self._programs.read(self._model, self._slots, readers)

    def _next_readers(self) -> Readers:
        """Takes the next unread tokens of as many completions as can read at once."""
        shape = self._programs.readers
        slots, resumes = np.full(shape, self._slots_per_device, np.int32), np.zeros(shape, bool)
        ids, lengths = np.zeros((*shape, TOKENS_AT_ONCE), np.int32), np.zeros(shape, np.int32)
        number_of = [0] * len(slots)
        for number, tokens in list(self._unread.items()):
            device, slot = self._place(*self._slot[number])
            if number_of[device] == shape[1]:
                continue
            reader = device, number_of[device]
            number_of[device] += 1
            now, later = tokens[:TOKENS_AT_ONCE], tokens[TOKENS_AT_ONCE:]
            slots[reader], lengths[reader], resumes[reader] = slot, len(now), not later
            ids[reader][: len(now)] = now
            self._live[self._slot[number]] = not later
            self._unread[number] = later
        self._unread = {number: later for number, later in self._unread.items() if later}
        layout = self._programs.layout
        arrays = (
            slots.reshape(-1),
            ids.reshape(-1, 1, TOKENS_AT_ONCE),
            lengths.reshape(-1, 1),
            resumes.reshape(-1, 1),
        )
        return Readers(*shard(arrays, layout.sharding(layout.prompts + layout.groups)))

    def _place(self, row: int, column: int) -> tuple[int, int]:
        """Returns the device of a slot, and the slot's number among those of the device."""
        layout = self._programs.layout
        groups = num_shards(layout.mesh, layout.groups)
        rows, columns = self._completion.shape
        rows, columns = rows // layout.num_prompt_shards, columns // groups
        device = row // rows * groups + column // columns
        return device, row % rows * columns + column % columns

    def _admit(self) -> None:
        """Gives slots of completions that have ended to those that wait."""
        per_shard = len(self._completion) // len(self._waiting)
        taken = np.full(len(self._completion), -1, np.int32)
        for row, number in enumerate(self._completion[:, 0].tolist()):
            waiting = self._waiting[row // per_shard]
            if self._trajectories[number].finish_reason is not None and waiting:
                taken[row] = self._completion[row, 0] = waiting.popleft()
                self._slot[int(taken[row])] = row, 0
                self._live[row] = True
        self._read_begun(taken[taken >= 0].tolist())
        if (taken >= 0).any():
            layout = self._programs.layout
            completions = shard(taken, layout.sharding(layout.prompts))
            self._slots = self._programs.admit(self._prompts, self._slots, completions)

    def _decode(self) -> None:
        """Begins to decode until turns have ended."""
        self._slots, self._report = self._programs.decode(
            self._model, self._slots, self._draws, self._stopping, self._pause_after,
            self._sampling,
        )  # fmt: skip

    def _take_report(self, report: Report) -> None:
        """Waits until decoding pauses, and hands the turns that ended to the responder."""
        self._report = None
        live, lengths, finished, ids, logps, counts = fetch(report)
        steps, slots, cache_share = counts
        self._counts = self._counts.plus(SamplingCounts(int(steps), int(slots), float(cache_share)))
        for slot in np.argwhere(self._live).tolist():
            at = tuple(slot)
            number = int(self._completion[at])
            drawn = int(lengths[at]) - len(self._trajectories[number])
            trajectory = self._trajectories[number].extended(
                ids[at][:drawn], logps[at][:drawn], version=self._version
            )
            self._trajectories[number] = trajectory
            if live[at]:
                continue
            if not finished[at]:
                self._finish(number, "length")
            else:
                self._asked.add(number)
                self._responder.take(number, trajectory)
        self._live = live.copy()
