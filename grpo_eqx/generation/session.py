"""Sampling of completions in several turns, between which the host says what they read."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.common.random_keys import sample_keys
from grpo_eqx.data.trajectory import FinishReason, Trajectory
from grpo_eqx.generation.engine import begin, refill_at_least
from grpo_eqx.generation.options import SamplerOptions, laid_out_weights
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, SamplingCounts
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slots import SlotQueue, Slots
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.generation.turns import (
    TOKENS_AT_ONCE,
    Readers,
    Report,
    decode_turns,
    num_readers,
    read_tokens,
)
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.sharding.arrays import fetch, shard
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import num_shards


class Draws(NamedTuple):
    """Addresses of the draws of a batch."""

    seed: UInt[Array, ""]
    step: Int[Array, ""]
    rows: Int[Array, " P"]
    """Row of each prompt among those that are sampled for the step."""


class TurnPrograms:
    """The compiled programs of one layout."""

    def __init__(
        self, options: SamplerOptions, layout: RolloutLayout, group: int, compiler: Compiler
    ):
        """**Arguments:**

        - `options`: options of the sampler.
        - `layout`: the layout over devices.
        - `group`: completions of each prompt.
        - `compiler`: compiles the programs.
        """
        self._options, self.layout, self._group = options, layout, group
        self.begin = compiler.jit("prefill", self._begin, static_argnums=3)
        self.decode = compiler.jit("decode", self._decode, static_argnums=5, donate_argnums=1)
        self.read = compiler.jit("extend", self._read, donate_argnums=1)
        self.admit = compiler.jit("admit", self._admit, donate_argnums=1)

    def _begin(
        self,
        model: CausalLM,
        prompt_ids: Int[Array, "P Tp"],
        prompt_mask: Bool[Array, "P Tp"],
        num_slots: int,
    ) -> tuple[CausalLM, PromptCache | None, Slots]:
        options, layout = self._options, self.layout
        model = laid_out_weights(model, options, layout)
        begun = begin(
            model, prompt_ids, prompt_mask, self._group,
            max_length=options.max_completion_length, num_slots=num_slots, layout=layout,
            kv_cache_dtype=options.kv_cache_dtype, kv_head_multiple=options.kv_head_multiple,
            attention=options.attention.over(layout), decoding_form=options.decoding_form,
        )  # fmt: skip
        # Where every completion has a slot, slots hold all prompts.
        is_refilled = num_slots < len(prompt_ids) * self._group
        return begun.model, begun.queue.prompts if is_refilled else None, begun.slots

    def _decode(
        self,
        model: CausalLM,
        slots: Slots,
        draws: Draws,
        stopping: Stopping,
        pause_after: Int[Array, ""],
        sampling: Sampling,
    ) -> tuple[Slots, Report]:
        keys = sample_keys(draws.seed, draws.step, draws.rows, self._group).reshape(-1)
        slots, report = decode_turns(
            model, slots, keys, stopping, sampling, self.layout, pause_after
        )
        report = jax.lax.with_sharding_constraint(report, self.layout.sharding())
        return slots.laid_out(self.layout), report

    def _read(self, model: CausalLM, slots: Slots, readers: Readers) -> Slots:
        return read_tokens(model, slots, readers, self.layout)

    def _admit(self, prompts: PromptCache, slots: Slots, completions: Int[Array, " R"]) -> Slots:
        queue = SlotQueue(prompts, self._group, self.layout.num_prompt_shards)
        admitted = queue.admitted(slots, jnp.maximum(completions, 0), completions >= 0)
        return admitted.laid_out(self.layout)


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
        - `trajectories`: prompts with the addresses of their draws, `P` groups of equal size.
        - `version`: version of the weights.
        - `responder`: says what follows a turn.
        """
        self._programs, self._sampling = programs, sampling
        self._trajectories, self._version = list(trajectories), version
        self._most_tokens, self._responder = options.max_completion_length, responder
        N, P, layout = len(trajectories), len(prompt_ids), programs.layout
        self._stopping, self._draws = shard(options.stopping, layout.sharding()), draws
        num_slots = N if options.max_num_seqs is None else min(options.max_num_seqs, N)
        self._model, self._prompts, self._slots = programs.begin(
            model, prompt_ids, prompt_mask, num_slots
        )
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
        self._readers = layout.num_shards, num_readers(self._slots_per_device)
        self._waiting = [deque(x[num_slots // shards :].tolist()) for x in of_shards]
        self._unread: dict[int, list[int]] = {}
        """Tokens of replies that the model is still to read."""
        self._live = np.ones(shape, bool)
        self._asked: set[int] = set()
        """Completions that wait for a reply."""
        self._counts = SamplingCounts()
        self._report: Report | None = None
        self._decode()  # while the host goes on

    def result(self) -> Sampled:
        while True:
            if self._report is not None:
                self._take_report(self._report)
            if all(each.finish_reason is not None for each in self._trajectories):
                break
            self._admit()
            self._take_replies()
            self._read_replies()
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

    def _read_replies(self) -> None:
        """Has the model read all that was replied."""
        while self._unread:
            readers = self._next_readers()
            self._slots = self._programs.read(self._model, self._slots, readers)

    def _next_readers(self) -> Readers:
        """Takes the next tokens of as many replies as can be read at once, of those unread."""
        shape = self._readers
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
