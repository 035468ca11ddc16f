"""The reward runners of a run and its evaluations, from its settings and passed functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.common.clean_text import is_name
from grpo_eqx.common.errors import UserError, shown
from grpo_eqx.rewards import reward_func, soft_overlong_punishment
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.overlong import SOFT_OVERLONG
from grpo_eqx.rewards.runner import RewardFunc, RewardRunner, func_name
from grpo_eqx.settings.config import GRPOConfig

RewardFuncs = RewardFunc | str | Sequence[RewardFunc | str] | Mapping[str, RewardFunc | str]
"""Reward functions or names of built-in functions: one, a list, or a dict by names to log."""

_DICT = 'name each in a dict, as in {"first": a_function, "second": another}'


def make_rewards(
    cfg: GRPOConfig, given: RewardFuncs | None, own: Mapping[str, RewardFunc] | None = None
) -> RewardRunner:
    """Makes the runner of a run's reward functions, with its penalty.

    **Arguments:**

    - `cfg`: the settings.
    - `given`: functions that were passed in place of the config's.
    - `own`: functions of environments, of weight 1 each. The config's are left out where they are
      the default.
    """
    penalized, own = cfg.overlong_buffer > 0, own or {}
    if given is None and not (own and cfg.reward_funcs == GRPOConfig().reward_funcs):
        given = cfg.reward_funcs
    taken = (*own, *(SOFT_OVERLONG,) * penalized)
    funcs = named_funcs(() if given is None else given, "reward_funcs", taken)
    limits = _limits(cfg)
    limits.check_used({**funcs, **own})
    weights = cfg.reward_weights
    if weights is not None and len(weights) == len(funcs):
        weights = (*weights, *(1.0,) * len(own))
    runner = RewardRunner({**funcs, **own}, weights, limits=limits, max_steps=cfg.steps)
    if not penalized:
        return runner
    assert cfg.max_completion_length is not None  # resolved
    buffer = max(1, round(cfg.overlong_buffer * cfg.max_completion_length))
    penalty = soft_overlong_punishment(cfg.max_completion_length, buffer)
    return runner.with_penalty(SOFT_OVERLONG, penalty)


def named_funcs(given: Any, argument: str, taken: Sequence[str] = ()) -> dict[str, RewardFunc]:
    """Returns functions by the names that they are logged under.

    **Arguments:**

    - `given`: functions, or names of built-in functions: one, a list, or a dict.
    - `argument`: the argument that they were passed as, for messages.
    - `taken`: names that are in use.

    Raises `UserError` for anything that is not a function, and for a name that occurs twice.
    """
    if isinstance(given, Mapping):
        pairs = [(name, _named(func, argument)[1]) for name, func in given.items()]
    else:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        pairs = [_named(func, argument) for func in (given if several else [given])]
    names = [name for name, _ in pairs]
    for i, name in enumerate(names):
        if not is_name(name):
            raise UserError(
                f"{argument} has a function with the name {shown(name)}, under which it cannot be "
                f"logged: {_DICT}."
            )
        if name in names[:i]:
            raise UserError(f"two reward functions have the same name, {name}: {_DICT}.")
        if name in taken:
            raise UserError(
                f"{argument} has a function with the name {name}, which is that of a penalty or an "
                f"environment of this run: {_DICT}."
            )
    return dict(pairs)


def _named(func: Any, argument: str) -> tuple[str, RewardFunc]:
    """Returns the function that a name or a function means, and its name in logs."""
    if isinstance(func, str):
        return func, reward_func(func)
    if not callable(func):
        raise UserError(
            f"{argument} has {shown(func)}, which is not a function: pass functions, or names of "
            f"built-in ones."
        )
    return func_name(func), func


def make_eval_reward(cfg: GRPOConfig, func: RewardFunc | str) -> RewardRunner:
    """Makes the runner of the function that scores evaluations, with the limits of rewards.

    It cannot log.
    """
    return RewardRunner(dict([_named(func, "eval_func")]), limits=_limits(cfg))


def _limits(cfg: GRPOConfig) -> RewardLimits:
    share = cfg.max_failed_rewards
    return RewardLimits(
        timeout=cfg.reward_timeout,
        batch_timeout=cfg.reward_batch_timeout,
        workers=cfg.reward_workers,
        failures=cfg.reward_failures,
        max_failed=0.0 if share is None else share,
    )
