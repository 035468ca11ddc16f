"""State of a run."""

import equinox as eqx
import optax

from grpo_eqx.models.base import CausalLM


class TrainState(eqx.Module):
    """Everything that changes during a run: enough, with the config, to continue it."""

    model: CausalLM
    """Parameters in float32."""
    opt_state: optax.OptState
    reference: CausalLM | None = None
    """Reference model of the KL term; `None` without one."""
    step: int = 0
    """Completed steps."""
    next_batch: int = 0
    """First batch of prompts that no step has used; dynamic sampling may use several per step."""
    num_tokens: int = 0
    """Tokens generated so far, each completion counted with its prompt."""
    skipped_in_a_row: int = 0
    """Updates in a row, up to the last one, that were skipped because they were not finite."""
