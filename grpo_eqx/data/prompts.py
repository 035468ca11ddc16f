"""Problems, and their sources: pure functions of an index."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem: the user's message, and the columns that reward functions receive."""

    text: str
    columns: Mapping[str, Any]


class PromptSource(eqx.Module):
    """A fixed sequence of problems. Subclass it to train on data of your own.

    `source[index]` must return the same problem every time: runs are reproduced and resumed by
    index alone. Every problem of a source must have the same columns.
    """

    name: eqx.AbstractVar[str]
    """Short description, printed at the start of a run."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of problems."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Returns problem `index`, for `0 <= index < len(self)`; raises `IndexError` outside."""
