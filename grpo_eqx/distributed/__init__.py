"""The processes of a run: how they are found, how they meet, and what they exchange."""

from typing import TYPE_CHECKING

from grpo_eqx.common.lazy import lazy_names

if TYPE_CHECKING:
    from grpo_eqx.distributed.startup import initialize as initialize
    from grpo_eqx.distributed.startup import is_main as is_main

__getattr__ = lazy_names(
    __name__,
    {
        "initialize": "grpo_eqx.distributed.startup",
        "is_main": "grpo_eqx.distributed.startup",
    },
)
