"""Tools that completions call, environments that they act in, and the dialogues with them."""

from grpo_eqx.environments.environment import Environment as Environment
from grpo_eqx.environments.environment import Step as Step
