"""Dialogues of completions with tools: calls are run, and answered in the template's format."""

import concurrent.futures
import dataclasses
import inspect
import json
import math
import numbers
import queue
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpo_eqx.common.errors import RunError, class_name, first_line
from grpo_eqx.common.event_loop import GRACE
from grpo_eqx.common.plain_data import brief
from grpo_eqx.data.acted import ToolCounts
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.distributed.exchange import gather_bytes, raise_on_all_hosts
from grpo_eqx.environments.calls import Call, Calls, Outcome, StillRunsError
from grpo_eqx.environments.chat_format import ChatFormat, Message
from grpo_eqx.environments.environment import Step
from grpo_eqx.environments.tools import Tool
from grpo_eqx.generation.sampler import Responder
from grpo_eqx.settings.config import GRPOConfig

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
    messages: list[Message] = dataclasses.field(default_factory=list)
    """Messages of the completion, the model's and the answers."""
    num_read: int = 0
    """Tokens of the completion that `messages` hold."""
    num_turns: int = 0
    """Turns whose calls were run."""
    num_calls: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    """Seconds of all calls."""
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
        schemas = [tool.schema for tool in self.tools.values()]
        parsed = chat.parse(trajectory.ids[self.num_read :].tolist(), before, schemas)
        self.messages.append(parsed.message)
        self.num_read = len(trajectory)
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
            return [Call(self.environment.step, {"text": self.messages[-1]["content"]})]
        return [_call(each, self.tools.get(each["name"]), self.is_lost) for each in asked]


