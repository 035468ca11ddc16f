"""Dialogues of completions with tools: calls are run, and answered in the template's format."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import inspect
import math
import queue
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from grpo_eqx.common.errors import RunError, class_name, first_line
from grpo_eqx.common.event_loop import GRACE
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.data.acted import ToolCounts
from grpo_eqx.data.prompts import Conversation
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.exchange import gather_json, raise_on_all_hosts
from grpo_eqx.environments.calls import (
    Call,
    Calls,
    Outcome,
    ReturnedError,
    StillRunsError,
    failure_of,
)
from grpo_eqx.environments.chat_format import ChatFormat, Message
from grpo_eqx.environments.environment import Step
from grpo_eqx.environments.tools import Tool
from grpo_eqx.generation.sampler import Responder
from grpo_eqx.rewards.contract import joined_blocks, read_rewards, text_of
from grpo_eqx.settings.config import GRPOConfig

_IDS = "ids"
"""Key of the tokens of an observation that is given as tokens."""
_BETWEEN_EXCHANGES = 0.05
"""Seconds that a process waits for a reply of its own before it asks the others for theirs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """Limits on dialogues."""

    timeout: float | None = None
    """Seconds of a call."""
    max_iterations: int | None = None
    """Turns whose calls are run; `None`: as many as fit."""
    max_response_length: int | None = None
    """Tokens of an answer; longer ones are cut."""
    truncate_side: Literal["left", "middle", "right"] = "middle"
    """Part of a longer answer that is kept, by verl's names; `middle`: half of either end."""
    failures: Literal["answer", "stop"] = "answer"
    """Whether the model is told what a call raised, or the run stops."""

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "ToolLimits":
        """Returns the limits of a config."""
        return cls(
            timeout=cfg.tool_timeout,
            max_iterations=cfg.max_tool_calling_iterations,
            max_response_length=cfg.max_tool_response_length,
            truncate_side=cfg.tool_response_truncate_side,
            failures=cfg.tool_failures,
        )


