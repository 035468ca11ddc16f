"""A completion as its tokens come: its text, where a stop string ends it, and its message."""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.chat_format import ChatFormat
from grpo_eqx.environments.endpoint.requests import Wanted
from grpo_eqx.generation.open_session import Drawn

_PART = "�"
"""Text that a decoder writes for a part of a character."""


class Choice:
    """One of a request's completions."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        wanted: Wanted,
        chat: ChatFormat | None,
        tokenizer: ChatTokenizer,
    ):
        """**Arguments:**

        - `index`: its number among those of the request.
        - `prompt`: the tokens that it continues.
        - `wanted`: the request.
        - `chat`: format of calls; `None` where the request has no tools.
        - `tokenizer`: the tokenizer.
        """
        self.index, self.prompt = index, prompt
        self._wanted, self._stop, self._chat = wanted, wanted.stop, chat
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.text = ""
        """The text so far, up to a stop string."""
        self._num_sent = 0

    def add(self, drawn: Drawn) -> None:
        """Adds tokens; a stop string in their text ends the completion with its last token."""
        before = len(self.ids)
        self.ids += drawn.ids.tolist()
        self.logps += drawn.logps.tolist()
        self.text, self.finish_reason = self._text_of(len(self.ids)), drawn.finish_reason
        if (place := self._place_of_stop(self.text)) is None:
            return
        # The first token with which a stop string is whole is the last one.
        number = next(
            n
            for n in range(before + 1, len(self.ids) + 1)
            if self._place_of_stop(self._text_of(n)) is not None
        )
        del self.ids[number:], self.logps[number:]
        self.text, self.finish_reason = self.text[:place], "stop"

    def delta(self) -> str:
        """Returns the text since the last call that nothing which follows can change."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= len(self.text) - len(self.text.rstrip(_PART))
            end -= max((_overlap(self.text[:end], each) for each in self._stop), default=0)
        start, self._num_sent = self._num_sent, max(self._num_sent, end)
        return self.text[start : self._num_sent]

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The message of the whole completion, with the calls in it."""
        if self._chat is None:
            return {"role": "assistant", "content": self.text, "refusal": None}
        parsed = self._chat.parse(self.ids, self.prompt, self._wanted.tools).message
        message = {"role": "assistant", "refusal": None, **parsed}
        if calls := parsed.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": self._id_of_call(n),
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        # In ASCII, as half a character could not be sent otherwise.
                        "arguments": json.dumps(call["function"]["arguments"]),
                    },
                }
                for n, call in enumerate(calls)
            ]
            message["content"] = message.get("content") or None
        return message

    @property
    def message_reason(self) -> str | None:
        """Why the message ended, by OpenAI's names."""
        if self.finish_reason == "stop" and self.message.get("tool_calls"):
            return "tool_calls"
        return self.finish_reason

    def _id_of_call(self, number: int) -> str:
        """Returns the id of a call, which no other call of a dialogue has, nor of a fork of it.

        The same requests have the same ids, as templates may render them. Some, as Mistral's, want
        nine letters.
        """
        content = np.array([*self.prompt, *self.ids, self.index, number], np.int32).tobytes()
        return hashlib.sha256(content).hexdigest()[:9]

    def _text_of(self, number: int) -> str:
        (text,) = self._tokenizer.decode_completions([self.ids[:number]])
        return text

    def _place_of_stop(self, text: str) -> int | None:
        """Returns where the first stop string begins."""
        places = (text.find(each) for each in self._stop)
        return min((place for place in places if place >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Returns the number of characters at the end of a text with which a stop string begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
