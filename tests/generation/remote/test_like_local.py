"""Servers around our own endpoint sample what the run's own devices would."""

import contextlib
import dataclasses
import random
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.clients import Guest
from grpo_eqx.environments.endpoint.exchange import Exchange
from grpo_eqx.evaluation.served_model import ServedModel
from grpo_eqx.generation import LocalSampler, Sampling, Stopping
from grpo_eqx.generation.open_session import Drawn, Request
from grpo_eqx.generation.remote import RemoteOptions, RemoteSampler, request_seed
from grpo_eqx.generation.sampler import Responder
from grpo_eqx.models import pretrained
from grpo_eqx.models.interface import CausalLM

from .fake_engines import ENGINES, FakeEngine, Kind, Made, running

MODEL, LONGEST, VERSION, P, G = "tiny_qwen2", 28, 7, 8, 2
QUESTIONS = [f"Tom has {n} apples and buys {n + 2} more. How many has he?" for n in range(P)]
SAMPLING, SEED = Sampling(temperature=2.0), 0
ADDRESSES = [Address(5, p, n) for p in range(P) for n in range(G)]
KNOWN = {request_seed(SEED, x, n): (x, n) for x in ADDRESSES for n in range(LONGEST)}
"""Address and number of tokens of each seed that a request may have."""


class Addressed(Exchange):
    """Draws with the addresses that seeds stand for."""

    async def complete(self, request: Request) -> AsyncGenerator[Drawn, None]:
        address, num_tokens = KNOWN[request.address.step]
        start = len(request.ids) - num_tokens
        own = dataclasses.replace(request, address=address, start=start)
        async with contextlib.aclosing(super().complete(own)) as parts:
            async for each in parts:
                yield each


class Around:
    """Our own endpoint, whose weights are loaded as those of an engine are."""

    def __init__(self, model: ServedModel, before: CausalLM):
        model.sampler.set_weights(before, 0)
        self._model = model
        self.exchange = Addressed(model.sampler.open_session(8, 128))
        guest = Guest(self.exchange.session.max_length)
        endpoint = Endpoint(self.exchange, ChatFormats(model.tokenizer), MODEL, lambda _: guest)
        transport = httpx.ASGITransport(app=endpoint.app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://endpoint")

    async def complete(self, fields: Mapping[str, Any]) -> Made:
        body = {**fields, "model": MODEL, "return_token_ids": True, "logprobs": 1}
        answer = await self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        logps = choice["logprobs"]["token_logprobs"]
        return Made(choice["token_ids"], logps, choice["finish_reason"])

    def load(self, folder: str) -> None:
        assert len([*Path(folder).glob("model-*.safetensors")]) > 2
        sampler = self._model.sampler
        sampler.set_weights(pretrained.from_pretrained(folder, sampler.mesh), 0)
        self.exchange.session = sampler.open_session(8, 128)


class Scripted(Responder):
    """Replies that numbers and turns decide, in any order."""

    def __init__(self, vocab_size: int) -> None:
        self.rng, self.vocab_size = random.Random(0), vocab_size
        self.turns = dict.fromkeys(range(P * G), 0)
        self.asked: list[int] = []

    def take(self, number: int, trajectory: Trajectory) -> None:
        assert trajectory.written[-1]
        self.turns[number] += 1
        self.asked.append(number)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        self.rng.shuffle(self.asked)
        count = self.rng.randint(min(wait, len(self.asked)), len(self.asked))
        ready, self.asked = self.asked[:count], self.asked[count:]
        return [(number, self._reply(number)) for number in ready]

    def _reply(self, number: int) -> list[int] | None:
        rng = random.Random(f"{number} {self.turns[number]}")
        if self.turns[number] > number % 4:
            return None
        return [rng.randrange(self.vocab_size) for _ in range(rng.choice([1, 3, 9, 20]))]


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(MODEL, {}, lambda line: None)


@pytest.fixture(scope="module", params=ENGINES)
def engines(request: pytest.FixtureRequest, model: ServedModel) -> Iterator[list[FakeEngine]]:
    """Two servers that begin with other weights."""
    kind: Kind = request.param
    before = jax.tree.map(lambda x: x * 0.5, model.model)
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            around = Around(model, before)
            thread = threading.Thread(target=around.exchange.run, args=(ended.is_set,))
            thread.start()
            stack.callback(thread.join)
            engine = FakeEngine(kind, around.complete, around.load)
            found.append(stack.enter_context(running(engine)))
        stack.callback(ended.set)
        yield found


@pytest.fixture
def remote(
    engines: list[FakeEngine], model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteSampler]:
    monkeypatch.setattr(pretrained, "_FILE_BYTES", 200_000)  # so that there are several
    stopping = Stopping.of_ids(model.tokenizer.eos_ids, model.model.config.vocab_size)
    options = RemoteOptions(
        sampling=SAMPLING, max_completion_length=LONGEST, stopping=stopping, seed=SEED,
        end_ids=model.tokenizer.eos_ids, dtype="float32",
    )  # fmt: skip
    made = RemoteSampler([each.address for each in engines], tmp_path, options)
    made.set_weights(model.model, VERSION)
    yield made
    made.close()


@pytest.fixture(scope="module")
def local(model: ServedModel) -> LocalSampler:
    options = dataclasses.replace(
        model.sampler.options, max_completion_length=LONGEST, sampling=SAMPLING, seed=SEED
    )
    made = LocalSampler(options, model.sampler.mesh)
    made.set_weights(model.model, VERSION)
    return made


def begun(model: ServedModel) -> list[Trajectory]:
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    prompts = model.tokenizer.encode_prompts([Prompt(each, {}) for each in messages])
    return [Trajectory(prompts[x.prompt], x) for x in ADDRESSES]


def check_same(found: list[Trajectory], expected: list[Trajectory]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt_ids, one.address) == (other.prompt_ids, other.address)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.written.tolist() == other.written.tolist()
        assert one.versions.tolist() == other.versions.tolist()
        assert (one.finish_reason, one.awaits_reply) == (other.finish_reason, False)
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, rtol=0, atol=1e-4)
        assert (one.ids.dtype, one.sampler_logps.dtype) == (np.int32, np.float32)
    assert {each.finish_reason for each in found} == {"stop", "length"}


