"""The processes of a run: how they are found, how they meet, and what they exchange."""

from grpo_eqx.distributed.startup import initialize as initialize
from grpo_eqx.distributed.startup import is_main as is_main
