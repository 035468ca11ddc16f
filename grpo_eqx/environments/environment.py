"""Environments that take whole turns of the model, such as games and simulators."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_eqx.data.prompts import Conversation


class Step(NamedTuple):
    """Outcome of a turn of the model."""

    observation: str | Sequence[int] | None = None
    """Text that the model reads next, as a message of the user, or tokens, which it reads as they
    are; `None` where `done`."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the completion ends."""


class Environment(abc.ABC):
    """Environment whose `step` takes each turn of the model. Subclass it for a game.

    Each completion has an instance of its own. Instances are made without arguments, and used
    again. `reset` and `step` can be `async`. Classes that are not subclasses of this one have
    TRL's contract: their public methods are tools.
    """

    total_reward: float = 0.0
    """Sum of the rewards of a completion's steps so far, which the run sets to 0 before `reset`."""

    @abc.abstractmethod
    def reset(self, **row: Any) -> str | Conversation | Sequence[int] | None:
        """Begins anew for a row of the data.

        **Arguments:**

        - `row`: the row's columns, `prompt` among them; a `reset` that names some gets those.

        **Returns:** a text that is appended to the prompt's last message, or messages or tokens
        that replace the prompt.
        """

    @abc.abstractmethod
    def step(self, text: str) -> Step:
        """Takes a turn of the model.

        **Arguments:**

        - `text`: the turn, without its end token. A `step` with an argument `ids` gets its tokens,
          end token included, in its place or besides.
        """

    def get_reward(self) -> float:
        """Returns the reward of a completion that has ended, by default `total_reward`."""
        return self.total_reward

    def close(self) -> None:  # noqa: B027
        """Frees what the instance holds. It is not used after that."""
