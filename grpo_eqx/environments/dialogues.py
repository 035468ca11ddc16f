"""Dialogues of completions with tools: calls are run, and answered in the template's format."""

import concurrent.futures
import dataclasses
import json
import queue
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_eqx.common.errors import RunError, first_line
from grpo_eqx.common.event_loop import GRACE
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.distributed.exchange import gather_bytes, raise_on_all_hosts
from grpo_eqx.environments.calls import Call, Calls, Outcome
from grpo_eqx.environments.chat_format import ChatFormat, Message
from grpo_eqx.environments.tools import Tool
from grpo_eqx.generation.sampler import Responder

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
    """Side at which a longer answer is cut."""
    failures: Literal["answer", "stop"] = "answer"
    """Whether the model is told what a call raised, or the run stops."""


@dataclasses.dataclass
class Dialogue:
    """A completion with the tools that it can call."""

    tools: Mapping[str, Tool]
    is_stateful: bool = False
    """Whether the calls of a turn run one after the other, as they change one environment."""
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


class Dialogues(Responder):
    """The dialogues of a batch. Each process runs the calls of its own completions."""

    def __init__(
        self,
        dialogues: Mapping[int, Dialogue],
        chat: ChatFormat,
        calls: Calls,
        limits: ToolLimits,
        num_processes: int = 1,
    ):
        """**Arguments:**

        - `dialogues`: those of this process, by the number of their trajectory.
        - `chat`: format of the turns.
        - `calls`: runs the calls.
        - `limits`: the limits.
        - `num_processes`: number of processes of the run.
        """
        self.dialogues, self._chat, self._calls, self._limits = dialogues, chat, calls, limits
        self._num_processes = num_processes
        self._ready: queue.SimpleQueue[tuple[int, list[int] | BaseException | None]]
        self._ready = queue.SimpleQueue()

    def take(self, number: int, trajectory: Trajectory) -> None:
        if (dialogue := self.dialogues.get(number)) is None:
            return  # of another process
        try:
            self._start(number, dialogue, dialogue.read(trajectory, self._chat))
        except Exception as error:  # for all processes to raise
            self._ready.put((number, error))

    def _start(self, number: int, dialogue: Dialogue, calls: Sequence[Message]) -> None:
        """Starts the calls of a turn; their answers become ready."""
        most = self._limits.max_iterations
        if not calls or (most is not None and dialogue.num_turns >= most):
            self._ready.put((number, None))
            return
        dialogue.num_turns += 1
        dialogue.num_calls += len(calls)
        known = [dialogue.tools.get(call["name"]) for call in calls]
        to_run = [
            Call(_unknown if tool is None else tool.func, _arguments(call, tool))
            for call, tool in zip(calls, known, strict=True)
        ]
        run = self._calls.in_order if dialogue.is_stateful else self._calls.together

        def answer(done: concurrent.futures.Future[list[Outcome]]) -> None:
            try:
                reply: Any = self._answered(dialogue, calls, done.result())
            except BaseException as error:
                reply = error
            self._ready.put((number, reply))

        run(to_run).add_done_callback(answer)

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
        """Returns the replies that are there, after waiting for the first."""
        found = []
        try:
            found.append(
                self._ready.get_nowait() if seconds == 0 else self._ready.get(timeout=seconds)
            )
            while True:
                found.append(self._ready.get_nowait())
        except queue.Empty:
            pass
        if not found and seconds == self._patience() and seconds:
            raise RunError(
                "an async tool blocks its event loop, so that no call can go on: await whatever it "
                "waits for, or make it a plain function, which runs in a thread."
            )
        for _, reply in found:
            if isinstance(reply, BaseException):
                raise reply
        return found  # type: ignore[return-value]

    def _patience(self) -> float | None:
        """Returns the seconds within which some call must end."""
        timeout = self._limits.timeout
        most = max((len(d.tools) for d in self.dialogues.values()), default=1)
        return None if timeout is None else timeout * max(most, 1) + GRACE

    def _answered(
        self, dialogue: Dialogue, calls: Sequence[Message], outcomes: Sequence[Outcome]
    ) -> list[int]:
        """Adds the answers to a dialogue, and returns them as the model reads them."""
        answers: list[Message] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            dialogue.seconds += outcome.seconds
            content = str(outcome.result)
            if outcome.error is not None:
                dialogue.num_failures += 1
                content = str({"error": str(outcome.error)})
                if self._limits.failures == "stop":
                    raise RunError(
                        f"tool {call['name']} raised {type(outcome.error).__name__}: "
                        f"{first_line(outcome.error)}: fix it, or set tool_failures to answer, "
                        f"which tells the model."
                    ) from outcome.error
            answers.append({"role": "tool", "name": call["name"], "content": self._cut(content)})
        ids = self._chat.suffix_ids(answers)
        dialogue.messages += answers
        dialogue.num_read += len(ids)
        return ids

    def _cut(self, content: str) -> str:
        """Cuts an answer to the limit of its tokens."""
        most = self._limits.max_response_length
        tokenizer = self._chat.tokenizer.tokenizer
        if most is None or len(content) <= most:  # a token has a character at least
            return content
        ids = tokenizer(content, add_special_tokens=False)["input_ids"]
        if len(ids) <= most:
            return content
        side, mark = self._limits.truncate_side, "..."
        first = {"left": 0, "middle": most // 2, "right": most}[side]
        parts = [ids[:first], ids[len(ids) - (most - first) :]]
        return mark.join(tokenizer.decode(part) for part in parts)


def _unknown(**arguments: Any) -> None:
    raise ValueError(f"Tool {arguments['name']} not found.")


def _arguments(call: Message, tool: Tool | None) -> Mapping[str, Any]:
    arguments = call["arguments"]
    if tool is None:
        return {"name": call["name"]}
    return arguments if isinstance(arguments, Mapping) else {}
