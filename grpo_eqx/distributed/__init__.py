"""The processes of a run: which there are, how they meet, and what they tell each other."""

from grpo_eqx.distributed.startup import initialize as initialize
from grpo_eqx.distributed.startup import is_main as is_main
