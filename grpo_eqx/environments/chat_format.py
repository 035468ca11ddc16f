"""The format in which a chat template writes dialogues with tools, found by rendering probes."""

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.data.prompts import Conversation
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.tools import Schema

Message = dict[str, Any]
_TEXT = {"name": "text"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}


class _Format(NamedTuple):
    """Fields of transformers' response templates; END stands for the ends of a turn."""

    calls: Mapping[str, Any]
    thought: Mapping[str, Any] = _THOUGHT
    thought_name: str = "reasoning_content"
    """The name by which chat templates read thoughts."""
    content: Mapping[str, Any] = {"close_pattern": r"END\s*"}

    def response_template(self, starts: Sequence[str], ends: Sequence[str]) -> Mapping[str, Any]:
        """**Arguments:**

        - `starts`: texts after one of which a turn starts.
        - `ends`: texts that end it.
        """
        end = "(?:" + "|".join(map(re.escape, ends)) + ")"
        fields = {
            self.thought_name: self.thought,
            "tool_calls": {**self.calls, "repeats": True},
            "content": self.content,
        }
        return {
            "defaults": {"role": "assistant"},
            "start_anchor_pattern": "|".join(map(re.escape, starts)),
            "fields": {
                name: {**field, "close_pattern": field["close_pattern"].replace("END", end)}
                for name, field in fields.items()
            },
        }


_FORMATS = (
    # JSON in tags, as Hermes and Qwen 2.5 and 3 write it.
    _Format(
        {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    # Tags for each parameter, as Qwen 3.5 writes them.
    _Format(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
                "value_parser": _TEXT,
            },
            "transform": _NAMED,
        }
    ),
    # Tags for keys and values, as GLM 4 writes them.
    _Format(
        {
            "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
            "close_pattern": r"</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": (
                    r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                ),
                "value_parser": _TEXT,
            },
            "transform": _NAMED,
        }
    ),
    # Bare JSON, as Llama 3 writes it.
    _Format(
        {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}END\s*",
            "content": "json",
            "transform": _NAMED,
        }
    ),
    # Channels, as GPT-OSS writes them.
    _Format(
        {
            "open_pattern": (
                r"to=functions\.(?P<name>[^\s<]+)<\|channel\|>commentary\s+json<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>\s*",
            "content": "json",
            "transform": _NAMED,
        },
        {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>\s*"},
        "thinking",
        {"open": "<|channel|>final<|message|>", "close_pattern": r"END\s*"},
    ),
    # Calls and thoughts in Gemma 4's tags.
    _Format(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": _NAMED,
        },
        {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"},
    ),
    # Lists of calls in Python, as LFM 2 and 2.5 write them.
    _Format(
        {
            "open": "<|tool_call_start|>",
            "close_pattern": r"<\|tool_call_end\|>\s*",
            "content": "python-call-list",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
        thought_name="thinking",
    ),
)
_USER: Message = {"role": "user", "content": "dummy"}
_NAME = "probe_name"
_ANSWER: Message = {"role": "tool", "name": _NAME, "content": "probe_answer"}
_THOUGHTFUL = "<think>\nprobe_thought\n</think>\n\nprobe_content"
_PROBE = {"probe_text": "a probe", "probe_number": 7}
_PROBE_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "probe_text": {"type": "string", "description": "A text."},
                "probe_number": {"type": "integer", "description": "A number."},
            },
            "required": ["probe_text", "probe_number"],
        },
    },
}


class Parsed(NamedTuple):
    """A turn of the model."""

    message: Message
    """As chat templates read it; `tool_calls` are its calls, if any."""

    @property
    def calls(self) -> list[Message]:
        """The functions that it calls, each with `name` and `arguments`."""
        return [call["function"] for call in self.message.get("tool_calls", [])]