class Dialogues(Responder):
    """The dialogues of a batch. Each process runs the calls of its own completions."""

    def __init__(
        self,
        dialogues: Mapping[int, Dialogue],
        silent: Collection[int],
        chat: ChatFormat,
        calls: Calls,
        limits: ToolLimits,
        num_processes: int = 1,
    ):
        """**Arguments:**

        - `dialogues`: those of this process, by the number of their trajectory.
        - `silent`: numbers of this process's trajectories that nothing answers.
        - `chat`: format of the turns.
        - `calls`: runs the calls.
        - `limits`: the limits.
        - `num_processes`: number of processes of the run.
        """
        self.dialogues, self._silent, self._chat = dialogues, silent, chat
        self._calls, self._limits = calls, limits
        self._num_processes = num_processes
        self._most_calls = 1
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
        if not calls or (most is not None and dialogue.num_turns >= most):
            self._ready.put((number, None))
            return
        dialogue.num_turns += 1
        dialogue.num_calls += len(calls)
        self._most_calls = max(self._most_calls, len(calls))
        is_shared = dialogue.environment is None
        running = (self._calls.together if is_shared else self._calls.in_order)(calls)

        def note(done: concurrent.futures.Future[list[Outcome]]) -> None:
            try:
                self._ready.put((number, _Turn(asked, done.result())))
            except BaseException as error:
                self._ready.put((number, error))

        running.add_done_callback(note)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        if self._num_processes == 1:
            return self._own(self._patience() if wait else 0.0)
        while True:
            own = raise_on_all_hosts(lambda: self._own(_BETWEEN_EXCHANGES if wait else 0.0))
            everyone = [json.loads(part) for part in gather_bytes(json.dumps(own).encode())]
            together = [(number, ids) for each in everyone for number, ids in each]
            if together or not wait:
                return together

    def _own(self, seconds: float | None) -> list[tuple[int, list[int] | None]]:
        """Returns the replies that are there, after waiting for the first.

        They are rendered here, not where calls end: templates are rendered by one thread alone.
        """
        found = []
        try:
            found.append(
                self._ready.get_nowait() if seconds == 0 else self._ready.get(timeout=seconds)
            )
            while True:
                found.append(self._ready.get_nowait())
        except queue.Empty:
            if not found and self._num_processes == 1 and seconds != 0:
                raise RunError(
                    "an async tool blocks its event loop, so that no call can go on: await "
                    "whatever it waits for, or make it a plain function, which runs in a thread."
                ) from None
        replies = []
        for number, turn in found:
            if isinstance(turn, BaseException):
                raise turn
            reply = None if turn is None else self._reply(self.dialogues[number], turn)
            replies.append((number, reply))
        return replies

    def _patience(self) -> float | None:
        """Returns the seconds within which some turn's calls must end."""
        timeout = self._limits.timeout
        return None if timeout is None else timeout * self._most_calls + GRACE

    def _reply(self, dialogue: Dialogue, turn: "_Turn") -> list[int] | None:
        """Adds the answers to a dialogue, and returns them as the model reads them."""
        for outcome in turn.outcomes:
            dialogue.seconds += outcome.seconds
            if dialogue.environment is not None and isinstance(outcome.error, StillRunsError):
                dialogue.is_lost = True
        answers = (
            self._observed(dialogue, turn) if dialogue.takes_turns else self._told(dialogue, turn)
        )
        if not answers:
            return None
        ids = self._chat.suffix_ids(answers)
        dialogue.messages += answers
        dialogue.num_read += len(ids)
        return ids

    def _told(self, dialogue: Dialogue, turn: "_Turn") -> list[Message]:
        """Returns the answers of tools; an error is an answer, too."""
        answers: list[Message] = []
        for call, outcome in zip(turn.asked, turn.outcomes, strict=True):
            content, error = "", outcome.error
            try:
                content = _text(outcome.result)
            except Exception as failed:  # such as of an integer that is too long for Python
                error = failed
            if error is not None:
                self._count_failure(dialogue, f"tool {call['name']}", error)
                content = str({"error": str(error)})
            answers.append({"role": "tool", "name": call["name"], "content": self._cut(content)})
        return answers

    def _observed(self, dialogue: Dialogue, turn: "_Turn") -> list[Message]:
        """Returns what an environment shows after a turn; nothing if the completion ends."""
        (outcome,) = turn.outcomes
        step, error = outcome.result, outcome.error
        if error is None and not _is_step(step):
            error = TypeError(f"{brief(step)} is no Step: return Step(observation, reward, done)")
        if error is not None:
            dialogue.is_lost = True
            self._count_failure(dialogue, f"step of {class_name(dialogue.environment)}", error)
            return []
        dialogue.environment.total_reward += step.reward
        if step.done:
            return []
        return [{"role": "user", "content": self._cut(step.observation)}]

    def _count_failure(self, dialogue: Dialogue, caller: str, error: BaseException) -> None:
        """Counts a call that failed; raises `RunError` where failures stop the run."""
        dialogue.num_failures += 1
        if self._limits.failures == "stop" and not isinstance(error, _MistakeError):
            raise RunError(
                f"{caller} raised {type(error).__name__} ({first_line(error)}): fix it, or set "
                f"tool_failures to answer, which goes on without it."
            ) from error

    def _cut(self, content: str) -> str:
        """Cuts an answer to the limit of its tokens; it has text that can be encoded."""
        content = content.encode(errors="replace").decode()
        most = self._limits.max_response_length
        tokenizer = self._chat.tokenizer.tokenizer
        if most is None or len(content.encode()) <= most:  # a token has a byte at least
            return content
        ids = tokenizer(content, add_special_tokens=False)["input_ids"]
        if len(ids) <= most:
            return content
        first = {"left": most, "middle": most // 2, "right": 0}[self._limits.truncate_side]
        parts = [ids[:first], ids[len(ids) - (most - first) :]]
        return "...".join(tokenizer.decode(part) for part in parts)


def _text(result: object) -> str:
    """Returns the text of a tool's result; of a list of blocks with text, their texts."""
    if isinstance(result, list) and result and all(map(_is_text_block, result)):
        return "".join(block["text"] for block in result)
    return str(result)


def _is_text_block(block: object) -> bool:
    return (
        isinstance(block, dict)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
    )


class _Turn(NamedTuple):
    """Calls that have ended."""

    asked: Sequence[Message]
    """The calls as the model wrote them."""
    outcomes: Sequence[Outcome]


class _MistakeError(ValueError):
    """A call of the model that no function can answer."""


def _is_step(value: object) -> bool:
    """Returns whether `step` returned what it should: a text, unless the completion ends."""
    return (
        isinstance(value, Step)
        and isinstance(value.reward, numbers.Real)
        and math.isfinite(value.reward)
        and (bool(value.done) or isinstance(value.observation, str))
    )


def _call(call: Message, tool: Tool | None, is_busy: bool) -> Call:
    """Returns the call of a tool; of one that the model calls wrongly, one that says so.

    **Arguments:**

    - `call`: name and arguments.
    - `tool`: the tool of that name, if there is one.
    - `is_busy`: whether an earlier call may still run in the environment.
    """

    def mistaken(text: str) -> None:
        raise _MistakeError(text)

    if is_busy:
        return Call(mistaken, {"text": "an earlier call still runs"})
    if tool is None:
        return Call(mistaken, {"text": f"Tool {call['name']} not found."})
    try:
        inspect.signature(tool.func).bind(**call["arguments"])
    except TypeError as error:
        return Call(mistaken, {"text": f"{call['name']}() {first_line(error)}"})
    return Call(tool.func, call["arguments"])
