"""Metrics and columns that reward functions log, with the arguments that TRL passes for it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_eqx.common.clean_text import is_name
from grpo_eqx.common.column_names import SHOWN_COLUMNS, TOKEN_COLUMNS
from grpo_eqx.common.errors import RewardError, UserError, shown
from grpo_eqx.common.logged_metrics import metric_value
from grpo_eqx.rewards.contract import as_python

OF_TRAINING = "trainer_state", "log_extra", "log_metric"
"""Arguments that functions get in training, if they name them."""
_TAKEN = *SHOWN_COLUMNS, *TOKEN_COLUMNS
_LARGEST_INT = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """State of a run, with the names that it has in TRL."""

    global_step: int
    """Steps that were done before this one."""
    max_steps: int
    """Steps of the whole run: its setting `steps`."""


@dataclasses.dataclass(frozen=True)
class Logged:
    """Metrics and columns that functions have logged of some completions."""

    number: int
    """Number of completions."""
    metrics: Mapping[str, Sequence[float]]
    """All values by the name of their metric, also those of completions that were replaced."""
    columns: Mapping[str, Sequence[Any]]
    """Values by the name of their column, one per completion; `None` where there is none."""

    def joined(self, other: "Logged") -> "Logged":
        """Returns what was logged of these completions, followed by that of others."""
        return Logged(
            self.number + other.number,
            {
                name: [*self.metrics.get(name, ()), *other.metrics.get(name, ())]
                for name in {**self.metrics, **other.metrics}
            },
            {
                name: [*self._column(name), *other._column(name)]
                for name in {**self.columns, **other.columns}
            },
        )

    def of(self, numbers: Sequence[int]) -> "Logged":
        """Returns what was logged of the completions with these numbers, and all metrics."""
        columns = {name: [values[i] for i in numbers] for name, values in self.columns.items()}
        return Logged(len(numbers), self.metrics, columns)

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric."""
        return {name: float(np.mean(values)) for name, values in sorted(self.metrics.items())}

    def table(self) -> dict[str, list[Any]]:
        """Returns the columns with values of one type each: of several types, they are texts."""
        return {name: _of_one_type(values) for name, values in sorted(self.columns.items())}

    def _column(self, name: str) -> Sequence[Any]:
        return self.columns.get(name, [None] * self.number)


class Log:
    """Collects what functions log of completions, in calls for all of them or for some."""

    def __init__(
        self,
        state: TrainerState | None = None,
        passed: Mapping[str, frozenset[str]] | None = None,
    ):
        """**Arguments:**

        - `state`: the state of the run.
        - `passed`: which arguments of `OF_TRAINING` functions get, by the functions' names.
        """
        self.state = state
        self.passed = {} if passed is None else passed
        self._metrics = dict[str, list[float]]()
        self._columns = dict[str, dict[int, Any]]()
        self._owners = dict[str, str]()

    def add(
        self,
        func: str,
        numbers: Sequence[int],
        metrics: Mapping[str, Sequence[float]],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Adds what a call has logged; raises `RewardError` for a column of another function.

        **Arguments:**

        - `func`: the function's name.
        - `numbers`: the numbers of the completions that it was called with.
        - `metrics`, `columns`: the values of its metrics, and of columns, one per completion.
        """
        for name, values in metrics.items():
            self._metrics.setdefault(name, []).extend(values)
        for name, values in columns.items():
            if (owner := self._owners.setdefault(name, func)) != func:
                both = " and ".join(sorted((owner, func)))
                raise RewardError(
                    f"reward functions {both} both log the column {name!r}: choose "
                    f"another name in one of them."
                )
            self._columns.setdefault(name, {}).update(zip(numbers, values, strict=True))

    def logged(self, number: int) -> Logged:
        """Returns what was logged of that many completions."""
        columns = {
            name: [values.get(i) for i in range(number)] for name, values in self._columns.items()
        }
        return Logged(number, self._metrics, columns)


class LoggingCall:
    """A call of a function: what it logs counts only if it does not fail."""

    def __init__(self, log: Log, func: str, numbers: Sequence[int]):
        """**Arguments:**

        - `log`: where to add what the call logs.
        - `func`: the name of the function.
        - `numbers`: the numbers of the completions that it is called with.
        """
        self._log, self._func, self._numbers = log, func, numbers
        self._who = f"reward function {func}"
        self._metrics = dict[str, list[float]]()
        self._columns = dict[str, list[Any]]()
        self._error: RewardError | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the function gets because it names them."""
        values = zip(OF_TRAINING, (self._log.state, self._extra, self._metric), strict=True)
        named = self._log.passed.get(self._func, ())
        return {name: value for name, value in values if name in named}

    def end(self, *, failed: bool) -> None:
        """Adds what was logged to the log, unless the call has failed.

        Raises `RewardError` if something could not be logged.
        """
        if self._error is not None:
            raise self._error
        if not failed:
            self._log.add(self._func, self._numbers, self._metrics, self._columns)

    def _metric(self, name: Any, value: Any) -> None:
        """Logs a value of a metric of the step: `log_metric`."""
        try:
            number = metric_value(self._who, name, value)
        except UserError as error:
            raise self._refused(str(error)) from error
        if not math.isfinite(number):
            raise self._refused(f"{self._who} logs {name!r} as {number}: log finite numbers.")
        self._metrics.setdefault(name, []).append(number)

    def _extra(self, column: Any, values: Any) -> None:
        """Logs a column of the completions table: `log_extra`."""
        if not is_name(column) or column in _TAKEN or column.startswith("rewards/"):
            raise self._refused(
                f"{self._who} logs the column {shown(column)}: give it a name that is a text, and "
                f"none of the table's own ({', '.join(_TAKEN)}, rewards/...)."
            )
        expected, listed = len(self._numbers), as_python(values)
        if not isinstance(listed, list | tuple) or len(listed) != expected:
            got = f"a list of {len(listed)}" if isinstance(listed, list | tuple) else shown(values)
            raise self._refused(
                f"{self._who} logs the column {column!r} with {got} for {expected} completions: "
                f"pass a list with a value (or None) for each."
            )
        self._columns[column] = [_recordable(value) for value in listed]

    def _refused(self, message: str) -> RewardError:
        """Returns an error to raise, which the call then ends with even if the function goes on."""
        self._error = RewardError(message)
        return self._error


def _recordable(value: Any) -> bool | int | float | str | None:
    """Returns a value as JSON and tables can hold it: numbers as they are, and others as text."""
    value = as_python(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST_INT:
        return int(value)
    if isinstance(value, float):
        return float(value)
    return str(value).encode(errors="replace").decode()  # halves of pairs cannot be written


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1:
        return list(values)
    kind = float if types == {int, float} else str
    return [None if value is None else kind(value) for value in values]
