"""Contract of reward functions and tools: how results are read, here and in workers.

Workers load this file without the package, which would import JAX, so it imports only
`grpo_eqx.common.errors` from the package. It imports by name all functions that it calls after a
reward function, because reward functions may replace attributes of modules.
"""

import builtins
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from os import sep
from os.path import dirname
from types import CoroutineType
from typing import Any, TypeGuard

from grpo_eqx.common.errors import class_name, first_line, shown

# The functions of this file keep Python's own names, even if a reward function replaces them.
globals()["__builtins__"] = vars(builtins).copy()

Reading = float | None | str
"""A finite reward, `None` if the function does not apply, or why it has failed."""

_OWN = dirname(dirname(__file__)) + sep
"""Folder of the package."""
NO_REPLY = 74
"""Exit code of a worker whose function has closed the worker's descriptor."""

_TEXTS = str, bytes, bytearray, memoryview
_NUMERIC = re.compile(r"(?<![a-z])(bool(ean)?|u?int|b?float)(?![a-z])", re.IGNORECASE)
"""Names of the dtypes of NumPy, JAX, torch and pandas whose arrays can hold rewards."""


class _BrokenError(Exception):
    """A function did not return a list of rewards. The text continues a sentence about it."""


def read_rewards(returned: Any, count: int, *, first: int = 0) -> list[Reading] | str:
    """Reads what a function returned for `count` completions.

    Allowed is a list, a tuple or an array of any library, with a number or `None` for each
    completion. An exception, or a number that is not a finite float, counts as a failure on its
    completion.

    **Arguments:**

    - `returned`: the result of the function.
    - `count`: the number of completions.
    - `first`: the number of the first completion, for messages.

    **Returns:** the readings, or how the contract is broken, as the continuation of a sentence
    about the function.
    """
    if _is_coroutine(returned):
        returned.close()
        return "returned a coroutine: write it as async def, and await what it calls."
    try:
        rewards = _entries(returned, count)
    except _BrokenError as error:
        return str(error)
    if rewards is None or len(rewards) != count:
        got = (
            shown(returned) if rewards is None else _number_of_values(returned, len(rewards), count)
        )
        return (
            f"returned {got} for {count} completion{'s' if count > 1 else ''}: return a list with "
            f"one float (or None) for each."
        )
    try:
        return [_reading(reward, i) for i, reward in enumerate(rewards, first)]
    except _BrokenError as error:
        for reward in filter(_is_coroutine, rewards):  # else Python warns
            reward.close()
        return str(error)


def read_reward_at(index: int, returned: Any) -> list[Reading] | str:
    """Reads what a function returned for the completion with a number alone."""
    return read_rewards(returned, 1, first=index)


def read_answer_at(index: int, returned: Any) -> str:
    """Reads what a tool returned: its text. Raises `TypeError` for a coroutine."""
    if _is_coroutine(returned):
        returned.close()
        raise TypeError("returned a coroutine: write the tool as async def")
    return str(joined_blocks(returned))


def joined_blocks(value: object) -> object:
    """Returns the text of a list of content blocks that are texts, and other values as they are."""
    if not isinstance(value, list) or not value:
        return value
    texts = [
        x["text"]
        for x in value
        if isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(value) else value


def text_of(error: BaseException) -> str:
    """Returns the text of an error, whose class may fail to give one."""
    try:
        return str.__str__(str(error))  # a plain str, even for a subclass
    except BaseException:
        return first_line(error)


def _is_coroutine(value: object) -> "TypeGuard[CoroutineType[Any, Any, Any]]":
    return type(value) is CoroutineType


def reason_of(error: BaseException) -> str:
    """Describes what a function raised, as the continuation of a sentence about the function."""
    trace = BaseException.__dict__["__traceback__"].__get__(error)  # the class may hide it
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None and not (path := trace.tb_frame.f_code.co_filename).startswith(_OWN):
        where = f" ({path.rpartition(sep)[-1]}, line {trace.tb_lineno})"
    return f"raised {class_name(error)}: {first_line(error)}{where}"


def _entries(returned: Any, count: int) -> list[Any] | None:
    """Lists the first `count` + 1 entries of a result; `None` if it is not a list."""
    try:
        if _is_array(returned):
            returned = list(as_python(returned))
        if isinstance(returned, _TEXTS) or not isinstance(returned, Sequence):
            return None
        return list(islice(returned, count + 1))
    except Exception as error:
        raise _BrokenError(
            f"returned {shown(returned)}, which cannot be read ({class_name(error)}: "
            f"{first_line(error)}): return a list with one float (or None) for each completion."
        ) from error


def _number_of_values(returned: Any, number: int, count: int) -> str:
    """Describes the length of a result, of which `number` entries were read."""
    if number > count:
        with suppress(Exception):
            number = max(len(returned), number)
    return f"{number} value{'' if number == 1 else 's'}"


def _reading(reward: Any, index: int) -> Reading:
    value = reward
    try:
        if _is_array(value):  # scalars of libraries, too
            value = as_python(value)
        if value is None:
            return None
        if isinstance(value, BaseException):
            return reason_of(value)
        if isinstance(value, _TEXTS) or (_is_array(value) and not _holds_numbers(value)):
            raise TypeError("neither a text nor a complex array is a number")
        number = float(value)
    except Exception as error:
        raise _no_number(reward, index) from error
    return number if isfinite(number) else f"returned {shown(reward)}"


def _no_number(reward: Any, index: int) -> _BrokenError:
    if _is_coroutine(reward):
        return _BrokenError(
            f"returned a coroutine for completion {index}: write it as async def, and return await "
            f"asyncio.gather(*those)."
        )
    return _BrokenError(
        f"returned {shown(reward)} for completion {index}: return a float, or None where it does "
        f"not apply."
    )


def _is_array(value: Any) -> bool:
    """Returns whether a value is an array or a scalar of NumPy, JAX, torch or similar libraries."""
    return getattr(type(value), "__array__", None) is not None


def as_python(array: Any) -> Any:
    """Returns an array of numbers as Python numbers, if possible, and anything else unchanged."""
    can = _holds_numbers(array) and getattr(type(array), "tolist", None) is not None
    return array.tolist() if can else array


def _holds_numbers(array: Any) -> bool:
    """Returns whether an array holds real numbers, judging by the name of its dtype."""
    return _NUMERIC.search(str(getattr(array, "dtype", ""))) is not None
