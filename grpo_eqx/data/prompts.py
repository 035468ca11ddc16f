"""Problems, and their sources: pure functions of an index."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Conversation = Sequence[Mapping[str, Any]]
"""Messages with their `role` and `content`, as chat templates take them."""


def last_text(content: str | Conversation) -> str:
    """Returns a text unchanged, or the text of a conversation's last message."""
    return content if isinstance(content, str) else content[-1]["content"]


def quoted(text: str, most: int = 40) -> str:
    """Quotes the start of a text for messages, with dots if it is longer."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem: what the model answers, and the columns that reward functions receive."""

    content: str | Conversation
    """The user's message, or a conversation that ends with it."""
    columns: Mapping[str, Any]
    plain: bool = False
    """Whether `content` is a text that the model continues as it is, without a chat template."""

    @property
    def text(self) -> str:
        """The prompt as one text, for tables and messages."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.content)


class PromptSource(abc.ABC):
    """A fixed sequence of problems. Subclass it to train on data of your own.

    `source[index]` must return the same problem every time: runs are reproduced and resumed by
    index alone. Every problem of a source must have the same columns.
    """

    name: str = ""
    """Short description for messages. Empty: the name of the class."""

    def __str__(self) -> str:
        return self.name or type(self).__name__

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of problems."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Returns problem `index`, for `0 <= index < len(self)`; raises `IndexError` outside."""


SEED = "seed"
"""Column of `Seeds`."""


@dataclasses.dataclass(eq=False)
class Seeds(PromptSource):
    """Problems without a text, numbered in a column `seed`: environments make their prompts."""

    count: int = 10_000
    name: str = "seeds of the environment"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Prompt("", {SEED: index})


@dataclasses.dataclass(eq=False)
class Part(PromptSource):
    """Consecutive problems of a source."""

    source: PromptSource
    start: int
    stop: int
    name: str = ""

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.source[self.start + index]
