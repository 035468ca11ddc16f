"""Calls that a model writes reach clients in OpenAI's form, and answers reach the model."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.clients import Guest
from grpo_eqx.environments.endpoint.exchange import Exchange
from grpo_eqx.environments.endpoint.server import listening, served
from grpo_eqx.generation.open_session import Drawn, OpenSession, Request
from tests.environments.templates import FORGETS_CALLS, HERMES, tokenizer_with

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
QUESTION: list[Any] = [{"role": "user", "content": "1 + 2?"}]


class Scripted(OpenSession):
    """Draws what a test says, three tokens at a time."""

    max_length = 1000

    def __init__(self, turns: list[list[int]]):
        self.turns, self.asked = turns, list[Request]()
        self.left: dict[int, list[int]] = {}

    @property
    def is_idle(self) -> bool:
        return not self.left

    def take(self, request: Request) -> int:
        self.asked.append(request)
        self.left[len(self.asked)] = self.turns.pop(0)
        return len(self.asked)

    def drop(self, number: int) -> None:
        del self.left[number]

    def step(self) -> list[Drawn]:
        drawn = []
        for number, ids in list(self.left.items()):
            now, self.left[number] = ids[:3], ids[3:]
            if not self.left[number]:
                del self.left[number]
            reason = None if number in self.left else "stop"
            drawn.append(Drawn(number, np.array(now), np.full(len(now), -0.5), reason))  # type: ignore[arg-type]
        return drawn


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, Scripted]]:
    """A client, and a session that draws the texts of the test's parameter."""
    tokenizer = tokenizer_with(HERMES)
    encode = tokenizer.tokenizer
    turns = [encode(text, add_special_tokens=False)["input_ids"] for text in request.param]
    session, ended = Scripted(turns), threading.Event()
    exchange = Exchange(session)
    thread = threading.Thread(target=exchange.run, args=(ended.is_set,))
    thread.start()
    guest = Guest(session.max_length)
    endpoint = Endpoint(exchange, ChatFormats(tokenizer), "m", lambda _: guest)
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0), session
    ended.set()
    thread.join()


@pytest.mark.parametrize("script", [[CALL, "It is 3.<|im_end|>"]], indirect=True)
def test_a_dialogue_with_a_tool(script: tuple[openai.OpenAI, Scripted]) -> None:
    client, session = script
    create = client.chat.completions.create
    (choice,) = create(model="m", messages=QUESTION, tools=TOOLS).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*QUESTION, choice.message.model_dump(exclude_none=True), answer]
    (choice,) = create(model="m", messages=messages, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is 3.")
    first, second = (session_ids.ids for session_ids in session.asked)
    text = tokenizer_with(HERMES).tokenizer.decode(list(second))
    assert CALL in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert list(second[: len(first)]) == list(first)


@pytest.mark.parametrize("script", [[CALL]], indirect=True)
def test_a_streamed_call_comes_as_a_whole(script: tuple[openai.OpenAI, Scripted]) -> None:
    client, _ = script
    parts = client.chat.completions.create(
        model="m", messages=QUESTION, tools=TOOLS, stream=True, logprobs=True
    )
    first, last = (part.choices[0] for part in parts)
    assert first.delta.role == "assistant"
    (call,) = last.delta.tool_calls or []
    assert call.function is not None
    assert (call.index, call.function.name) == (0, "add")
    assert last.finish_reason == "tool_calls"
    assert last.logprobs is not None
    assert {each.logprob for each in last.logprobs.content or []} == {-0.5}


@pytest.mark.parametrize("script", [[CALL]], indirect=True)
def test_without_tools_a_call_is_text(script: tuple[openai.OpenAI, Scripted]) -> None:
    client, _ = script
    made = client.chat.completions.create(
        model="m", messages=QUESTION, tools=TOOLS, tool_choice="none"
    )
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].finish_reason == "stop"


def test_a_template_without_tools_is_named() -> None:
    chat = ChatFormats(tokenizer_with(FORGETS_CALLS))
    endpoint = Endpoint(Exchange(Scripted([])), chat, "m", lambda _: Guest(1000))
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="leaves out the model's calls"):
            client.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)


HALF = CALL.replace('"a": 1', '"a": "\\ud83d"')


@pytest.mark.parametrize("script", [[HALF, "It is 3.<|im_end|>"]], indirect=True)
def test_half_a_character_is_sent_and_taken_back(script: tuple[openai.OpenAI, Scripted]) -> None:
    client, _ = script
    create = client.chat.completions.create
    (choice,) = create(model="m", messages=QUESTION, tools=TOOLS).choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["a"] == "\ud83d"
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "\ud83d"}
    messages = [*QUESTION, choice.message.model_dump(exclude_none=True), answer]
    body = json.dumps({"messages": messages, "tools": TOOLS})
    made = httpx.post(f"{client.base_url}chat/completions", content=body, timeout=60)
    assert made.json()["choices"][0]["message"]["content"] == "It is 3."
