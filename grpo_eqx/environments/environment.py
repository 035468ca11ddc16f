"""Environments that take whole turns of the model, such as games and simulators."""

import abc
from typing import Any, NamedTuple

from grpo_eqx.data.prompts import Conversation


class Step(NamedTuple):
    """Outcome of a turn of the model."""

    observation: str | None = None
    """Text that the model reads next, as a message of the user; `None` where `done`."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the completion ends."""


class Environment(abc.ABC):
    """Environment whose `step` takes each turn of the model as text. Subclass it for a game.

    Each completion has an instance of its own. Instances are made without arguments, and used
    again. `reset` and `step` can be `async`. Classes that are not subclasses of this one have
    TRL's contract: their public methods are tools.
    """

    total_reward: float = 0.0
    """Sum of the rewards of a completion's steps so far, which the run sets to 0 before `reset`."""

    @abc.abstractmethod
    def reset(self, **row: Any) -> str | Conversation | None:
        """Begins anew for a row of the data.

        **Arguments:**

        - `row`: the row's columns, `prompt` among them; a `reset` that names some gets those.

        **Returns:** a text that is appended to the prompt's last message, or messages that replace
        the prompt.
        """

    @abc.abstractmethod
    def step(self, text: str) -> Step:
        """Takes a turn of the model.

        **Arguments:**

        - `text`: the turn, without its end token.
        """

    def get_reward(self) -> float:
        """Returns the reward of a completion that has ended, by default `total_reward`."""
        return self.total_reward

    def close(self) -> None:  # noqa: B027
        """Frees what the instance holds. It is not used after that."""
