"""Reward functions, and the runner that calls them."""

from grpo_eqx.common.errors import UserError
from grpo_eqx.rewards import gsm8k as gsm8k
from grpo_eqx.rewards import numbers as numbers
from grpo_eqx.rewards.limits import RewardLimits as RewardLimits
from grpo_eqx.rewards.overlong import soft_overlong_punishment as soft_overlong_punishment
from grpo_eqx.rewards.runner import RewardFunc as RewardFunc
from grpo_eqx.rewards.runner import RewardRunner as RewardRunner
from grpo_eqx.rewards.runner import Rewards as Rewards

BUILT_IN: dict[str, RewardFunc] = {
    "correct": gsm8k.correct,
    "correct_strict": gsm8k.correct_strict,
    "format": gsm8k.format,
    "tags": gsm8k.tags,
}
"""Reward functions that a config can name."""


def reward_func(name: str) -> RewardFunc:
    """Returns the built-in reward function with a name; raises `UserError` for an unknown name."""
    if name not in BUILT_IN:
        more = "; GRPOTrainer takes functions of your own, in Python"
        if "," in name or " " in name:
            more = "; separate names with spaces in a command, and write a list in a file or Python"
        if ".py" in name or ":" in name:
            more = "; functions of your own are passed in a script: GRPOTrainer(reward_funcs=[...])"
        elif "/" in name:
            more = "; reward models are not loaded: call yours in a function of your own"
        raise UserError(
            f"no reward function named {name!r}; built-in: {', '.join(BUILT_IN)}{more}."
        )
    return BUILT_IN[name]
