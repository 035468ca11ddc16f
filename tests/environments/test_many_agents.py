"""Many agents at once, and agents that misbehave: no token is lost, and none is another's."""

import asyncio
import contextlib
import http.client
import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments import Harness, HarnessEndpoint
from grpo_eqx.environments.endpoint.recorder import MOST_BRANCHES
from grpo_eqx.environments.harness import HarnessSampler
from grpo_eqx.evaluation.served_model import ServedModel
from grpo_eqx.generation.sampler import Sampled
from tests.environments.test_harness import Rollouts, ask

P, G, REQUESTS = 32, 8, 4


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("tiny_qwen2", {}, lambda line: None)


def client_of(endpoint: HarnessEndpoint) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    return httpx.AsyncClient(
        base_url=endpoint.base_url, headers=headers, timeout=None, limits=limits, verify=False
    )


async def answered(client: httpx.AsyncClient, messages: list[Any], **fields: Any) -> str:
    answer = await client.post("chat/completions", json={"messages": messages, **fields})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def sampled(model: ServedModel, harness: Harness, prompts: int, samples: int) -> Sampled:
    """Has agents work on problems, each of which has a number."""
    cfg = GRPOConfig(
        prompts_per_step=prompts, num_generations=samples, max_prompt_length=100,
        max_completion_length=300,
    ).resolved()  # fmt: skip
    sampler = HarnessSampler(harness, model.sampler, model.tokenizer, cfg, (64, 400))
    sampler.set_weights(model.model, 5)
    problems = [Prompt(f"Number {p}.", {"number": p}) for p in range(prompts)]
    begun = [Trajectory([1], Address(2, p, g)) for p in range(prompts) for g in range(samples)]
    with sampler:
        return sampler.submit(begun, problems=problems).result()


@pytest.mark.slow
def test_hundreds_of_agents_at_once_get_their_own_tokens(model: ServedModel) -> None:
    under_way = most = 0

    async def talks(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        messages = [{"role": "user", "content": f"Number {row['number']}."}]
        async with client_of(endpoint) as client:
            for _ in range(REQUESTS):
                text = await answered(client, messages, max_tokens=8)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"Number {row['number']}!"},
                ]
        under_way -= 1
        return float(row["number"])

    made = sampled(model, talks, P, G)
    assert most > 200
    assert made.acted is not None
    assert made.acted.columns["harness_reward"] == [float(p) for p in range(P) for _ in range(G)]
    assert made.acted.counts.requests == P * G * REQUESTS
    assert made.acted.counts.forks == made.acted.counts.drifted_tokens == 0
    decode = model.tokenizer.tokenizer.decode
    for n, each in enumerate(made.trajectories):
        assert each.address == Address(2, n // G, n % G)
        assert set(each.versions[each.written].tolist()) == {5}
        read = decode(each.ids[~each.written])
        assert read.count(f"Number {n // G}!") == read.count("Number") == REQUESTS - 1
        assert f"Number {n // G}." in decode(each.prompt_ids)
        parts = np.flatnonzero(np.diff(each.written.astype(int), prepend=0) == 1)
        assert len(parts) == REQUESTS
    assert len({tuple(each.ids.tolist()) for each in made.trajectories}) == P * G


def misbehaves(endpoint: HarnessEndpoint) -> Counter[int]:
    """Sends what a server must refuse; returns the statuses of the answers."""
    address, statuses = urlsplit(endpoint.base_url), Counter[int]()
    good = json.dumps({"messages": [{"role": "user", "content": "Hm."}], "max_tokens": 100})
    requests: list[tuple[str, str, bytes]] = [
        ("/v1/chat/completions", endpoint.api_key, b'{"messages": ['),
        ("/v1/chat/completions", endpoint.api_key, b"a" * 10_000_000),
        ("/v1/chat/completions", "of another", good.encode()),
        ("/v1/nothing", endpoint.api_key, good.encode()),
    ]
    for path, key, body in requests:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        with contextlib.suppress(OSError):  # it may not read all
            connection.request("POST", path, body, {"Authorization": f"Bearer {key}"})
            statuses[connection.getresponse().status] += 1
        connection.close()
    for length in (len(good), len(good) + 1):  # hangs up, after half a request or a whole one
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {endpoint.api_key}")
        connection.putheader("Content-Length", str(length))
        connection.endheaders(good.encode())
        connection.close()
    return statuses


@pytest.mark.slow
def test_agents_that_misbehave_change_nothing(model: ServedModel) -> None:
    statuses = Counter[int]()

    async def calm(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        messages = [{"role": "user", "content": f"Number {row['number']}."}]
        async with client_of(endpoint) as client:
            return float(len(await answered(client, messages, max_tokens=16)))

    async def wild(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        reward = await calm(endpoint, row)
        found = await asyncio.to_thread(misbehaves, endpoint)
        for status, number in found.items():
            statuses[status] += number
        return reward

    own, expected = (sampled(model, harness, 2, 4) for harness in (wild, calm))
    for each, like in zip(own.trajectories, expected.trajectories, strict=True):
        assert each.ids.tolist() == like.ids.tolist()
    assert statuses.keys() >= {400, 401, 404}
    assert statuses[400] == statuses[401] == statuses[404] == 8


@pytest.mark.slow
@pytest.mark.parametrize("each", [300, pytest.param(2500, marks=pytest.mark.long)])
def test_thousands_of_requests_are_answered_or_refused(each: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "1 + 1?"}]})

    def floods(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        address = urlsplit(endpoint.base_url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        number = 0
        for _ in range(each):
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            answer.read()
            number += answer.status == 200
        connection.close()
        return float(number)

    made = Rollouts(floods).made()
    assert made.acted is not None
    answered = min(each, MOST_BRANCHES)
    assert made.acted.columns["harness_reward"] == [answered] * 4
    all_of = [x for own in made.trajectories for x in own.all_of_sample]
    assert len(all_of) == 4 * answered
    assert len({tuple(own.ids.tolist()) for own in all_of}) == 1


def test_a_key_gets_no_answers_once_its_run_has_ended() -> None:
    first = list[HarnessEndpoint]()
    refused = list[int]()

    async def run(endpoint: HarnessEndpoint, row: dict[str, Any]) -> float:
        text = await asyncio.to_thread(ask, endpoint, row)
        if not first:
            first.append(endpoint)
            return float(len(text))
        while True:  # until the first one has ended
            async with client_of(first[0]) as client:
                answer = await client.get("models")
            if answer.status_code == 401:
                refused.append(answer.status_code)
                return float(len(text))

    Rollouts(run).made()
    assert refused == [401] * 3
