"""Dialogues: results of acting besides trajectories."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.data.prompts import Conversation


class ToolCounts(NamedTuple):
    """Calls of tools and of environments in completions, and requests of agents."""

    completions: float = 1
    turns: float = 0
    """Turns that were answered."""
    calls: float = 0
    failures: float = 0
    """Calls that raised, took too long, or named no tool."""
    lost: float = 0
    """Completions whose environment or agent failed."""
    seconds: float = 0.0
    """Seconds of all calls, which may overlap, or of the agents."""
    requests: float = 0
    """Requests of agents that were answered."""
    forks: float = 0
    """Trajectories that agents began besides the first of a completion."""
    drifted_tokens: float = 0
    """Tokens of answers that agents have changed, and that are not trained."""
    refused: float = 0
    """Requests of agents for which there was no room."""


@dataclasses.dataclass(frozen=True, eq=False)
class Acted:
    """Dialogues of completions, one after the other."""

    prompts: Sequence[str | Conversation]
    """Content of each completion's prompt, with what its environment added."""
    messages: Sequence[str | Conversation]
    """Messages of each completion, all of those after the prompt; or its text."""
    environments: Sequence[Any]
    """Environment of each completion; `None` where it has none, or another process has it."""
    each: Sequence[ToolCounts]
    """Calls in each completion."""
    waited: float = 0.0
    """Seconds in which none decoded, because all waited for calls."""
    columns: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """Further arguments of reward functions by name, each with a value for every completion."""

    @property
    def lost(self) -> list[bool]:
        """True where the environment failed: the completion has no rewards."""
        return [counts.lost > 0 for counts in self.each]

    @property
    def counts(self) -> ToolCounts:
        """Calls in all of them."""
        return ToolCounts(*map(sum, zip(*self.each, strict=True)))

    def of(self, numbers: Iterable[int]) -> "Acted":
        """Returns the dialogues of some completions, without the seconds that all waited."""
        own = list(numbers)
        return Acted(
            [self.prompts[n] for n in own],
            [self.messages[n] for n in own],
            [self.environments[n] for n in own],
            [self.each[n] for n in own],
            columns={name: [values[n] for n in own] for name, values in self.columns.items()},
        )

    def joined(self, other: "Acted") -> "Acted":
        """Returns these dialogues, followed by others."""
        return Acted(
            [*self.prompts, *other.prompts],
            [*self.messages, *other.messages],
            [*self.environments, *other.environments],
            [*self.each, *other.each],
            self.waited + other.waited,
            {
                name: [
                    x
                    for acted in (self, other)
                    for x in acted.columns.get(name, [None] * len(acted.each))
                ]
                for name in {**self.columns, **other.columns}
            },
        )


def as_text(messages: str | Conversation) -> str:
    """Returns a dialogue as text to be read, with calls and answers in brackets."""
    if isinstance(messages, str):
        return messages
    parts = []
    for message in messages:
        content = str(message["content"]).strip()
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
            written = (f"[call {call['name']}({_arguments(call)})]" for call in calls)
            parts += [*[content] * bool(content), *written]
        else:
            parts.append(f"[{message.get('name', message['role'])}: {content}]")
    return "\n".join(parts)


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    if not isinstance(arguments, Mapping):
        return str(arguments)
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
