"""Rollouts of an agent: the tokens of its requests and answers, as they are trained."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.trajectory import Address, FinishReason, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats, Message
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.clients import Client, Encode, Turn
from grpo_eqx.environments.endpoint.requests import RequestError, Wanted
from grpo_eqx.generation.open_session import Request
from grpo_eqx.generation.sampling import Sampling

_FORKS = 1 << 20
"""In addresses of draws: prompts of a step, and samples of a prompt; those of forks lie beyond."""


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Settings of a run that its rollouts share."""

    chat: ChatFormats
    sampling: Sampling
    """How tokens are drawn, whatever the agent asks for."""
    max_prompt_length: int
    max_completion_length: int
    fork_threshold: int
    """Number of tokens of the last answer from which on a change of them is a fork."""
    on_request: Callable[[Wanted], None] = lambda wanted: None
    """Is shown each request."""


class RecordCounts(NamedTuple):
    """Counts of a rollout's requests, and of changes of its history."""

    requests: int = 0
    """Requests that were answered."""
    forks: int = 0
    """Trajectories besides the first."""
    drifted_tokens: int = 0
    """Tokens of answers that came back otherwise, and are not trained."""
    refused: int = 0
    """Requests for which there was no room."""


class Recorder(Client):
    """The client of one rollout.

    A request that goes on with what was answered before gets the very tokens of it, and not those
    that its text is written with.
    """

    def __init__(self, trajectory: Trajectory, options: RecordOptions):
        """**Arguments:**

        - `trajectory`: the problem's prompt, with the address of the draws.
        - `options`: settings.
        """
        self._trajectory, self._options = trajectory, options
        self._branches: list[_Branch] = []
        self.counts = RecordCounts()

    def begin(self, wanted: Wanted, encode: Encode) -> list[Turn]:
        self._options.on_request(wanted)
        turns, number = list[Turn](), max(len(wanted.prompts), 1)
        encode = functools.cache(encode)
        try:
            for i in range(number):
                turns += [
                    self._begun_turn(wanted, lambda i=i: list(encode()[i]))  # type: ignore[misc]
                    for _ in range(wanted.n)
                ]
        except RequestError:
            for turn in turns:
                turn.drop()
            raise
        return turns

    def trajectory(self, version: int) -> Trajectory | None:
        """Returns all that was recorded; `None` where no request was answered.

        **Arguments:**

        - `version`: version of the weights.
        """
        made = [
            each.trajectory(self._trajectory, version) for each in self._branches if each.is_written
        ]
        return dataclasses.replace(made[0], forks=tuple(made[1:])) if made else None

    @property
    def messages(self) -> list[Message]:
        """Messages of the first trajectory after its first request."""
        made = [each for each in self._branches if each.is_written]
        return made[0].messages[made[0].num_given :] if made else []

    def count(self, **counts: int) -> None:
        """Adds to the counts."""
        old = self.counts._asdict()
        self.counts = self.counts._replace(**{name: old[name] + n for name, n in counts.items()})

    def _begun_turn(self, wanted: Wanted, encode: Callable[[], list[int]]) -> Turn:
        branch, ids = self._continued(wanted, encode)
        prompt = self._prompt_length(ids) if branch is None else branch.prompt
        options = self._options
        room = options.max_completion_length - (len(ids) - prompt)
        if prompt > options.max_prompt_length:
            raise self._no_room("prompt", "max_prompt_length", prompt, options.max_prompt_length)
        if room < 1:
            if branch is not None:
                branch.finish_reason = "length"
            raise self._no_room(
                "dialogue after the prompt", "max_completion_length",
                len(ids) - prompt, options.max_completion_length,
            )  # fmt: skip
        if branch is None:
            branch = _Branch(prompt, ids, self._address_of(ids))
            self._branches.append(branch)
        branch.is_busy = True
        request = Request(
            ids=tuple(ids),
            address=branch.address,
            start=prompt,
            max_tokens=min(wanted.max_tokens or room, room),
            sampling=options.sampling,
        )
        return _RecordedTurn(self, branch, request)

    def _continued(
        self, wanted: Wanted, encode: Callable[[], list[int]]
    ) -> "tuple[_Branch | None, list[int]]":
        """Returns the branch that a request continues, if any, and all tokens up to the answer."""
        free = [each for each in self._branches if not each.is_busy]
        threshold, given = self._options.fork_threshold, list(wanted.messages or ())
        contents = list(map(_content_of, given))
        known = [each for each in free if each.is_continued_by(contents, wanted.tools)]
        if known:
            branch = max(known, key=lambda each: len(each.messages))
            suffix = self._suffix(branch, wanted, given[len(branch.messages) :])
            if suffix is not None:
                return branch, [*branch.ids, *suffix]
            threshold = 0  # the template rewrites the history
        ids = encode()
        places = [(each.drift(ids, threshold), each) for each in free]
        fitting = [(drift, -len(each.ids), each) for drift, each in places if drift is not None]
        best = min(fitting, key=lambda x: x[:2], default=None)
        return (None if best is None else best[2]), ids

    def _suffix(
        self, branch: "_Branch", wanted: Wanted, new: Sequence[Mapping[str, Any]]
    ) -> list[int] | None:
        """Returns the tokens of new messages, up to the next answer.

        `None` where the template renders the history otherwise once they follow it, as those do
        that leave out earlier thoughts.
        """
        assert wanted.messages is not None
        render = self._options.chat.tokenizer.template.render
        before = branch.text or render(branch.messages[:-1], opens=False, tools=wanted.tools)
        whole = render(list(wanted.messages), opens=False, tools=wanted.tools)
        is_kept = whole.startswith(before.rstrip()) and thought_of(branch.messages[-1]) in whole
        branch.next_text = whole
        if new[0]["role"] == "assistant" or not is_kept:
            return None
        try:
            chat = self._options.chat.of(has_tools=bool(wanted.tools))
            return chat.suffix_ids(list(map(dict, new)), with_end=not chat.ends(branch.ids))
        except UserError:
            return None

    def _prompt_length(self, ids: Sequence[int]) -> int:
        """Returns how many tokens of a new branch are its prompt.

        That of another branch, where it begins alike. What is left counts as its completion.
        """
        most, own = self._options.max_prompt_length, len(ids)
        if not self._branches:
            return own
        alike = (x.prompt for x in self._branches if list(ids[: x.prompt]) == x.ids[: x.prompt])
        return next(alike, min(own, most))

    def _address_of(self, ids: Sequence[int]) -> Address:
        """Returns the address of the draws of a new branch.

        That of forks follows from their tokens, so that it is the same in whatever order an agent
        asks for several at once.
        """
        own = self._trajectory.address
        if not self._branches:
            return own
        number = sum(each.ids[: each.num_asked] == list(ids) for each in self._branches)
        content = np.array([*ids, number], np.int32).tobytes()
        digest = int.from_bytes(hashlib.sha256(content).digest()[:4], "little")
        more = _FORKS * (digest % 2047 + 1), _FORKS * (digest // 2047 % 2048)
        return own._replace(prompt=own.prompt + more[0], sample=own.sample + more[1])

    def _no_room(self, what: str, setting: str, number: int, most: int) -> RequestError:
        """Counts and returns the refusal of a request that is too long."""
        self.count(refused=1)
        return RequestError(
            400,
            f"the {what} has {number:,} tokens, and {setting} of the run is {most:,}: send fewer, "
            f"or raise it",
            code="context_length_exceeded",
        )

    def end(self, branch: "_Branch", request: Request) -> None:
        """Counts a request that is answered, whose tokens its branch now has."""
        is_fork = not branch.is_written and branch is not self._branches[0]
        drifted = branch.go_on(request.ids)
        self.count(requests=1, drifted_tokens=drifted, forks=int(is_fork))

    def drop(self, branch: "_Branch") -> None:
        """Forgets an answer, and a branch without any."""
        branch.is_busy = False
        if not branch.is_written:
            self._branches.remove(branch)


class _Branch:
    """A trajectory that is being made."""

    def __init__(self, prompt: int, ids: Sequence[int], address: Address):
        self.prompt, self.address = prompt, address
        self.ids = list(ids)
        self.num_asked = len(ids)
        """Tokens of the first request."""
        self.written = [False] * len(ids)
        self.logps = [0.0] * len(ids)
        self.answer = len(ids)
        """Number of the first token of the last answer."""
        self.messages: list[Message] = []
        """All messages, the last answer included; none where requests have texts."""
        self._contents: list[tuple[Any, ...]] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.text = self.next_text = ""
        """The messages but the last answer as the template renders them, and those of the request
        that is being answered; empty where nothing has asked for them."""
        self.num_given = 0
        """Messages of the first request."""
        self.finish_reason: FinishReason | None = None
        self.is_busy = False
        """Whether an answer is being drawn."""

    @property
    def is_written(self) -> bool:
        return any(self.written)

    def is_continued_by(
        self, contents: Sequence[tuple[Any, ...]], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Returns whether more messages follow those of the branch in a request.

        **Arguments:**

        - `contents`: `_content_of` each message of the request.
        - `tools`: its tools.
        """
        number = len(self._contents)
        begins_alike = 0 < number < len(contents) and contents[:number] == self._contents
        return begins_alike and list(tools) == list(self.tools)

    def drift(self, ids: Sequence[int], threshold: int) -> int | None:
        """Returns how many of the last tokens differ in a request that continues the branch.

        `None` where it does not: where anything before the last answer differs, or too much of
        that, or nothing follows.
        """
        if self.ids[: self.answer] != ids[: self.answer]:
            return None
        matched = _number_alike(self.ids, ids)
        drift = len(self.ids) - matched
        goes_on = len(ids) > matched and drift < threshold
        return drift if drift == 0 or goes_on else None

    def go_on(self, ids: Sequence[int]) -> int:
        """Takes all tokens of a request; returns the number of tokens that are not trained now."""
        matched = _number_alike(self.ids, ids)
        drifted, rest = sum(self.written[matched:]), len(ids) - matched
        self.ids[matched:] = ids[matched:]
        self.written[matched:], self.logps[matched:] = [False] * rest, [0.0] * rest
        self.answer = len(self.ids)
        return drifted

    def take(self, choice: Choice, wanted: Wanted, message: Message | None) -> None:
        """Adds an answer."""
        self.is_busy, self.answer = False, len(self.ids)
        self.ids += choice.ids
        self.written += [True] * len(choice.ids)
        self.logps += choice.logps
        self.finish_reason = choice.finish_reason
        if wanted.messages is not None and message is not None:
            if not self.messages:
                self.num_given = len(wanted.messages)
            self.messages, self.tools = [*map(dict, wanted.messages), message], wanted.tools
            self._contents = list(map(_content_of, self.messages))
            self.text, self.next_text = self.next_text, ""

    def trajectory(self, begun: Trajectory, version: int) -> Trajectory:
        start = self.prompt
        written = np.array(self.written[start:], bool)
        return dataclasses.replace(
            begun,
            prompt_ids=self.ids[:start],
            ids=np.array(self.ids[start:], np.int32),
            written=written,
            sampler_logps=np.array(self.logps[start:], np.float32),
            versions=np.where(written, version, 0).astype(np.int32),
            finish_reason=self.finish_reason,
        )


class _RecordedTurn(Turn):
    """An answer that becomes a part of a branch."""

    def __init__(self, recorder: Recorder, branch: _Branch, request: Request):
        self._recorder, self._branch, self.request = recorder, branch, request

    def end(self, choice: Choice, wanted: Wanted, message: Message | None) -> None:
        self._recorder.end(self._branch, self.request)
        self._branch.take(choice, wanted, message)

    def drop(self) -> None:
        self._recorder.drop(self._branch)


def _number_alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def thought_of(message: Mapping[str, Any]) -> str:
    """Returns the thought of an answer; empty where it has none."""
    before, end, _ = message["content"].partition("</think>")
    thought = message.get("reasoning_content") or message.get("thinking") or before * bool(end)
    return str(thought).replace("<think>", "").strip()


def _content_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what counts in a message: clients leave out thoughts, and add fields."""
    calls = message.get("tool_calls") or ()
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["role"], message.get("content") or "", called