class ChatFormat:
    """The format of a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        has_tools: bool = True,
        has_users: bool = False,
        may_rewrite: bool = False,
    ):
        """**Arguments:**

        - `tokenizer`: the tokenizer.
        - `has_tools`: whether tools answer turns.
        - `has_users`: whether messages of the user answer turns, as in games.
        - `may_rewrite`: whether the template may render turns otherwise once others follow them, as
          where each request has a whole dialogue.

        Raises `UserError` for a template in which such dialogues cannot be written.
        """
        self.tokenizer, self._response = tokenizer, None
        self._content = ""
        """Content of made-up turns."""
        self._before: dict[str, list[int]] = {}
        if has_users:
            self._check_prefix({"role": "assistant"}, {"role": "user", "content": "probe_answer"})
        if has_tools:
            self._check_tools()
            with contextlib.suppress(*[UserError] * may_rewrite):
                self._check_prefix(_turn(_NAME, _PROBE), _ANSWER)
            own = getattr(tokenizer.tokenizer, "response_template", None)
            self._response = self._found() if own is None else own

    def suffix_ids(self, messages: Sequence[Message], *, with_end: bool = False) -> list[int]:
        """Returns what follows the end token of a turn: answers, and the start of the next turn.

        As TRL computes it: a made-up dialogue that ends with a call is cut, behind its last end
        token, from the same dialogue with the answers.

        **Arguments:**

        - `messages`: the answers, of role `tool` or `user`.
        - `with_end`: whether the end token comes first, for a turn that has none.
        """
        first = messages[0]
        turn: Message = {"role": "assistant"}
        if first["role"] == "tool":
            turn = _turn(first["name"], {})
        turn["content"] = self._content
        before = self._ids_before(turn)
        whole = self._ids([_USER, turn, *messages], opens=True)
        start, ends = self._start, set(self.tokenizer.eos_ids)
        own = [i for i, token in enumerate(before) if i >= start and token in ends]
        if own:
            before = before[: own[-1] + 1]
        elif whole[len(before) : len(before) + 1] and whole[len(before)] in ends:
            before = [*before, whole[len(before)]]  # which the model has written
        if whole[: len(before)] != before:
            raise UserError(_REWRITES)
        return whole[len(before) - (with_end and before[-1] in ends) :]

    @functools.cached_property
    def _start(self) -> int:
        """Number of tokens before a made-up turn."""
        return len(self._ids([_USER], opens=False))

    def _ids_before(self, turn: Message) -> list[int]:
        """Returns a made-up dialogue up to a turn; answers have few turns before them."""
        known = repr(turn)
        if known not in self._before:
            self._before[known] = self._ids([_USER, turn], opens=False)
        return self._before[known]

    def ends(self, turn: Sequence[int]) -> bool:
        """Returns whether a turn, in tokens, has an end token."""
        return bool(turn) and turn[-1] in self.tokenizer.eos_ids

    def parse(self, ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Schema]) -> Parsed:
        """Reads a turn; what cannot be read as calls is plain text.

        **Arguments:**

        - `ids`: tokens of the turn, with its end token.
        - `prefix`: all tokens before it.
        - `tools`: schemas of the tools, which give arguments their types.
        """
        tokenizer = self.tokenizer.tokenizer
        if not ids:
            return Parsed({"role": "assistant", "content": ""})
        assert self._response is not None, "there are tools"
        try:
            message = self._message(self._response, list(ids), list(prefix), tools)
        except Exception:  # whatever the model may write
            return Parsed({"role": "assistant", "content": self.text(ids)})
        content = message.get("content") or ""
        for end in tokenizer.convert_ids_to_tokens(list(self.tokenizer.eos_ids)):
            content = content.removesuffix(end)
        return Parsed({**message, "content": content})

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of a turn."""
        return str(self.tokenizer.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _ids(self, messages: Conversation, *, opens: bool) -> list[int]:
        text = self.tokenizer.template.render(messages, opens=opens)
        ids: list[int] = self.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _check_tools(self) -> None:
        """Raises `UserError` for a template that leaves out tools, calls or answers."""
        dialogue = [_USER, _turn(_NAME, _PROBE), _ANSWER]
        try:
            text = self.tokenizer.template.render(dialogue, tools=[_PROBE_SCHEMA])
        except UserError as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(
                f"the chat template cannot render a dialogue with tools ({reason}): use a model "
                f"that was trained with tools, or set chat_template to a file with a template that "
                f"renders them."
            ) from error
        parts = {
            "the schemas of tools": "A probe.",
            "the model's calls": "a probe",
            "the answers of tools": "probe_answer",
        }
        for what, part in parts.items():
            if part not in text:
                raise UserError(
                    f"the chat template leaves out {what}: use a model that was trained with "
                    f"tools, or set chat_template to a file with a template that renders them."
                )

    def _check_prefix(self, turn: Message, answer: Message) -> None:
        """Raises `UserError` for a template that renders a turn otherwise once others follow it."""
        turn = {**turn, "content": _THOUGHTFUL}
        try:
            self.suffix_ids([answer])
        except UserError:  # Qwen 3 keeps a turn's thought, but an empty one only at the end
            self._content = _THOUGHTFUL
            self.suffix_ids([answer])
        alone = self.tokenizer.template.render([_USER, turn], opens=False)
        followed = self.tokenizer.template.render([_USER, turn, answer], opens=False)
        if "probe_thought" in alone and "probe_thought" not in followed:
            raise UserError(_REWRITES)

    def _found(self) -> Mapping[str, Any]:
        """Returns the response template that reads back the calls which the chat template writes.

        Raises `UserError` if none does.
        """
        render = self.tokenizer.template.render
        asked = render([_USER], tools=[_PROBE_SCHEMA])
        closed = render([_USER], tools=[_PROBE_SCHEMA], opens=False)
        opening = asked.removeprefix(closed)
        # Where an answer is part of the model's turn, as with Gemma 4, nothing opens the next one.
        answered = render([_USER, _turn(_NAME, _PROBE), _ANSWER]).rpartition("probe_answer")[2]
        written = render([_USER, _turn(_NAME, _PROBE)], tools=[_PROBE_SCHEMA], opens=False)
        ends = self.tokenizer.tokenizer.convert_ids_to_tokens(list(self.tokenizer.eos_ids))
        for form in _FORMATS:
            starts = [text.partition(form.thought["open"])[0] for text in (opening, answered)]
            template = form.response_template(starts, ends)
            prefix = closed + starts[0]
            try:
                found = self._message(
                    template, written.removeprefix(prefix), prefix, [_PROBE_SCHEMA]
                )
            except (ValueError, TypeError):
                continue
            if Parsed(found).calls == [{"name": _NAME, "arguments": _PROBE}]:
                return template
        raise UserError(
            "the chat template writes the calls of tools in a format that is unknown here: set the "
            "tokenizer's response_template, as transformers describes it."
        )

    def _message(
        self, template: Mapping[str, Any], turn: Any, prefix: Any, tools: Sequence[Schema]
    ) -> Message:
        """Returns a turn as a message. Turn and prefix are texts or ids.

        Raises `ValueError` or `TypeError`, mostly, for what cannot be read.
        """
        message = self.tokenizer.tokenizer.parse_response(
            turn, template, prefix=prefix, tools=list(tools)
        )
        if "tool_calls" in message:
            message["tool_calls"] = _checked(message["tool_calls"])
        return message


class ChatFormats:
    """Formats of a tokenizer's dialogues, each made once it is needed."""

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        self._made: dict[bool, ChatFormat] = {}

    def of(self, *, has_tools: bool) -> ChatFormat:
        """Returns the format of dialogues with or without tools.

        Raises `UserError` for a chat template that cannot write those with tools.
        """
        if has_tools not in self._made:
            self._made[has_tools] = ChatFormat(
                self.tokenizer, has_tools=has_tools, may_rewrite=True
            )
        return self._made[has_tools]


_REWRITES = (
    "the chat template renders a turn of the model otherwise once others follow it, so the tokens "
    "that were sampled would not be those that are trained: set chat_template to a file with a "
    "template that keeps earlier turns."
)


def _turn(name: str, arguments: Mapping[str, Any]) -> Message:
    """Returns a turn that calls one function."""
    call = {"name": name, "arguments": dict(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def _checked(calls: Any) -> list[Message]:
    """Returns calls with their arguments; raises `ValueError` for calls without a name.

    Where a template has a list of calls in each of several places, they are one list here.
    """
    if not isinstance(calls, list):
        raise ValueError("tool_calls is no list")
    flat = [one for each in calls for one in (each if isinstance(each, list) else [each])]
    for call in flat:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call has no name")
        function["name"].encode()  # half a character could not be answered
        if function.get("arguments") is None:
            function["arguments"] = {}
    return flat
