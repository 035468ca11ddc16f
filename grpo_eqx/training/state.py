"""State of a run."""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import numpy as np
import optax

from grpo_eqx.models.interface import CausalLM


class TrainState(eqx.Module):
    """Everything that changes during a run: enough, with the config, to continue it."""

    model: CausalLM
    """Parameters in float32; with adapters, these alone, and the others in the compute dtype."""
    opt_state: optax.OptState
    reference: CausalLM | None = None
    """Reference model of the KL term; `None` without one, or where it is beneath adapters."""
    step: int = 0
    """Completed steps."""
    next_batch: int = 0
    """First batch of prompts that no step has used; dynamic sampling may use several per step."""
    num_tokens: int = 0
    """Tokens generated so far, each completion counted with its prompt."""
    carried: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Groups in flight, with `max_staleness`: arrays on the host, whose sizes change."""
    skipped_in_a_row: int = 0
    """Updates in a row, up to the last one, that were skipped because they were not finite."""

    @property
    def reference_model(self) -> CausalLM | None:
        """The model of the KL term: `reference`, or the model beneath the adapters."""
        if self.reference is None and self.model.has_adapters:
            return self.model.without_adapters()
        return self.reference

    def saved(self) -> "TrainState":
        """Returns the part that checkpoints hold: of the model, what training changes."""
        return dataclasses.replace(self, model=eqx.filter(self.model, self.model.trainable))

    def with_frozen(self, model: CausalLM) -> "TrainState":
        """Returns a state that was `saved`, completed by what training leaves as it is."""
        return dataclasses.replace(self, model=eqx.combine(self.model, model))
