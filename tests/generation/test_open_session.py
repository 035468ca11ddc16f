"""Requests that come at any time are continued as a loop over one sequence would."""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.generation.cpu import CpuDecoding
from grpo_eqx.generation.open_session import OpenSession, Request
from grpo_eqx.generation.sampling import GREEDY, Sampling
from grpo_eqx.generation.unread import Unread
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.sharding import ExplicitMesh

from .scripted_dialogues import (
    CONFIGS,
    EOS,
    LONGEST,
    ONE_DEVICE,
    SAMPLING,
    VOCAB,
    check_same,
    one_at_a_time,
    reply,
    sampler,
    trajectories,
)  # fmt: skip

MAX_LENGTH = 10 + LONGEST + 2


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return Decoder.init(CONFIGS[request.param], jax.random.key(0), std=0.3)


def opened(
    model: Decoder, slots: int, mesh: ExplicitMesh = ONE_DEVICE, form: CpuDecoding | None = None
) -> OpenSession:
    made = sampler(mesh, decoding_form=form)
    made.set_weights(jax.device_put(model, model.shardings(made.mesh)), 7)
    return made.open_session(slots, MAX_LENGTH)


class Clients:
    """Clients whose dialogues are the scripted ones, each turn as a request with all tokens."""

    def __init__(self, session: OpenSession, rng: random.Random):
        self.session, self.rng = session, rng
        self.made, self.turns = trajectories(), [0] * len(trajectories())
        self.asked: dict[int, int] = {}
        """Dialogue of each request."""
        self.ready = list(range(len(self.made)))
        self.others: set[int] = set()

    def play(self) -> list[Trajectory]:
        while self.ready or self.asked:
            self._ask()
            for drawn in self.session.step():
                if drawn.number in self.others:
                    continue
                n = self.asked[drawn.number]
                self.made[n] = self.made[n].extended(drawn.ids, drawn.logps, version=7)
                if drawn.finish_reason is not None:
                    del self.asked[drawn.number]
                    self._end_turn(n, drawn.finish_reason)
        return self.made

    def _ask(self) -> None:
        """Sends some of the requests that are due, in any order, and others that are dropped."""
        if self.rng.random() < 0.3:
            ids = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 30))]
            sampling = self.rng.choice([GREEDY, Sampling(top_p=0.5), Sampling(min_p=0.2)])
            request = Request(ids, Address(1, 2, 3), 1, self.rng.randint(1, 40), sampling)
            self.others.add(self.session.take(request))
        if self.others and self.rng.random() < 0.3:
            self.session.drop(self.rng.choice(sorted(self.others)))
        self.rng.shuffle(self.ready)
        for _ in range(self.rng.randint(not self.asked, len(self.ready)) if self.ready else 0):
            n = self.ready.pop()
            each = self.made[n]
            ids = [*each.prompt_ids, *each.ids.tolist()]
            start, room = len(each.prompt_ids), LONGEST - len(each)
            number = self.session.take(Request(ids, each.address, start, room, SAMPLING))
            self.asked[number] = n

    def _end_turn(self, n: int, reason: str) -> None:
        each = self.made[n]
        if reason == "stop" and len(each) < LONGEST:
            self.turns[n] += 1
            follows = reply(n, self.turns[n])
            if follows is not None and len(each) + len(follows) < LONGEST:
                self.made[n] = each.extended(follows, version=7)
                self.ready.append(n)
                return
            reason = "stop" if follows is None else "length"
        self.made[n] = Trajectory(
            each.prompt_ids, each.address, each.ids, each.written, each.sampler_logps,
            each.versions, reason,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "mesh", "form"),
    [
        (16, ONE_DEVICE, None),
        (3, ONE_DEVICE, CpuDecoding()),
        (8, ExplicitMesh(dp=2, fsdp=2, tp=2), None),
        (8, ExplicitMesh(dp=2, fsdp=2, tp=1), CpuDecoding()),
    ],
    ids=["many slots", "few slots", "2,2,2", "2,2,1"],
)
def test_they_are_those_of_one_sequence_at_a_time(
    model: Decoder, slots: int, mesh: ExplicitMesh, form: CpuDecoding | None
) -> None:
    """Whatever the order, whoever else asks, and whichever slot has which tokens."""
    session = opened(model, slots, mesh, form)
    found = Clients(session, random.Random(slots)).play()
    check_same(found, one_at_a_time(model), 1e-4)


