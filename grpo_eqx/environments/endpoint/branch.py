"""A trajectory that an agent's requests make, as long as they go on with its tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_eqx.data.trajectory import Address, FinishReason, Trajectory
from grpo_eqx.environments.chat_format import Message
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.requests import Wanted

Tools = Sequence[Mapping[str, Any]]
Content = tuple[Any, ...]
"""Fields that count in a message."""


class Branch:
    """A trajectory that is being made."""

    def __init__(self, prompt: int, ids: Sequence[int], address: Address):
        """**Arguments:**

        - `prompt`: tokens of the prompt.
        - `ids`: tokens of the first request, which begin with the prompt.
        - `address`: address of the draws.
        """
        self.prompt, self.address = prompt, address
        self.ids = list(ids)
        self.answer = len(ids)
        """Number of the first token of the last answer."""
        self.messages: list[Message] = []
        """All messages, the last answer included; none where requests have texts."""
        self.tools: Tools = ()
        self.text = ""
        """The messages but the last answer as the template renders them; empty if not known."""
        self.num_given = 0
        """Messages of the first request."""
        self.finish_reason: FinishReason | None = None
        self.is_busy = False
        """Whether an answer is being drawn."""
        self._contents: list[Content] = []
        self._written = [False] * len(ids)
        self._logps = [0.0] * len(ids)

    @property
    def is_written(self) -> bool:
        """Whether it has an answer."""
        return any(self._written)

    def is_continued_by(self, contents: Sequence[Content], tools: Tools) -> bool:
        """Returns whether more messages follow those of the branch in a request.

        **Arguments:**

        - `contents`: `content_of` each message of the request.
        - `tools`: its tools.
        """
        number = len(self._contents)
        begins_alike = 0 < number < len(contents) and contents[:number] == self._contents
        return begins_alike and list(tools) == list(self.tools)

    def has_another_answer(self, contents: Sequence[Content], tools: Tools) -> bool:
        """Returns whether a request continues the branch but for another last answer.

        The arguments are those of `is_continued_by`.
        """
        *before, _ = self._contents or [()]
        number = len(before)
        begins_alike = 0 < number < len(contents) - 1 and contents[:number] == before
        return (
            begins_alike and contents[number][0] == "assistant" and list(tools) == list(self.tools)
        )

    def drift(self, ids: Sequence[int], threshold: int) -> int | None:
        """Returns how many of the last tokens differ in a request that continues the branch.

        `None` where it does not: where anything before the last answer differs, or `threshold`
        tokens of that, or nothing follows.
        """
        if self.ids[: self.answer] != list(ids[: self.answer]):
            return None
        matched = _number_alike(self.ids, ids)
        drift = len(self.ids) - matched
        goes_on = len(ids) > matched and drift < threshold
        return drift if drift == 0 or goes_on else None

    def go_on(self, ids: Sequence[int]) -> int:
        """Takes all tokens of a request; returns the number of those that are not trained now."""
        matched = _number_alike(self.ids, ids)
        drifted, rest = sum(self._written[matched:]), len(ids) - matched
        self.ids[matched:] = ids[matched:]
        self._written[matched:], self._logps[matched:] = [False] * rest, [0.0] * rest
        self.answer = len(self.ids)
        return drifted

    def take(self, choice: Choice, wanted: Wanted, message: Message | None, text: str) -> None:
        """Adds an answer to the request that `go_on` has taken.

        **Arguments:**

        - `choice`: the answer.
        - `wanted`: the request.
        - `message`: the answer as chat templates read it; `None` where requests have texts.
        - `text`: the messages of the request as the template renders them; empty if not known.
        """
        self.ids += choice.ids
        self._written += [True] * len(choice.ids)
        self._logps += choice.logps
        self.finish_reason, self.text = choice.finish_reason, text
        if wanted.messages is not None and message is not None:
            if not self.messages:
                self.num_given = len(wanted.messages)
            self.messages, self.tools = [*map(dict, wanted.messages), message], wanted.tools
            self._contents = list(map(content_of, self.messages))

    def trajectory(self, begun: Trajectory, version: int) -> Trajectory:
        """Returns what has been made.

        **Arguments:**

        - `begun`: the trajectory of the problem.
        - `version`: version of the weights.
        """
        start = self.prompt
        written = np.array(self._written[start:], bool)
        return dataclasses.replace(
            begun,
            prompt_ids=self.ids[:start],
            ids=np.array(self.ids[start:], np.int32),
            written=written,
            sampler_logps=np.array(self._logps[start:], np.float32),
            versions=np.where(written, version, 0).astype(np.int32),
            finish_reason=self.finish_reason,
        )


def content_of(message: Mapping[str, Any]) -> Content:
    """Returns what counts in a message: clients leave out thoughts, and add fields."""
    calls = message.get("tool_calls") or ()
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["role"], message.get("content") or "", called


def _number_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
