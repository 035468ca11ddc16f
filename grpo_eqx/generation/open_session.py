"""Sampling for requests that come at any time: continuations of any tokens, in shared slots."""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from grpo_eqx.data.trajectory import Address, FinishReason
from grpo_eqx.generation.engine import refill_at_least
from grpo_eqx.generation.options import SamplerOptions
from grpo_eqx.generation.sampler import SamplingCounts
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slot_table import place_of
from grpo_eqx.generation.turn_programs import Draws, Opened, TurnPrograms
from grpo_eqx.generation.turns import CARRIED_AT_ONCE, TOKENS_AT_ONCE, Report
from grpo_eqx.generation.unread import Unread
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.arrays import fetch_own, shard


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Tokens that are to be continued."""

    ids: Sequence[int]
    """The tokens, at least one: prompt, earlier turns, answers."""
    address: Address
    """Address of the draws."""
    start: int
    """Number of the first of `ids` that counts in the address: the length of the prompt."""
    max_tokens: int
    """Limit of the tokens to draw, at least 1."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    """How they are drawn. `top_k` is the same for all requests."""


class Drawn(NamedTuple):
    """Tokens that were drawn for a request since the last step."""

    number: int
    ids: Int[np.ndarray, " n"]
    logps: Float[np.ndarray, " n"]
    """Log-prob of each under the distribution it was drawn from."""
    finish_reason: FinishReason | None
    """`None` while more follow."""


@dataclasses.dataclass
class _Slot:
    """A slot, and the tokens of which it holds keys and values, but for the last one."""

    tokens: list[int] = dataclasses.field(default_factory=lambda: [0])
    number: int | None = None
    """Number of its request; `None` where it is idle."""
    request: Request | None = None
    """Its request, or its last one."""
    room: int = 0
    """Tokens that may still be drawn for it."""
    used: int = 0
    """Time of its last use."""

    def num_held(self, ids: Sequence[int]) -> int:
        """Returns how many of the first tokens of a request have their keys and values here.

        Not the last one, which is read again.
        """
        most = min(len(self.tokens), len(ids)) - 1
        if most > 0 and self.tokens[:most] == list(ids[:most]):
            return most
        same = (a == b for a, b in zip(self.tokens[: max(most, 0)], ids, strict=False))
        return next((n for n, is_same in enumerate(same) if not is_same), 0)


class OpenSession:
    """Slots that complete requests as they come.

    A slot keeps what it has computed when its request ends. A request that begins with those
    tokens, as the next turn of a conversation does, gets that slot and reads only what follows.

    All processes of a run call it alike.
    """

    def __init__(
        self,
        programs: TurnPrograms,
        model: CausalLM,
        options: SamplerOptions,
    ):
        """**Arguments:**

        - `programs`: the programs of as many prompts as there are slots, with one completion each.
        - `model`: the model, as training holds it.
        - `options`: options of the sampler. `max_completion_length` limits all tokens of a request
          but the first.
        """
        self._programs, self._options = programs, options
        layout, R = programs.layout, programs.num_slots
        self.max_length = options.max_completion_length + 1
        """Limit on the tokens of a request, with those that are drawn."""
        self._stopping = shard(options.stopping, layout.sharding())
        self._table = [_Slot() for _ in range(R)]
        self._waiting: deque[tuple[int, Request]] = deque()
        size = R // layout.num_shards
        self._unread = Unread(layout, programs.readers[1], size)
        self._places = [place_of(layout, (R, 1), (row, 0)) for row in range(R)]
        self._report: Report | None = None
        self._decoding: dict[int, int] = {}
        """Request of each row that decodes."""
        self._is_live = np.ones(R, bool)
        """Rows that decode, as the devices have them."""
        self._has_changed = True
        """Whether slots have other requests than at the last step."""
        self._draws: Draws
        self._sampling: Sampling
        self._next_number = self._time = 0
        self.counts = SamplingCounts()
        """Work so far."""
        self._by_row = layout.sharding(layout.prompts)
        # Slots begin with a prompt of one token, which is replaced by the first of a request.
        prompts = np.full((R, 1), options.pad_id, np.int32), np.ones((R, 1), bool)
        ids, mask = shard(prompts, self._by_row)
        self._model, _, self._slots = programs.begin(model, ids, mask, None)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self._waiting and all(slot.number is None for slot in self._table)

    def take(self, request: Request) -> int:
        """Takes a request, which waits for a slot, and returns its number."""
        assert 1 <= len(request.ids) < self.max_length, "there is room for a token"
        assert request.max_tokens >= 1
        number, self._next_number = self._next_number, self._next_number + 1
        self._waiting.append((number, request))
        return number

    def drop(self, number: int) -> None:
        """Ends a request, of which nothing more is returned."""
        self._waiting = deque(each for each in self._waiting if each[0] != number)
        for slot in self._table:
            if slot.number == number:
                slot.number = None

    def step(self) -> list[Drawn]:
        """Returns the tokens that were drawn since the last step, and begins to draw more.

        Devices decode while the caller goes on.
        """
        drawn = [] if self._report is None else self._take_report(self._report)
        self._admit()
        while self._unread:
            readers, _ = self._unread.take(self._places.__getitem__)
            self._slots = self._programs.read(self._model, self._slots, readers)
        self._decoding = {
            row: slot.number for row, slot in enumerate(self._table) if slot.number is not None
        }
        if self._decoding:
            self._decode()
        return drawn

    def _admit(self) -> None:
        """Gives idle slots to requests that wait, in their order."""
        idle = [row for row, slot in enumerate(self._table) if slot.number is None]
        # Slots of requests that were dropped, or have all their tokens, decode until they are told.
        changed = {row: len(self._table[row].tokens) - 1 for row in idle if self._is_live[row]}
        while idle and self._waiting:
            number, request = self._waiting.popleft()
            row = max(idle, key=lambda row: self._fitness(row, request.ids))
            idle.remove(row)
            slot, ids = self._table[row], list(request.ids)
            changed[row] = held = slot.num_held(ids)
            slot.number, slot.request, slot.tokens = number, request, ids
            slot.room = min(request.max_tokens, self.max_length - len(ids))
            if unread := ids[held + 1 :]:
                at_once = TOKENS_AT_ONCE if len(unread) <= TOKENS_AT_ONCE else CARRIED_AT_ONCE
                self._unread.put(row, unread, at_once)
            self._has_changed = True
        if changed:
            self._open(changed)

    def _open(self, num_held: Mapping[int, int]) -> None:
        """Has slots go on with the tokens that they have now.

        **Arguments:**

        - `num_held`: for each row, the number of its tokens whose keys and values it holds.
        """
        R = len(self._table)
        taken, live, lengths, inputs = (np.zeros(R, x) for x in (bool, bool, np.int32, np.int32))
        for row, held in num_held.items():
            slot = self._table[row]
            taken[row], lengths[row], inputs[row] = True, held, slot.tokens[held]
            # Others begin to decode once they have read the rest.
            live[row] = slot.number is not None and held == len(slot.tokens) - 1
            self._is_live[row] = slot.number is not None
        opened = shard(Opened(taken, live, lengths, inputs), self._by_row)
        self._slots = self._programs.open(self._slots, opened)

    def _fitness(self, row: int, ids: Sequence[int]) -> tuple[int, int]:
        """Returns how well an idle slot fits: by what it holds, then by when it was used."""
        slot = self._table[row]
        return slot.num_held(ids), -slot.used

    def _decode(self) -> None:
        """Begins to decode until a share of the requests have ended, by themselves or by their
        limits.
        """
        rooms = sorted(slot.room for slot in self._table if slot.number is not None)
        share = refill_at_least(len(rooms))
        if self._has_changed:
            self._has_changed = False
            self._draws, self._sampling = self._addresses(), self._samplings()
        self._slots, self._report = self._programs.decode(
            self._model, self._slots, self._draws, self._stopping, np.int32(share),
            np.int32(rooms[share - 1]), self._sampling,
        )  # fmt: skip

    def _addresses(self) -> Draws:
        """Returns the addresses of the slots' draws, on the devices."""
        nothing = Request([0], Address(0, 0, 0), 0, 1)
        requests = [slot.request or nothing for slot in self._table]
        draws = Draws.of(
            self._options.seed,
            [each.address for each in requests],
            # A slot's first token is its prompt.
            [each.start - 1 for each in requests],
        )
        return shard(draws, self._programs.layout.sharding())

    def _samplings(self) -> Sampling:
        """Returns how tokens are drawn, with a value for each slot."""
        own = [slot.request.sampling for slot in self._table if slot.request is not None]
        truncates = any(x.top_p is not None or x.min_p is not None for x in own)
        whole = Sampling(temperature=1.0)
        each = [whole if slot.request is None else slot.request.sampling for slot in self._table]

        def values(name: str, without: float) -> jax.Array:
            found = [getattr(x, name) for x in each]
            array = np.array([without if x is None else x for x in found], np.float32)
            return shard(array[:, None, None], self._by_row)

        top_p, min_p = (values("top_p", 1.0), values("min_p", 0.0)) if truncates else (None, None)
        one = Sampling(top_k=own[0].top_k)  # that of all
        return eqx.tree_at(
            lambda x: (x.temperature, x.top_p, x.min_p),
            one,
            (values("temperature", 0.0), top_p, min_p),
            is_leaf=lambda x: x is None,
        )

    def _take_report(self, report: Report) -> list[Drawn]:
        """Waits until decoding pauses."""
        self._report, found = None, list[Drawn]()
        live, lengths, finished, ids, logps, counts = fetch_own(report)
        self._is_live, num_drawn = live[:, 0].copy(), 0
        self._time += 1
        for row, number in self._decoding.items():
            slot = self._table[row]
            if slot.number != number:
                continue  # it was dropped meanwhile
            drawn = int(lengths[row, 0]) + 1 - len(slot.tokens)
            n = min(drawn, slot.room)  # others went on while it had reached its limit
            slot.tokens += ids[row, 0, :n].tolist()
            slot.room, slot.used, num_drawn = slot.room - n, self._time, num_drawn + n
            reason: FinishReason | None = None
            if finished[row, 0] and n == drawn:
                reason = "stop"
            elif not live[row, 0] or slot.room == 0:
                reason = "length"
            if reason is not None:
                slot.number = None
            found.append(Drawn(number, ids[row, 0, :n], logps[row, 0, :n], reason))
        steps, slots, cache_share = counts
        counted = SamplingCounts(int(steps), int(slots), float(cache_share), num_drawn)
        self.counts = self.counts.plus(counted)
        return found