def test_completions_are_those_of_the_local_sampler(
    remote: RemoteSampler, local: LocalSampler, engines: list[FakeEngine], model: ServedModel
) -> None:
    expected = local.submit(begun(model)).result()
    found = remote.submit(begun(model)).in_background().result()
    check_same(found.trajectories, expected.trajectories)
    assert found.counts.tokens == expected.counts.tokens
    assert all(each.folders[-1].endswith(f"v{VERSION}") for each in engines)
    # The weights before would have drawn others.
    remote.set_weights(jax.tree.map(lambda x: x * 0.5, model.model), VERSION)
    others = remote.submit(begun(model)).result().trajectories
    assert [x.ids.tolist() for x in others] != [x.ids.tolist() for x in expected.trajectories]


@pytest.mark.parametrize("in_background", [False, True])
def test_dialogues_are_those_of_the_local_sampler(
    remote: RemoteSampler, local: LocalSampler, model: ServedModel, in_background: bool
) -> None:
    """With the same replies, whichever comes first, and completions that begin with tokens."""
    size = model.model.config.vocab_size
    rng = np.random.default_rng(0)
    given = [
        each if n % 3 else each.extended(rng.integers(size, size=1 + n), version=VERSION)
        for n, each in enumerate(begun(model))
    ]
    expected = local.submit(given, responder=Scripted(size)).result().trajectories
    pending = remote.submit(given, responder=Scripted(size))
    found = (pending.in_background() if in_background else pending).result().trajectories
    check_same(found, expected)
    assert max(np.diff(each.written).sum() for each in found) >= 4


def test_prompts_that_fill_a_batch_up_are_not_sent(
    remote: RemoteSampler, engines: list[FakeEngine], model: ServedModel
) -> None:
    before = sum(len(each.bodies) for each in engines)
    problems = [None if p else Prompt(QUESTIONS[p], {}) for p in range(P)]
    made = remote.submit(begun(model), problems=problems).result().trajectories
    assert sum(len(each.bodies) for each in engines) == before + G
    assert all(each.is_finished and len(each) == 1 for each in made[G:])