def completed(session: OpenSession, *requests: Request) -> list[list[int]]:
    """Continues requests that come together."""
    numbers = {session.take(request): i for i, request in enumerate(requests)}
    ids: list[list[int]] = [[] for _ in requests]
    while not session.is_idle:
        for drawn in session.step():
            ids[numbers[drawn.number]] += drawn.ids.tolist()
    return ids


def test_each_request_has_its_own_sampling(model: Decoder) -> None:
    """Greedy and truncated draws, beside each other and alone."""
    width = 40
    logits = jax.jit(lambda ids: model.logits(ids[None], jnp.ones((1, width), bool))[0])

    def most_likely(ids: list[int], number: int) -> list[int]:
        known = list(ids)
        for _ in range(number):
            row = logits(jnp.array(known + [0] * (width - len(known))))[len(known) - 1]
            known.append(int(row.argmax()))
            if known[-1] in EOS:
                break
        return known[len(ids) :]

    session = opened(model, 4)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(7, VOCAB, size=size).tolist() for size in (3, 8, 5, 1)]
    almost = [Sampling(top_p=1e-6), Sampling(min_p=1.0), Sampling(top_p=0.5), GREEDY]
    requests = [
        Request(ids, Address(0, n, 0), len(ids), 6, sampling)
        for n, (ids, sampling) in enumerate(zip(prompts, [*almost], strict=True))
    ]
    together = completed(session, *requests)
    greedy = [most_likely(ids, 6) for ids in prompts]
    assert [together[n] for n in (0, 1, 3)] == [greedy[n] for n in (0, 1, 3)]
    assert [completed(opened(model, 1), each) for each in requests] == [[x] for x in together]


def test_a_next_turn_reads_only_what_follows(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, read = opened(model, 2), list[int]()
    put = Unread.put

    def noted(unread: Unread, number: int, tokens: Sequence[int], at_once: int) -> None:
        read.append(len(tokens))
        put(unread, number, tokens, at_once)

    monkeypatch.setattr(Unread, "put", noted)
    first, other = [7, 8, 9, 10], [11, 12]
    (made, _) = completed(
        session,
        Request(first, Address(0, 0, 0), 4, 5, SAMPLING),
        Request(other, Address(0, 1, 0), 2, 5, SAMPLING),
    )
    assert read == [3, 1]
    completed(session, Request([*first, *made, 13, 14, 15], Address(0, 0, 0), 4, 5, SAMPLING))
    assert read[2:] == [3]  # the last of the first turn is the next input
    completed(session, Request([*first, 20], Address(0, 0, 1), 4, 5, SAMPLING))
    assert read[3:] == []  # what both have in common stays


def test_limits_are_kept(model: Decoder) -> None:
    session = opened(model, 2)
    ids = [7] * (MAX_LENGTH - 3)
    some, rest = completed(
        session,
        Request([8, 9], Address(0, 0, 0), 2, 2, GREEDY),
        Request(ids, Address(0, 1, 0), len(ids), 100, Sampling(temperature=5.0)),
    )
    assert len(some) <= 2
    assert len(rest) <= 3
    assert session.counts.tokens == len(some) + len(rest)


def test_what_is_dropped_ends_at_once(model: Decoder) -> None:
    session = opened(model, 1)
    first = session.take(Request([7, 8], Address(0, 0, 0), 2, 60, SAMPLING))
    waits = session.take(Request([9], Address(0, 1, 0), 1, 60, SAMPLING))
    session.step()
    session.drop(first)
    session.drop(waits)
    assert session.is_idle
    assert session.step() == []
    again = Request([7, 8], Address(0, 0, 0), 2, 60, SAMPLING)
    assert completed(session, again) == completed(opened(model, 1), again)
