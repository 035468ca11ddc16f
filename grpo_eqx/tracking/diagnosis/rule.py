"""Rules, and their findings."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from grpo_eqx.tracking.diagnosis.history import History

Kind = Literal["sickness", "note"]
"""`sickness`: something is wrong. `note`: it looks wrong, but is right."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding in the metrics of a run, in words and numbers."""

    rule: str
    """Name of the rule."""
    step: int
    """First step that shows it."""
    text: str
    """Sentence on what is wrong, with the numbers of that step."""
    advice: str
    """Sentence on what to do."""
    kind: Kind = "sickness"
    last_step: int | None = None
    """Last step that shows it; `None` while the run goes on."""

    def span(self, last: int) -> str:
        """Names the steps that show it, in a run whose last step is `last`."""
        if self.kind == "note" or self.last_step == self.step == last:
            return f"step {self.step}"
        if self.last_step in (None, last):
            return f"since step {self.step}"
        if self.last_step == self.step:
            return f"at step {self.step} only"
        return f"from step {self.step} to {self.last_step}"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Observation of a rule after a step or an evaluation."""

    text: str
    advice: str | None = None
    """Advice that fits better than the rule's."""
    subject: str = ""
    """Name of its subject, such as a reward function. There is one finding per subject."""
    kind: Kind | None = None
    """Kind of this observation, if it differs from the rule's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A sickness that metrics show, its usual cause, and what to do."""

    name: str
    metric: str
    """Name of the metric that the rule reads first; `{...}` stands for any part."""
    symptom: str
    """Condition under which the rule fires, with its threshold, in Markdown."""
    cause: str
    """Usual cause, in Markdown."""
    advice: str
    """Sentence on what to do."""
    look: Callable[[History], Iterator[Seen]]
    """Yields observations after the newest step or evaluation. It is called after every step, so it
    reads only a few values from the start and the end of the history, and returns early."""
    kind: Kind = "sickness"
    steps: Callable[[History], int] = lambda history: 1
    """Returns the number of steps that the rule needs; with fewer, it finds nothing."""
