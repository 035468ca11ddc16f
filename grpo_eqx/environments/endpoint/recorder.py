"""Rollouts of an agent: the tokens of its requests and answers, as they are trained."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.environments.chat_format import ChatFormats, Message
from grpo_eqx.environments.endpoint.branch import Branch, content_of
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.clients import Client, Encode, Turn
from grpo_eqx.environments.endpoint.requests import RequestError, Wanted
from grpo_eqx.generation.open_session import Request
from grpo_eqx.generation.sampling import Sampling

_FORKS = 1 << 20
"""In addresses of draws: prompts of a step, and samples of a prompt; those of forks lie beyond."""
MOST_BRANCHES = 1024
"""Trajectories that a completion may have."""
_MOST_OPEN = 256
"""Answers that a completion may wait for at once, so that none is in the way of others."""


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
    """Tokens of answers that the agent has changed, and that are not trained."""
    refused: int = 0
    """Requests for which there was no room."""


class _Place(NamedTuple):
    """The tokens of a request, and where they go on."""

    branch: Branch | None
    """The branch that it continues; `None`: a new one."""
    ids: list[int]
    """All tokens up to the answer."""
    text: str = ""
    """Its messages as the template renders them; empty if not known."""


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
        self._branches: list[Branch] = []
        self._num_open = 0
        self._is_closed = False
        self.counts = RecordCounts()

    def begin(self, wanted: Wanted, encode: Encode) -> list[Turn]:
        if self._is_closed:
            raise RequestError(
                401, "the completion of this API key has ended", code="invalid_api_key"
            )
        if self._num_open + max(len(wanted.prompts), 1) * wanted.n > _MOST_OPEN:
            raise RequestError(
                429, f"more than {_MOST_OPEN} answers of a completion are under way: wait for some",
                code="rate_limit_exceeded",
            )  # fmt: skip
        self._options.on_request(wanted)
        encode, turns = functools.cache(encode), list[Turn]()
        try:
            for i in range(max(len(wanted.prompts), 1)):
                for _ in range(wanted.n):
                    place = self._place_of(wanted, functools.partial(_one_of, encode, i))
                    turns.append(self._begun(wanted, place, is_first=not turns))
        except BaseException:
            for turn in turns:
                turn.drop()
            raise
        return turns

    def close(self) -> None:
        """Refuses more requests, and records nothing more."""
        self._is_closed = True

    def trajectory(self, version: int) -> Trajectory | None:
        """Returns all that was recorded; `None` where no request was answered.

        **Arguments:**

        - `version`: version of the weights.
        """
        made = [each.trajectory(self._trajectory, version) for each in self._written]
        return dataclasses.replace(made[0], forks=tuple(made[1:])) if made else None

    @property
    def messages(self) -> list[Message]:
        """Messages of the first trajectory after its first request."""
        return next((each.messages[each.num_given :] for each in self._written), [])

    @property
    def _written(self) -> list[Branch]:
        """Branches with an answer, first that with the rollout's own draws."""
        own = self._trajectory.address
        written = (each for each in self._branches if each.is_written)
        return sorted(written, key=lambda each: each.address != own)

    def _begun(self, wanted: Wanted, place: _Place, *, is_first: bool) -> Turn:
        """Begins an answer; raises `RequestError` where it has no room."""
        options, branch = self._options, place.branch
        prompt = self._prompt_length(place.ids) if branch is None else branch.prompt
        room = options.max_completion_length - (len(place.ids) - prompt)
        if prompt > options.max_prompt_length:
            raise self._no_room("prompt", "max_prompt_length", prompt, options.max_prompt_length)
        if room < 1:
            if branch is not None:
                branch.finish_reason = "length"
            raise self._no_room(
                "dialogue after the prompt", "max_completion_length",
                len(place.ids) - prompt, options.max_completion_length,
            )  # fmt: skip
        if branch is None:
            if len(self._branches) == MOST_BRANCHES:
                raise RequestError(
                    400, f"a completion has at most {MOST_BRANCHES} dialogues: go on with one",
                    code="too_many_dialogues",
                )  # fmt: skip
            branch = Branch(prompt, place.ids, self._address_of(place.ids))
            self._branches.append(branch)
        branch.is_busy = True
        self._num_open += 1
        request = Request(
            ids=tuple(place.ids),
            address=branch.address,
            start=prompt,
            max_tokens=min(wanted.max_tokens or room, room),
            sampling=options.sampling,
        )
        return _RecordedTurn(self, branch, request, place.text, is_first=is_first)

    def _place_of(self, wanted: Wanted, encode: Callable[[], list[int]]) -> _Place:
        """Returns which branch a request continues, and its tokens."""
        free = [each for each in self._branches if not each.is_busy]
        threshold, given = self._options.fork_threshold, list(map(dict, wanted.messages or ()))
        contents = list(map(content_of, given))
        known = [each for each in free if each.is_continued_by(contents, wanted.tools)]
        if known:
            place = self._continued(max(known, key=lambda each: len(each.messages)), wanted, given)
            if place is not None:
                return place
            threshold = 0  # the template rewrites the history
        ids = encode()
        fitting = [
            (drift, -len(each.ids), each)
            for each in free
            if (drift := each.drift(ids, threshold)) is not None
        ]
        if fitting:
            return _Place(min(fitting, key=lambda x: x[:2])[2], ids)
        for branch in free:
            if threshold and branch.has_another_answer(contents, wanted.tools):
                changed = self._with_another_answer(branch, wanted, given)
                if changed is not None and branch.drift(changed, threshold) is not None:
                    return _Place(branch, changed)
        return _Place(None, ids)

    def _continued(
        self, branch: Branch, wanted: Wanted, given: list[dict[str, Any]]
    ) -> _Place | None:
        """Returns a request that follows all messages of a branch, in its tokens.

        `None` where the template renders the history otherwise once more messages follow it, as
        those do that leave out earlier thoughts.
        """
        chat, number = self._options.chat, len(branch.messages)
        render = functools.partial(chat.tokenizer.template.render, tools=wanted.tools, opens=False)
        try:
            before = branch.text or render(branch.messages[:-1])
            if _thought_of(branch.messages[-1]):
                before = render(branch.messages)
            whole = render(given)
            if given[number]["role"] == "assistant" or not whole.startswith(before.rstrip()):
                return None
            form = chat.of(has_tools=bool(wanted.tools))
            suffix = form.suffix_ids(given[number:], with_end=not form.ends(branch.ids))
        except UserError:
            return None
        return _Place(branch, [*branch.ids, *suffix], whole)

    def _with_another_answer(
        self, branch: Branch, wanted: Wanted, given: list[dict[str, Any]]
    ) -> list[int] | None:
        """Returns the tokens of a branch with the last answer, and what follows, of a request.

        `None` where the template renders what comes before otherwise.
        """
        tokenizer, number = self._options.chat.tokenizer, len(branch.messages) - 1
        try:
            before = tokenizer.template.render(given[:number], tools=wanted.tools)
            whole = tokenizer.template.render(given, tools=wanted.tools)
        except UserError:
            return None
        if not whole.startswith(before):
            return None
        rest = tokenizer.tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
        return [*branch.ids[: branch.answer], *rest]

    def _prompt_length(self, ids: Sequence[int]) -> int:
        """Returns how many tokens of a new branch are its prompt.

        That of another branch, where it begins alike. What is left counts as its completion.
        """
        if not self._branches:
            return len(ids)
        alike = (x.prompt for x in self._branches if list(ids[: x.prompt]) == x.ids[: x.prompt])
        return next(alike, min(len(ids), self._options.max_prompt_length))

    def _address_of(self, ids: Sequence[int]) -> Address:
        """Returns the address of the draws of a new branch, which no other branch has.

        That of forks follows from their tokens, so that it is the same in whatever order an agent
        asks for several at once.
        """
        own, held = self._trajectory.address, {each.address for each in self._branches}
        if own not in held:
            return own
        for number in itertools.count():
            content = np.array([*ids, number], np.int32).tobytes()
            digest = int.from_bytes(hashlib.sha256(content).digest()[:4], "little")
            prompt, sample = _FORKS * (digest % 2047 + 1), _FORKS * (digest // 2047 % 2048)
            address = own._replace(prompt=own.prompt + prompt, sample=own.sample + sample)
            if address not in held:
                return address
        raise AssertionError("there are more addresses than branches")

    def _no_room(self, what: str, setting: str, number: int, most: int) -> RequestError:
        """Counts and returns the refusal of a request that is too long."""
        self._count(refused=1)
        return RequestError(
            400,
            f"the {what} has {number:,} tokens, and {setting} of the run is {most:,}: send fewer, "
            f"or raise it",
            code="context_length_exceeded",
        )

    def take(
        self, turn: "_RecordedTurn", choice: Choice, wanted: Wanted, message: Message | None
    ) -> None:
        """Records the answer of a turn."""
        branch = self._released(turn)
        if self._is_closed:
            return
        is_fork = not branch.is_written and branch.address != self._trajectory.address
        drifted = branch.go_on(turn.request.ids)
        branch.take(choice, wanted, message, turn.text)
        self._count(requests=turn.is_first, drifted_tokens=drifted, forks=is_fork)

    def forget(self, turn: "_RecordedTurn") -> None:
        """Forgets the answer of a turn, and a branch without any."""
        branch = self._released(turn)
        if not branch.is_written:
            self._branches.remove(branch)

    def _released(self, turn: "_RecordedTurn") -> Branch:
        self._num_open -= 1
        turn.branch.is_busy = False
        return turn.branch

    def _count(self, **counts: int) -> None:
        old = self.counts._asdict()
        self.counts = self.counts._replace(**{name: old[name] + n for name, n in counts.items()})


class _RecordedTurn(Turn):
    """An answer that becomes a part of a branch."""

    def __init__(
        self, recorder: Recorder, branch: Branch, request: Request, text: str, *, is_first: bool
    ):
        """**Arguments:**

        - `recorder`, `branch`: where the answer goes.
        - `request`: the tokens that it continues.
        - `text`: the messages of the request as the template renders them; empty if not known.
        - `is_first`: whether it is the first answer to its request.
        """
        self._recorder, self.branch, self.request = recorder, branch, request
        self.text, self.is_first = text, is_first

    def end(self, choice: Choice, wanted: Wanted, message: Message | None) -> None:
        self._recorder.take(self, choice, wanted, message)

    def drop(self) -> None:
        self._recorder.forget(self)


def _one_of(encode: Encode, index: int) -> list[int]:
    """Returns the tokens of one of a request's prompts."""
    return list(encode()[index])


def _thought_of(message: Mapping[str, Any]) -> str:
    """Returns the thought of an answer; empty where it has none."""
    before, end, _ = message["content"].partition("</think>")
    thought = message.get("reasoning_content") or message.get("thinking") or before * bool(end)
    return str(thought).replace("<think>", "").strip()
