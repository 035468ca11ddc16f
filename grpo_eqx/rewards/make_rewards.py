"""The rewards of a run, from its config."""

from collections.abc import Sequence

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import UserError
from grpo_eqx.rewards import reward_func, soft_overlong_punishment
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.overlong import SOFT_OVERLONG
from grpo_eqx.rewards.runner import RewardFunc, RewardRunner, func_name


def make_rewards(cfg: GRPOConfig, funcs: Sequence[RewardFunc] | None) -> RewardRunner:
    """Makes the runner of the given reward functions, or the config's, with its penalty."""
    if funcs is None:
        pairs = [(name, reward_func(name)) for name in cfg.reward_funcs]
    else:
        pairs = [(func_name(func), func) for func in funcs]
    penalized = cfg.overlong_buffer > 0
    names = [name for name, _ in pairs] + [SOFT_OVERLONG] * penalized
    if len(set(names)) < len(names):
        raise UserError("two reward functions have the same name: give each its own.")
    limits = _limits(cfg)
    limits.check_used(dict(pairs))
    runner = RewardRunner(dict(pairs), cfg.reward_weights, limits=limits)
    if not penalized:
        return runner
    assert cfg.max_completion_length is not None  # resolved
    buffer = max(1, round(cfg.overlong_buffer * cfg.max_completion_length))
    penalty = soft_overlong_punishment(cfg.max_completion_length, buffer)
    return runner.with_penalty(SOFT_OVERLONG, penalty)


def make_eval_reward(cfg: GRPOConfig, func: RewardFunc) -> RewardRunner:
    """Makes the runner of the function that scores evaluations, with the same limits."""
    return RewardRunner({func_name(func): func}, limits=_limits(cfg))


def _limits(cfg: GRPOConfig) -> RewardLimits:
    share = cfg.max_failed_rewards
    return RewardLimits(
        timeout=cfg.reward_timeout,
        batch_timeout=cfg.reward_batch_timeout,
        workers=cfg.reward_workers,
        failures=cfg.reward_failures,
        max_failed=0.0 if share is None else share,
    )
