"""Arguments of a reward function, and its outcome for each completion."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import RewardError
from grpo_eqx.data.acted import Acted
from grpo_eqx.data.prompts import Conversation, Prompt, last_text, quoted
from grpo_eqx.rewards.contract import Reading, reason_of
from grpo_eqx.rewards.logged import Log, LoggingCall

ENVIRONMENTS = "environments"
"""Argument of reward functions in runs with environments."""
_LONGEST_QUOTE = 60
_CONSTANTS = frozenset({str, bytes, int, float, complex, bool, type(None)})


@dataclasses.dataclass(frozen=True)
class Samples:
    """Arguments of a reward function: parallel lists with one entry per completion."""

    prompts: list[str | Conversation]
    completions: list[str | Conversation]
    """Texts; for a prompt that is a conversation, a list with the assistant's message, as in
    TRL."""
    columns: Mapping[str, list[Any]]
    environments: list[Any] | None = None
    """Environments that completions acted in, which functions get as they are."""
    log: Log = dataclasses.field(default_factory=Log)
    """Log of the functions that are called."""
    chosen_of_all: Sequence[int] | None = None
    """Numbers of these completions among all, where they are some of them."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
        acted: Acted | None = None,
        log: Log | None = None,
    ) -> "Samples":
        """Flattens `completions[p][g]` and their tokens, and repeats the prompts' columns.

        Completions that act are lists of messages, all of those after the prompt.
        """
        rows = [prompt for prompt in prompts for _ in range(len(completions[0]))]
        columns: dict[str, list[Any]] = {
            "completion_ids": [ids for of_prompt in completion_ids for ids in of_prompt]
        }
        columns |= {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        texts = [text for of_prompt in completions for text in of_prompt]
        answers: list[str | Conversation] = [
            text if isinstance(row.content, str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        environments, contents = None, [row.content for row in rows]
        if acted is not None:
            contents = list(acted.prompts)
            answers = [own if isinstance(own, str) else list(own) for own in acted.messages]
            columns |= {name: list(values) for name, values in acted.columns.items()}
            if any(each is not None for each in acted.environments):
                environments = list(acted.environments)
        log = Log() if log is None else log
        return cls(contents, answers, columns, environments, log)

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of these completions among all that are rewarded."""
        return range(len(self)) if self.chosen_of_all is None else self.chosen_of_all

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of a call, as copies that a function may change."""
        columns = {"prompts": self.prompts, "completions": self.completions, **self.columns}
        objects = dict[int, Any]()
        arguments = {
            name: [_copied(value, objects) for value in values] for name, values in columns.items()
        }
        if self.environments is not None:
            arguments[ENVIRONMENTS] = list(self.environments)
        return arguments

    def call(self, func: str) -> LoggingCall:
        """Returns what a call of the function with that name logs with."""
        return LoggingCall(self.log, func, self.numbers)

    def chosen(self, indices: Sequence[int]) -> "Samples":
        """Returns the arguments for some completions."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        environments = self.environments
        return Samples(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            columns,
            None if environments is None else [environments[i] for i in indices],
            self.log,
            [self.numbers[i] for i in indices],
        )

    def one(self, index: int) -> "Samples":
        """Returns the arguments for one completion, as lists of length one."""
        return self.chosen([index])

    def named(self, index: int) -> str:
        """Names a completion in a message."""
        text, prompt = (
            quoted(full, _LONGEST_QUOTE)
            for full in map(last_text, (self.completions[index], self.prompts[index]))
        )
        return f"completion {index} of {len(self)} ({text}, to the prompt {prompt})"


def _copied(value: Any, objects: dict[int, Any]) -> Any:
    """Copies a value of a column, with its containers. Objects that refuse are passed as they are.

    **Arguments:**

    - `value`: the value.
    - `objects`: copies made so far, of objects that are not containers, such as an image that all
      completions of a prompt share.
    """
    if type(value) in _CONSTANTS:
        return value
    if type(value) is list and _CONSTANTS.issuperset(map(type, value)):  # ids: many, so fast
        return value.copy()
    try:
        return copy.deepcopy(value, {} if isinstance(value, list | dict | tuple | set) else objects)
    except Exception:
        return value


@dataclasses.dataclass(frozen=True)
class Failure:
    """Failure of a function to reward a completion."""

    reason: str
    """Continuation of a sentence that begins with the function's name."""
    cause: BaseException | None = None


Outcome = float | None | Failure
"""A finite reward, `None` if the function does not apply, or a failure."""


def raised(error: BaseException) -> Failure:
    """Returns the failure of a function that raised an error."""
    return Failure(reason_of(error), error)


def outcomes_of(name: str, readings: Sequence[Reading] | str) -> list[Outcome]:
    """Returns readings as outcomes; raises `RewardError` if the function broke its contract."""
    if isinstance(readings, str):
        raise RewardError(f"reward function {name} {readings}")
    return [Failure(each) if isinstance(each, str) else each for each in readings]
