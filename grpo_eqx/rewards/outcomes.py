"""Arguments of a reward function, and its outcome for each completion."""

import dataclasses
import inspect
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_eqx.data.prompts import Conversation, Prompt, last_text, quoted
from grpo_eqx.errors import RewardError, first_line

_LONGEST_QUOTE = 60


@dataclasses.dataclass(frozen=True)
class Samples:
    """Arguments of a reward function: parallel lists with one entry per completion."""

    prompts: list[str | Conversation]
    completions: list[str | Conversation]
    """Texts; of a prompt that is a conversation, the assistant's message, in a list as in TRL."""
    columns: Mapping[str, list[Any]]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
    ) -> "Samples":
        """Flattens `completions[p][g]`, with their tokens, and repeats the prompts' columns."""
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
        return cls([row.content for row in rows], answers, columns)

    def __len__(self) -> int:
        return len(self.completions)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of a call."""
        return {  # copies: a function may change its arguments
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            **{name: list(values) for name, values in self.columns.items()},
        }

    def one(self, index: int) -> "Samples":
        """Returns one completion's, as lists of length one."""
        columns = {name: [values[index]] for name, values in self.columns.items()}
        return Samples([self.prompts[index]], [self.completions[index]], columns)

    def named(self, index: int) -> str:
        """Names a completion in a message."""
        text, prompt = (
            quoted(full, _LONGEST_QUOTE)
            for full in map(last_text, (self.completions[index], self.prompts[index]))
        )
        return f"completion {index} of {len(self)} ({text}, to the prompt {prompt})"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Failure of a function to reward a completion."""

    reason: str
    """Continues a sentence that begins with the function's name."""
    cause: BaseException | None = None


Outcome = float | None | Failure
"""A finite reward, `None` where the function does not apply, or a failure."""


def raised(error: BaseException) -> Failure:
    """Returns the failure of a function that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    said = first_line(error) if isinstance(error, Exception) else str(error)
    return Failure(f"raised {type(error).__name__}: {said}{where}", error)


def checked(name: str, returned: Any, count: int, *, first: int = 0) -> list[Outcome]:
    """Reads what a function returned for `count` completions, of which one is number `first`.

    Raises `RewardError` where that is anything but a list with one number or `None` for each.
    """
    length = _length(returned)
    if inspect.iscoroutine(returned):
        returned.close()
        raise RewardError(
            f"reward function {name} returned a coroutine: write it as async def, and await what "
            f"it calls."
        )
    if length != count:
        got = repr(returned) if length is None else f"{length} value{'s' if length != 1 else ''}"
        raise RewardError(
            f"reward function {name} returned {got} for {count} "
            f"completion{'s' if count > 1 else ''}: return a list "
            f"with one float (or None) for each."
        )
    outcomes: list[Outcome] = []
    for i, reward in enumerate(returned, first):
        try:
            if isinstance(reward, str | bytes):
                raise TypeError("a string is no number")
            number = None if reward is None else float(reward)
        except (OverflowError, TypeError, ValueError) as error:
            if inspect.iscoroutine(reward):
                _close_all(returned)
                raise RewardError(
                    f"reward function {name} returned a coroutine for completion {i}: write it as "
                    f"async def, and return await asyncio.gather(*those)."
                ) from None
            raise RewardError(
                f"reward function {name} returned {reward!r} for completion {i}: return a float, "
                f"or None where it does not apply."
            ) from error
        finite = number is None or np.isfinite(number)
        outcomes.append(number if finite else Failure(f"returned {reward!r}"))
    return outcomes


def _length(returned: Any) -> int | None:
    """Returns the length of a list, a tuple or an array of any library; `None` of anything else."""
    if isinstance(returned, Sequence):
        return len(returned)
    return len(returned) if hasattr(returned, "__array__") and np.ndim(returned) > 0 else None


def _close_all(rewards: Sequence[Any]) -> None:
    """Closes coroutines that nobody will await, of which Python would warn."""
    for reward in rewards:
        if inspect.iscoroutine(reward):
            reward.close()
