"""Dialogues: results of acting besides trajectories."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.data.prompts import Conversation


class ToolCounts(NamedTuple):
    """Calls of tools and of environments in completions."""

    completions: float
    turns: float
    """Turns that were answered."""
    calls: float
    failures: float
    """Calls that raised, took too long, or named no tool."""
    lost: float
    """Completions whose environment failed."""
    seconds: float
    """Seconds of all calls, which may overlap."""
    waited: float = 0.0
    """Seconds in which no completion decoded, because all waited for calls."""

    def plus(self, other: "ToolCounts") -> "ToolCounts":
        """Adds the calls of other completions."""
        return ToolCounts(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True, eq=False)
class Acted:
    """Dialogues of completions, one after the other."""

    prompts: Sequence[str | Conversation]
    """Content of each completion's prompt, with what its environment added."""
    messages: Sequence[Conversation]
    """Messages of each completion, all of those after the prompt."""
    environments: Sequence[Any]
    """Environment of each completion; `None` where it has none, or another process has it."""
    lost: Sequence[bool]
    """True where the environment failed: the completion has no rewards."""
    counts: ToolCounts | None = None
    """Calls in all of them; `None` for a part."""

    def of(self, numbers: Iterable[int]) -> "Acted":
        """Returns the dialogues of some completions."""
        own = list(numbers)
        return Acted(
            [self.prompts[n] for n in own],
            [self.messages[n] for n in own],
            [self.environments[n] for n in own],
            [self.lost[n] for n in own],
        )

    def joined(self, other: "Acted") -> "Acted":
        """Returns these dialogues, followed by others."""
        counts = None
        if self.counts is not None and other.counts is not None:
            counts = self.counts.plus(other.counts)
        return Acted(
            [*self.prompts, *other.prompts],
            [*self.messages, *other.messages],
            [*self.environments, *other.environments],
            [*self.lost, *other.lost],
            counts,
        )


def as_text(messages: Conversation) -> str:
    """Returns a dialogue as text to be read, with calls and answers in brackets."""
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
