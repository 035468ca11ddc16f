"""Clients of OpenAI's protocol get what the sampler draws, and mistakes get OpenAI's errors."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.clients import Guest
from grpo_eqx.environments.endpoint.exchange import Exchange
from grpo_eqx.environments.endpoint.server import is_loopback, listening, served
from grpo_eqx.evaluation.served_model import ServedModel
from grpo_eqx.generation.sampling import GREEDY

KEY, MODEL = "a secret", "tiny_qwen2"
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Served:
    """A server of the embedded model."""

    def __init__(self, address: str, exchange: Exchange, model: ServedModel):
        self.address, self.exchange, self.model = address, exchange, model
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 60, **fields}
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=60)

    def post(
        self, path: str, body: bytes, key: str | None = KEY
    ) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        connection = self.connect()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read()), answer.headers
        connection.close()
        return found


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(MODEL, {}, lambda line: None)


@pytest.fixture(scope="module")
def server(model: ServedModel) -> Iterator[Served]:
    exchange, ended = Exchange(model.session(8, 256), most_waiting=12), threading.Event()
    guest = Guest(exchange.session.max_length)
    endpoint = Endpoint(
        exchange, ChatFormats(model.tokenizer), MODEL, lambda key: guest if key == KEY else None
    )
    thread = threading.Thread(target=exchange.run, args=(ended.is_set,))
    thread.start()
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        yield Served(address, exchange, model)
        ended.set()
        thread.join()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=5)


def test_a_chat_gets_what_the_sampler_draws(server: Served) -> None:
    made = server.chat(
        temperature=0, logprobs=True, extra_body={"return_token_ids": True}, max_tokens=200
    )
    tokenizer = server.model.tokenizer
    (prompt,) = tokenizer.encode_prompts([Prompt(MESSAGES, {})])
    (choice,) = made.choices
    assert made.prompt_token_ids == prompt
    sampler = server.model.sampler
    sampler.set_weights(server.model.model, 0)
    begun = [Trajectory(prompt, Address(0, n, 0)) for n in range(8)]
    ids = sampler.submit(begun, GREEDY).result().trajectories[0].ids.tolist()
    assert choice.token_ids == ids
    assert choice.finish_reason == "stop"
    assert choice.message.content == tokenizer.decode_completions([ids])[0]
    assert [each.logprob for each in choice.logprobs.content] == [0.0] * len(ids)
    assert made.usage.prompt_tokens == len(prompt)
    assert made.usage.completion_tokens == len(ids)
    assert server.client.models.list().data[0].id == MODEL


def test_a_seed_decides_the_draws(server: Served) -> None:
    first, again, other = (
        [x.message.content for x in server.chat(n=6, seed=seed).choices] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len({*first}) > 1


@pytest.mark.parametrize("stop", ["#", "\n###", ["zzz", "=", "####"]])
def test_a_stop_string_ends_the_text_before_it(server: Served, stop: str | list[str]) -> None:
    fields: dict[str, Any] = {"temperature": 0, "extra_body": {"return_token_ids": True}}
    (whole,) = server.chat(**fields).choices
    (cut,) = server.chat(stop=stop, **fields).choices
    text, stops = whole.message.content, [stop] if isinstance(stop, str) else stop
    end = min(text.find(each) for each in stops if each in text)
    assert cut.message.content == text[:end]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    decode = server.model.tokenizer.decode_completions
    assert any(each in decode([cut.token_ids])[0] for each in stops)
    assert not any(each in decode([cut.token_ids[:-1]])[0] for each in stops)


@pytest.mark.parametrize("stop", [None, "####"])
def test_a_stream_is_the_same_in_parts(server: Served, stop: str | None) -> None:
    fields: dict[str, Any] = {"seed": 4, "n": 2, "stop": stop, "logprobs": True, "max_tokens": 60}
    whole = server.chat(**fields)
    texts, logps, reasons = ["", ""], [[], []], [None, None]
    *parts, last = server.chat(stream=True, stream_options={"include_usage": True}, **fields)
    for part in parts:
        (choice,) = part.choices
        texts[choice.index] += choice.delta.content
        reasons[choice.index] = choice.finish_reason
        if choice.logprobs is not None:
            logps[choice.index] += [x.logprob for x in choice.logprobs.content]
    assert len(parts) >= 4  # a first one of each, and one for each time that decoding pauses
    assert texts == [each.message.content for each in whole.choices]
    assert reasons == [each.finish_reason for each in whole.choices]
    assert logps == [[x.logprob for x in each.logprobs.content] for each in whole.choices]
    assert last.usage == whole.usage


def test_texts_and_tokens_are_continued(server: Served) -> None:
    complete = server.client.completions.create
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 7, "temperature": 0, "logprobs": 1}
    both = complete(prompt=["1 + 1", "2"], **fields)
    assert [each.index for each in both.choices] == [0, 1]
    for text, choice in zip(["1 + 1", "2"], both.choices, strict=True):
        ids = server.model.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        (alone,) = complete(prompt=ids, **fields).choices
        assert alone.text == choice.text
        assert "".join(alone.logprobs.tokens) == alone.text
        streamed = complete(prompt=text, stream=True, **fields)
        assert "".join(part.choices[0].text for part in streamed) == choice.text


MISTAKES: dict[str, tuple[int, str]] = {
    "[1]": (400, "not a JSON object"),
    '{"messages": [': (400, "not JSON"),
    "[" * 100_000: (400, "not JSON"),
    '{"model": "gpt-5", "messages": [{"role": "user", "content": "a"}]}': (404, "does not exist"),
    "{}": (400, "give a list of messages"),
    '{"messages": []}': (400, "at least one"),
    '{"messages": [{"content": "a"}]}': (400, "messages like"),
    '{"messages": [{"role": "user", "content": "a"}], "n": 0}': (400, "n is 0"),
    '{"messages": [{"role": "user", "content": "a"}], "n": 1000}': (400, "at most 128"),
    '{"messages": [{"role": "user", "content": "a"}], "temperature": "x"}': (400, "a number"),
    '{"messages": [{"role": "user", "content": "a"}], "temperature": -1}': (400, "not negative"),
    '{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}': (400, "top_p"),
    '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 999}': (400, "room for 256"),
    '{"messages": [{"role": "user", "content": "a"}], "stop": [1]}': (400, "stop is"),
    '{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 1}}': (400, "logit_bias"),
    '{"messages": [{"role": "user", "content": "a"}], "tools": [1]}': (400, "list of functions"),
    '{"messages": [{"role": "user", "content": "a"}], "stream": 3}': (400, "true or false"),
}


@pytest.mark.parametrize("body", MISTAKES, ids=lambda body: body[-40:])
def test_mistakes_get_openais_errors(server: Served, body: str) -> None:
    status, said, _ = server.post("/v1/chat/completions", body.encode())
    assert status == MISTAKES[body][0]
    assert MISTAKES[body][1] in said["error"]["message"]
    assert {*said["error"]} == {"message", "type", "param", "code"}


def test_clients_without_the_key_are_refused(server: Served) -> None:
    for key in (None, "another", "ä"):
        assert server.post("/v1/chat/completions", b"{}", key)[0] == 401
    wrong = openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_long_bodies_are_refused(server: Served) -> None:
    status, said, _ = server.post("/v1/completions", b'{"prompt": "' + b"a" * 10_000_000)
    assert status == 413
    assert "4 MiB" in said["error"]["message"]
    assert server.post("/v1/nothing", b"{}")[0] == 404
    assert server.post("/health", b"{}")[0] == 405


def test_clients_that_hang_up_leave_nothing_behind(server: Served) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 200, "n": 8, "temperature": 5.0})
    for half in (False, True):
        connection = server.connect()
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {KEY}")
        connection.putheader("Content-Length", str(len(body) + half))
        connection.endheaders(body.encode())
        connection.close()
    for _ in range(600):
        if server.exchange.num_open == 0 and server.exchange.session.is_idle:
            break
        time.sleep(0.05)
    assert server.exchange.num_open == 0
    assert server.chat(temperature=0).choices[0].finish_reason == "stop"


def test_too_many_requests_are_refused(server: Served) -> None:
    with pytest.raises(openai.RateLimitError):
        server.chat(n=13, temperature=5.0)
    assert server.chat(temperature=0).choices[0].finish_reason == "stop"


def test_requests_under_way_at_the_end_are_told(model: ServedModel) -> None:
    exchange, ended = Exchange(model.session(8, 256)), threading.Event()
    endpoint = Endpoint(exchange, ChatFormats(model.tokenizer), MODEL, lambda _: Guest(256))
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        here = Served(address, exchange, model)
        ended.set()
        exchange.run(ended.is_set)
        with pytest.raises(openai.InternalServerError, match="is shutting down"):
            here.chat()


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.1.2.3")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com")))
