"""The state of a run."""

from typing import Any

import equinox as eqx
import optax

from grpo_eqx.models.base import CausalLM


class TrainState(eqx.Module):
    """Everything that a run changes: with it and the config, the run can go on."""

    model: CausalLM
    """Parameters in float32."""
    opt_state: optax.OptState
    reference: CausalLM | None = None
    """The model of the KL term. `None` without one."""
    step: int = 0
    """Steps that are done."""
    next_batch: int = 0
    """The first batch of prompts that no step has taken; dynamic sampling may take several."""
    num_tokens: int = 0
    """Tokens generated so far, each completion counted with its prompt."""

    @property
    def trainable(self) -> Any:
        """Filter of the model's arrays that updates change, as `equinox.partition` takes it."""
        return self.model.trainable
