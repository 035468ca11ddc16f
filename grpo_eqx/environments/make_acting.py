"""The sampler of a run whose completions act, from its settings and what was passed."""

from collections.abc import Sequence

import jax

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.environments.acting import ActingSampler
from grpo_eqx.environments.dialogues import ToolLimits
from grpo_eqx.environments.harness import Harness, HarnessSampler
from grpo_eqx.environments.pool import Environments
from grpo_eqx.environments.rollout_func import FunctionSampler, RolloutFunc
from grpo_eqx.generation.local_sampler import LocalSampler
from grpo_eqx.settings.config import GRPOConfig

_OF_TOOLS = (
    "max_tool_calling_iterations", "tool_timeout", "max_tool_response_length",
    "tool_response_truncate_side",
)  # fmt: skip
_OF_HARNESSES = (
    "harness_timeout", "harness_concurrency", "harness_host", "harness_port",
    "fork_threshold_tokens",
)  # fmt: skip
_OF_BOTH = ("tool_failures",)

ActingSamplers = ActingSampler | FunctionSampler | HarnessSampler


def make_acting(
    sampler: LocalSampler,
    environments: Environments,
    tokenizer: ChatTokenizer,
    cfg: GRPOConfig,
    rollout_func: RolloutFunc | None = None,
    harness: Harness | str | None = None,
    open_shape: tuple[int, int] = (0, 0),
) -> ActingSamplers | None:
    """Returns the sampler of a run whose completions act; `None` where they do not.

    **Arguments:**

    - `sampler`: the sampler on the run's devices.
    - `environments`, `rollout_func`, `harness`: what completions act in, or what makes them.
    - `tokenizer`, `cfg`: the tokenizer and the resolved settings.
    - `open_shape`: where there is a harness, the slots that answer it, and the limit on the tokens
      of a request.

    Raises `UserError` for settings that would do nothing, and for tools in a run that cannot have
    them.
    """
    makers = {"rollout_func": rollout_func, "harness": harness}
    makes_all = [name for name, maker in makers.items() if maker is not None]
    if environments and makes_all:
        raise UserError(
            f"{makes_all[0]} is passed, and so are tools or environments, which it would have to "
            f"call: pass one of them."
        )
    if len(makes_all) > 1:
        raise UserError(
            f"{listed(makes_all)} are passed, and each makes whole completions: pass one of them."
        )
    _check_used(cfg, has_tools=bool(environments), has_harness=harness is not None)
    if environments or makes_all:
        _check_run(cfg, makes_all)
    if environments:
        return _of_environments(sampler, environments, tokenizer, cfg)
    if harness is not None:
        return HarnessSampler(harness, sampler, tokenizer, cfg, open_shape)
    return None if rollout_func is None else FunctionSampler(rollout_func, sampler, tokenizer, cfg)


def _check_run(cfg: GRPOConfig, makes_all: Sequence[str]) -> None:
    """Raises `UserError` for settings with which completions cannot act.

    **Arguments:**

    - `cfg`: the resolved settings.
    - `makes_all`: the argument that makes whole completions, if any.
    """
    if cfg.router_replay:
        raise UserError(
            "router_replay is set, and tools, environments, a rollout_func or a harness are "
            "passed, whose tokens have no recorded experts: leave it off."
        )
    if cfg.rollout_devices is not None and jax.process_count() > 1:
        raise UserError(
            f"rollout_devices is {cfg.rollout_devices}, and tools, environments, a rollout_func or "
            f"a harness are passed: over {jax.process_count()} processes, all of them act and only "
            f"some would sample; leave rollout_devices unset, or use one process."
        )
    if makes_all and cfg.max_staleness:
        raise UserError(
            f"max_staleness is {cfg.max_staleness}, and a {makes_all[0]} is passed, which makes "
            f"whole completions: leave it at 0."
        )


def _check_used(cfg: GRPOConfig, *, has_tools: bool, has_harness: bool) -> None:
    """Raises `UserError` for settings of tools without tools, and of harnesses without one."""
    defaults = GRPOConfig()
    parts = (
        (_OF_TOOLS, has_tools, "tools or environments are", "tools or environment_factory"),
        (_OF_HARNESSES, has_harness, "harness is", "harness"),
        (_OF_BOTH, has_tools or has_harness, "tools or environments are",
         "tools, environment_factory or harness"),
    )  # fmt: skip
    for names, has_them, what, argument in parts:
        changed = [name for name in names if getattr(cfg, name) != getattr(defaults, name)]
        if changed and not has_them:
            raise UserError(
                f"{changed[0]} is {getattr(cfg, changed[0])}, and no {what} passed: it would do "
                f"nothing; pass {argument} to GRPOTrainer, or leave it unset."
            )


def _of_environments(
    sampler: LocalSampler, environments: Environments, tokenizer: ChatTokenizer, cfg: GRPOConfig
) -> ActingSampler:
    limits = ToolLimits.of(cfg)
    assert cfg.max_completion_length is not None  # resolved
    if limits.max_response_length is None and limits.truncate_side != "middle":
        raise UserError(
            f"tool_response_truncate_side is {limits.truncate_side}, and without "
            f"max_tool_response_length nothing is truncated: set that, or leave it off."
        )
    if (limits.max_response_length or 0) >= cfg.max_completion_length:
        raise UserError(
            f"max_tool_response_length is {limits.max_response_length} and "
            f"max_completion_length, in which answers count, is {cfg.max_completion_length}: "
            f"an answer of that length would never fit; lower the first, or raise the second."
        )
    return ActingSampler(
        sampler, environments, tokenizer, limits,
        max_prompt_length=cfg.max_prompt_length,
        max_completion_length=cfg.max_completion_length,
    )  # fmt: skip
