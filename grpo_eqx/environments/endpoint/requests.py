"""Bodies of requests, read and checked: OpenAI's fields, and vLLM's `return_token_ids`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import UserError, shown
from grpo_eqx.data.records import is_message
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.rewards.contract import joined_blocks

_MOST_CHOICES, _MOST_STOPS = 128, 4
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "top_k": (None, -1, 0),
}
"""Fields that change what is drawn, by the values that do not."""


class RequestError(Exception):
    """A request that is refused."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        """**Arguments:**

        - `status`: HTTP status.
        - `message`: the reason.
        - `param`: the field to blame.
        - `code`: OpenAI's name of the reason.
        """
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Completions that a request asks for, and how."""

    messages: Sequence[Mapping[str, Any]] | None = None
    """Conversation to continue, as chat templates read it."""
    prompts: Sequence[str | Sequence[int]] = ()
    """Texts or tokens to continue, where there is no conversation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of functions."""
    n: int = 1
    """Completions of each prompt."""
    max_tokens: int | None = None
    """`None`: as many as fit."""
    sampling: Sampling
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    with_ids: bool = False
    """Whether the answer has the tokens of prompt and completions."""


def read_chat(body: Any, model: str) -> Wanted:
    """Reads the body of a request to `/v1/chat/completions`; raises `RequestError`."""
    fields = _fields(body, model)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", messages, "a list of messages, at least one")
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise _invalid("tools", tools, 'a list of functions, each {"type": "function", ...}')
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return Wanted(
        messages=_named([as_message(each) for each in messages]),
        tools=[] if fields.get("tool_choice") == "none" else tools,
        max_tokens=_count(fields, limit, None),
        logprobs=_flag(fields, "logprobs"),
        **_common(fields),
    )


def read_text(body: Any, model: str) -> Wanted:
    """Reads the body of a request to `/v1/completions`; raises `RequestError`."""
    fields = _fields(body, model)
    prompt = fields.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(x, str) or _are_ids(x) for x in prompts)
    ):
        raise _invalid("prompt", prompt, "a text, a list of texts, or tokens")
    if len(prompts) * (_count(fields, "n", 1) or 1) > _MOST_CHOICES:
        raise RequestError(400, f"a request has at most {_MOST_CHOICES} choices", "prompt")
    return Wanted(
        prompts=prompts,
        max_tokens=_count(fields, "max_tokens", 16),
        logprobs=fields.get("logprobs") is not None,
        **_common(fields),
    )


def _fields(body: Any, model: str) -> dict[str, Any]:
    """Returns the fields of a body for the model; raises `RequestError`."""
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object")
    if body.get("model", model) != model:
        raise RequestError(
            404, f"the model {shown(body['model'])} does not exist: this server has {model!r}",
            "model", "model_not_found",
        )  # fmt: skip
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise RequestError(400, f"{name} {shown(body[name])} is not supported", name)
    return body


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what both kinds of requests have."""
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(x, str) and x for x in stops)
    ):
        raise _invalid("stop", stop, f"a text, or up to {_MOST_STOPS} texts")
    n = _count(fields, "n", 1)
    assert n is not None
    if n > _MOST_CHOICES:
        raise _invalid("n", n, f"at most {_MOST_CHOICES}")
    seed = fields.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise _invalid("seed", seed, "an integer")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _invalid("stream_options", options, "an object")
    return {
        "n": n, "stop": stops, "seed": seed, "sampling": _sampling(fields),
        "stream": _flag(fields, "stream"), "with_usage": _flag(options, "include_usage"),
        "with_ids": _flag(fields, "return_token_ids"),
    }  # fmt: skip


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    given: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p"):
        if (value := fields.get(name)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _invalid(name, value, "a number")
        given[name] = float(value)
    try:
        return Sampling(**given)
    except UserError as error:
        raise RequestError(400, str(error)) from error


def _named(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with the names of the tools that answer, which clients tell by ids."""
    names = dict[Any, str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            message["name"] = names.get(str(message.get("tool_call_id")), "tool")
    return messages


def as_message(each: Any) -> dict[str, Any]:
    """Returns a message as chat templates read it; raises `RequestError` for what is none."""
    if not isinstance(each, dict) or not isinstance(each.get("role"), str):
        raise _invalid("messages", each, 'messages like {"role": "user", "content": "..."}')
    content = joined_blocks(each.get("content") or "")
    message = {**each, "content": content}
    if calls := each.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    if not is_message(message):
        raise _invalid("messages", each, "messages with a role and a text")
    # Half a character, as in an escape of JSON, has no tokens.
    whole: dict[str, Any] = json.loads(
        json.dumps(message, ensure_ascii=False).encode(errors="replace")
    )
    return whole


def _call(call: Any) -> dict[str, Any]:
    """Returns a call with its arguments as an object, which chat templates render."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        name = str(function["name"])
        return {**call, "function": {**function, "name": name, "arguments": arguments}}
    except (TypeError, KeyError, ValueError) as error:
        raise _invalid("messages", call, "calls with a function and its arguments") from error


def _is_function(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _count(fields: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise _invalid(name, value, "an integer above 0")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False):
        raise _invalid(name, value, "true or false")
    return bool(value)


def _invalid(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(400, f"{name} is {shown(value)}: give {expected}", name)
