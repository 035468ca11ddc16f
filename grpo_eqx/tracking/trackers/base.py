"""The interface of trackers."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

CompletionsTable = Mapping[str, Sequence[Any]]
"""Columns of a step's table of completions, by name, with one value per completion."""


class Tracker(abc.ABC):
    """Receiver of the metrics of every step and evaluation. Subclass it to send them elsewhere.

    A tracker that raises an error does not end the run, unless it is `metrics.jsonl` itself.
    """

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step`, counted from 1, or of an evaluation after it.

        An evaluation's names start with `eval/`; its step is 0 before the first.
        """

    def completions(self, step: int, table: CompletionsTable) -> None:  # noqa: B027  # optional
        """Shows the completions of `step`; does nothing by default.

        Called for steps with a table of completions, after `log` and before the table's file is
        written. The completions of a group are consecutive.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Writes all that is still buffered. Called once, also after a failure."""