@dataclasses.dataclass
class Dialogue:
    """A completion with the tools or the environment that answer it."""

    tools: Mapping[str, Tool] = dataclasses.field(default_factory=dict)
    environment: Any = None
    """The completion's own environment, whose calls run one after the other, or `None`."""
    takes_turns: bool = False
    """Whether the environment's `step` takes each turn; otherwise calls in turns are answered."""
    address: Address | None = None
    """Address of the completion."""
    content: str | Conversation = ""
    """Content of its prompt, with what its environment added."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """Messages of the completion, the model's and the answers."""
    turn_ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens of the last turn."""
    num_read: int = 0
    """Tokens of the completion that `messages` hold."""
    num_turns: int = 0
    """Turns whose calls were run."""
    num_calls: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    """Seconds of all calls."""
    is_open: bool = False
    """Whether the last turn has no end token, as one that a stop string ended."""
    is_lost: bool = False
    """Whether the environment failed, so that the completion cannot be rewarded."""

    def finish(self, trajectory: Trajectory, chat: ChatFormat) -> None:
        """Completes the messages from what was sampled in the end.

        Answers that did not fit are taken back. A last turn that was cut is a message too.
        """
        if len(trajectory) < self.num_read:
            while self.messages and self.messages[-1]["role"] != "assistant":
                self.messages.pop()
        elif len(trajectory) > self.num_read:
            self.read(trajectory, chat)

    def read(self, trajectory: Trajectory, chat: ChatFormat) -> list[Message]:
        """Adds the turn that has just ended, and returns its calls."""
        before = [*trajectory.prompt_ids, *trajectory.ids[: self.num_read].tolist()]
        ids = self.turn_ids = trajectory.ids[self.num_read :].tolist()
        self.num_read = len(trajectory)
        self.is_open = not chat.ends(ids)
        if self.takes_turns:
            self.messages.append({"role": "assistant", "content": chat.text(ids)})
            return []
        parsed = chat.parse(ids, before, [tool.schema for tool in self.tools.values()])
        self.messages.append(parsed.message)
        return parsed.calls

    @property
    def counts(self) -> ToolCounts:
        """Calls of the completion."""
        return ToolCounts(
            1, self.num_turns, self.num_calls, self.num_failures, int(self.is_lost), self.seconds
        )

    def calls_of(self, asked: Sequence[Message]) -> list[Call]:
        """Returns the calls that answer a turn.

        **Arguments:**

        - `asked`: the calls that the model wrote.
        """
        if self.takes_turns:
            step = self.environment.step
            turn = {"text": self.messages[-1]["content"], "ids": self.turn_ids}
            names = inspect.signature(step).parameters
            return [Call(step, {name: x for name, x in turn.items() if name in names})]
        return [_call(each, self.tools.get(each["name"])) for each in asked]


class Dialogues(Responder):
    """The dialogues of a batch. Each process runs the calls of its own completions."""

    def __init__(
        self,
        dialogues: dict[int, Dialogue],
        silent: Collection[int],
        chat: ChatFormat,
        calls: Calls,
        limits: ToolLimits,
        failed_before: set[str] | None = None,
    ):
        """**Arguments:**

        - `dialogues`: those of this process, by the number of their trajectory; others may come.
        - `silent`: numbers of this process's trajectories that nothing answers.
        - `chat`: format of the turns.
        - `calls`: runs the calls.
        - `limits`: the limits.
        - `failed_before`: kinds of failures of which the run has been told; more are added.
        """
        self.dialogues, self._silent, self._chat = dialogues, silent, chat
        self._calls, self._limits = calls, limits
        self._failed_before = set[str]() if failed_before is None else failed_before
        self._has_warned = False
        self.waited = 0.0
        """Seconds in which all completions waited for calls."""
        self._ready: queue.SimpleQueue[tuple[int, _Turn | BaseException | None]]
        self._ready = queue.SimpleQueue()

    def take(self, number: int, trajectory: Trajectory) -> None:
        if number in self._silent:
            self._ready.put((number, None))
        if (dialogue := self.dialogues.get(number)) is None:
            return  # of another process
        try:
            self._start(number, dialogue, dialogue.read(trajectory, self._chat))
        except Exception as error:  # for all processes to raise
            self._ready.put((number, error))

    def _start(self, number: int, dialogue: Dialogue, asked: Sequence[Message]) -> None:
        """Starts the calls of a turn; their answers become ready."""
        most, calls = self._limits.max_iterations, dialogue.calls_of(asked)
        if not calls or dialogue.is_lost or (most is not None and dialogue.num_turns >= most):
            self._ready.put((number, None))
            return
        dialogue.num_turns += 1
        dialogue.num_calls += len(calls)
        is_shared = dialogue.environment is None
        running = (self._calls.together if is_shared else self._calls.in_order)(calls)

        def note(done: concurrent.futures.Future[list[Outcome]]) -> None:
            try:
                self._ready.put((number, _Turn(asked, done.result())))
            except BaseException as error:
                self._ready.put((number, error))

        running.add_done_callback(note)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        start = time.monotonic()
        try:
            return self._replies(wait)
        finally:
            self.waited += (time.monotonic() - start) * wait

    def _replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        checked = time.monotonic()
        seconds = GRACE if jax.process_count() == 1 else _BETWEEN_EXCHANGES
        while True:
            own = raise_on_all_hosts(lambda: self._own(seconds if wait else 0.0))
            found = [reply for each in gather_json(own) for reply in each]
            if found or not wait:
                return [(number, ids) for number, ids in found]
            if time.monotonic() - checked >= GRACE:
                raise_on_all_hosts(self._calls.check_loop)
                checked = time.monotonic()

    def _own(self, seconds: float) -> list[tuple[int, list[int] | None]]:
        """Returns the replies that are there, after waiting for the first.

        They are rendered here, not where calls end: templates are rendered by one thread alone.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._ready.get(timeout=seconds) if seconds else self._ready.get_nowait())
            while True:
                found.append(self._ready.get_nowait())
        replies = []
        for number, turn in found:
            if isinstance(turn, BaseException):
                raise turn
            reply = None if turn is None else self._reply(self.dialogues[number], turn)
            replies.append((number, reply))
        return replies

    def _reply(self, dialogue: Dialogue, turn: "_Turn") -> list[int] | None:
        """Adds the answers to a dialogue, and returns them as the model reads them."""
        dialogue.seconds += sum(outcome.seconds for outcome in turn.outcomes)
        answers = (self._observed if dialogue.takes_turns else self._told)(dialogue, turn)
        late = [x.error for x in turn.outcomes if isinstance(x.error, StillRunsError)]
        if dialogue.environment is not None and late:
            self._lose(dialogue, "a call of", late[0])
        if not answers or dialogue.is_lost:
            return None
        ids = answers[0].pop(_IDS, None)
        if ids is None:
            ids = self._chat.suffix_ids(answers, with_end=dialogue.is_open)
        dialogue.messages += answers
        dialogue.num_read += len(ids)
        return ids

    def _lose(self, dialogue: Dialogue, what: str, error: BaseException) -> None:
        """Gives an environment up, with a warning for the first of a batch."""
        if not dialogue.is_lost and not self._has_warned:
            self._has_warned = True
            name = class_name(dialogue.environment)
            warn(
                f"{what} environment {name} {failure_of(error)}: its completion is left out; "
                f"tools/num_lost counts them"
            )
        dialogue.is_lost = True

    def _told(self, dialogue: Dialogue, turn: "_Turn") -> list[Message]:
        """Returns the answers of tools; an error is an answer, too."""
        answers: list[Message] = []
        for call, outcome in zip(turn.asked, turn.outcomes, strict=True):
            content, error = "", outcome.error
            try:
                content = str(joined_blocks(outcome.result))
            except Exception as failed:  # such as of an integer that is too long for Python
                error = failed
            if error is not None:
                self._count_failure(dialogue, f"tool {call['name']}", error)
                self._tell(call["name"], error)
                content = str({"error": text_of(error)})
            answers.append({"role": "tool", "name": call["name"], "content": self._cut(content)})
        return answers

    def _observed(self, dialogue: Dialogue, turn: "_Turn") -> list[Message]:
        """Returns what an environment shows after a turn; nothing if the completion ends."""
        (outcome,) = turn.outcomes
        step, error = outcome.result, outcome.error
        tokenizer = self._chat.tokenizer.tokenizer
        if error is None and (fault := _fault_of(step, len(tokenizer))) is not None:
            error = ReturnedError(fault)
        if error is not None:
            self._count_failure(dialogue, f"step of {class_name(dialogue.environment)}", error)
            self._lose(dialogue, "step of", error)
            return []
        dialogue.environment.total_reward += _reward_of(step)
        if step.done or dialogue.num_turns == self._limits.max_iterations:
            return []
        if isinstance(step.observation, str):
            return [{"role": "user", "content": self._cut(step.observation)}]
        parts = self._cut_ids([int(x) for x in step.observation])
        text = "...".join(tokenizer.decode(part) for part in parts)
        return [{"role": "user", "content": text, _IDS: [x for part in parts for x in part]}]

    def _count_failure(self, dialogue: Dialogue, caller: str, error: BaseException) -> None:
        """Counts a call that failed; raises `RunError` where failures stop the run."""
        dialogue.num_failures += 1
        if self._limits.failures == "stop" and not isinstance(error, _MistakeError):
            raise RunError(
                f"{caller} {failure_of(error)}: fix it, or set tool_failures to answer, which goes "
                f"on without it."
            ) from error

    def _tell(self, name: str, error: BaseException) -> None:
        """Warns of a tool's first failure of each kind that is not a mistake of the model."""
        said = f"tool {name} {failure_of(error)}"
        kind = re.split("[:(]", said)[0]  # without the text of the error
        if kind not in self._failed_before and not isinstance(error, _MistakeError):
            self._failed_before.add(kind)
            warn(
                f"{said}: the model reads the error as its answer; "
                f"tools/failure_frequency has the share of calls that fail"
            )

    def _cut(self, content: str) -> str:
        """Cuts an answer to the limit of its tokens; it has text that can be encoded."""
        content = content.encode(errors="replace").decode()
        most = self._limits.max_response_length
        tokenizer = self._chat.tokenizer.tokenizer
        if most is None or len(content.encode()) <= most:  # a token has a byte at least
            return content
        parts = self._cut_ids(tokenizer(content, add_special_tokens=False)["input_ids"])
        return content if len(parts) == 1 else "...".join(map(tokenizer.decode, parts))

    def _cut_ids(self, ids: list[int]) -> list[list[int]]:
        """Cuts tokens to the limit; returns the two parts that are left, or all as one."""
        most = self._limits.max_response_length
        if most is None or len(ids) <= most:
            return [ids]
        first = {"left": most, "middle": most // 2, "right": 0}[self._limits.truncate_side]
        return [ids[:first], ids[len(ids) - (most - first) :]]


class _Turn(NamedTuple):
    """Calls that have ended."""

    asked: Sequence[Message]
    """The calls as the model wrote them."""
    outcomes: Sequence[Outcome]


class _MistakeError(ValueError):
    """A call of the model that no function can answer."""


def _reward_of(step: Step) -> float:
    """Returns the reward of a step, which may be an array's scalar; NaN for what is no number."""
    readings = read_rewards([step.reward], 1)
    reward = readings[0] if isinstance(readings, list) else None
    return reward if isinstance(reward, float) else math.nan


def _fault_of(step: object, vocab_size: int) -> str | None:
    """Returns what `step` returned that it must not, with the fix; `None` where all is well."""
    if not isinstance(step, Step):
        return f"{brief(step)}: return a Step, as in Step(observation, reward, done)"
    if math.isnan(_reward_of(step)):
        return f"a Step with the reward {brief(step.reward)}: give a finite number"
    if not (step.done or isinstance(step.observation, str) or is_ids(step.observation, vocab_size)):
        return (
            f"a Step that is not done, with the observation {brief(step.observation)}: give the "
            f"text or the tokens that the model reads next, or done=True"
        )
    return None


def is_ids(value: object, vocab_size: int) -> bool:
    """Returns whether a value is a list, or the like, of at least one of the tokenizer's ids."""
    return (
        isinstance(value, Sequence | np.ndarray)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(x, int | np.integer) and 0 <= x < vocab_size for x in value)
    )


def _call(call: Message, tool: Tool | None) -> Call:
    """Returns the call of a tool; of one that the model calls wrongly, one that says so."""

    def mistaken(text: str) -> None:
        raise _MistakeError(text)

    if tool is None:
        return Call(mistaken, {"text": f"Tool {call['name']} not found."})
    try:
        inspect.signature(tool.func).bind(**call["arguments"])
    except TypeError as error:
        return Call(mistaken, {"text": f"{call['name']}() {first_line(error)}"})
    return Call(tool.func, copy.deepcopy(call["arguments"]))
