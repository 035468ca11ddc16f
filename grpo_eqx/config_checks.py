"""Validation of a config: pure checks of its fields."""

import functools
import math
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from grpo_eqx._types import CLIPPED_LOSSES
from grpo_eqx.errors import UserError
from grpo_eqx.prng import NUM_SEEDS

if TYPE_CHECKING:
    from grpo_eqx.config import GRPOConfig

DEFAULT_EPSILON = 0.2
DEFAULT_REF_MODEL_SYNC_STEPS = 64

_AT_LEAST_ONE = (
    "prompts_per_step", "max_prompt_length", "max_completion_length", "num_iterations",
    "steps_per_generation", "steps", "micro_batch_size_per_device", "eval_problems",
    "max_generation_batches", "ref_model_sync_steps", "max_num_seqs", "num_generations",
    "require_processes",
)  # fmt: skip
_AT_LEAST_ZERO = ("warmup_steps", "log_completions_steps", "seed")
_NOT_NEGATIVE = ("weight_decay", "beta", "entropy_coef", "off_policy_mask_threshold")
_ABOVE_ZERO = (
    "temperature", "learning_rate", "max_grad_norm", "epsilon_high", "sapo_temperature_pos",
    "sapo_temperature_neg", "kl_clamp", "start_timeout",
)  # fmt: skip


def check_values(cfg: "GRPOConfig") -> None:
    """Raises `UserError` for the first setting that is out of its own range."""
    kind: type = type(cfg)
    for name, choices in _all_choices(kind).items():
        value = getattr(cfg, name)
        if choices and value not in choices:
            raise UserError(f"{name} is {value!r}: use {', '.join(map(str, choices))}.")
    for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
        for name, value in _given(cfg, names):
            if value == "auto" and name == "micro_batch_size_per_device":
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise UserError(f"{name} is {value!r}: use a whole number.")
            if value < least:
                raise UserError(f"{name} is {value}: it must be at least {least}.")
    if cfg.seed >= NUM_SEEDS:
        raise UserError(f"seed is {cfg.seed}: it must be below 2^32, {NUM_SEEDS}.")
    for name, value in _given(cfg, _NOT_NEGATIVE):
        if not 0 <= value < math.inf:
            raise UserError(f"{name} is {value}: it must be finite and not negative.")
    for name, value in _given(cfg, _ABOVE_ZERO):
        if not 0 < value < math.inf:
            why = ": training samples, so it" if name == "temperature" else ": it"
            raise UserError(f"{name} is {value}{why} must be above 0 and finite.")
    for name, value in _given(cfg, ("adam_beta1", "adam_beta2", "overlong_buffer")):
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value}: it must be at least 0 and below 1.")
    for name, value in _given(cfg, ("top_entropy_quantile", "ref_model_mixup_alpha")):
        if not 0 < value <= 1:
            raise UserError(f"{name} is {value}: it must be above 0 and at most 1.")
    if cfg.epsilon is not None and not 0 < cfg.epsilon < 1:
        raise UserError(f"epsilon is {cfg.epsilon}: it must be between 0 and 1.")
    if cfg.num_generations < 2:
        raise UserError(
            f"num_generations is {cfg.num_generations}: advantages are relative to a group, so "
            f"use at least 2."
        )
    if isinstance(cfg.stop_strings, str):
        raise UserError(f"stop_strings is a string: write ({cfg.stop_strings!r},), a tuple.")
    if "" in cfg.stop_strings:
        raise UserError("stop_strings has an empty string, which would end every completion.")
    if not all(math.isfinite(weight) for weight in cfg.reward_weights or ()):
        raise UserError(f"reward_weights are {cfg.reward_weights}: they must be finite.")


@functools.cache
def _all_choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """Returns the allowed values of each field; empty for fields that are not a choice."""
    return {name: _choices(hint) for name, hint in get_type_hints(kind).items()}


def _choices(hint: Any) -> tuple[Any, ...]:
    """Returns the values of a `Literal`, or of a union of these and `None`; else an empty tuple."""
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint)
    if not all(get_origin(part) is Literal or part is NoneType for part in parts):
        return ()
    return tuple(value for part in parts for value in (get_args(part) or (None,)))


def check_combinations(cfg: "GRPOConfig") -> None:
    """Raises `UserError` for settings that conflict, or would have no effect together."""
    _check_clipping(cfg)
    _check_kl(cfg)
    _check_advantages(cfg)
    _check_sampler_correction(cfg)
    _check_updates(cfg)
    if cfg.wandb == "disabled" and cfg.wandb_project is not None:
        _refuse(
            cfg, "wandb_project", "while wandb is disabled", "set wandb, or leave it unset (None)"
        )


def without_effect(cfg: "GRPOConfig") -> str | None:
    """Returns a note on settings without effect because every ratio is exactly 1, or `None`."""
    of_ratios = (
        "epsilon", "epsilon_high", "delta", "dual_clip", "sapo_temperature_pos",
        "sapo_temperature_neg",
    )  # fmt: skip
    names = [name for name, _ in _given(cfg, of_ratios)]
    if cfg.importance_sampling_level != "token":
        names.append("importance_sampling_level")
    if cfg.updates_per_step > 1 or not names:
        return None
    return (
        f"note: with one update a rollout the ratio is exactly 1, and {', '.join(names)} "
        f"{'has' if len(names) == 1 else 'have'} no effect; raise num_iterations or "
        f"steps_per_generation for more updates."
    )


def _check_clipping(cfg: "GRPOConfig") -> None:
    loss = cfg.loss_type
    clipped = f"use one of {', '.join(CLIPPED_LOSSES)}, or leave it unset (None)"
    if loss not in CLIPPED_LOSSES:
        for name, _ in _given(cfg, ("epsilon", "delta", "dual_clip")):
            _refuse(cfg, name, f"with loss_type {loss}, which does not clip ratios", clipped)
    if loss == "sapo" and cfg.epsilon_high is not None:
        _refuse(cfg, "epsilon_high", "with loss_type sapo, which does not clip ratios", clipped)
    if loss != "sapo":
        for name, _ in _given(cfg, ("sapo_temperature_pos", "sapo_temperature_neg")):
            _refuse(cfg, name, f"with loss_type {loss}", "use sapo, or leave it unset (None)")
    if loss == "cispo":
        if cfg.epsilon_high is None:
            raise UserError(
                "loss_type is cispo and epsilon_high is not set: it is the cap on the ratio "
                "itself, for which no small default would do; set it, for example to 5.0."
            )
        if cfg.epsilon_high < 1:
            raise UserError(
                f"epsilon_high is {cfg.epsilon_high} with loss_type cispo, where it is the cap on "
                f"the ratio itself, not on its distance from 1: set it to 1 or more, for example "
                f"5.0."
            )
        if cfg.importance_sampling_level == "sequence_token":
            raise UserError(
                "importance_sampling_level is sequence_token with loss_type cispo, whose ratios "
                "carry no gradient, so that it would be sequence: use that, or token."
            )
    if cfg.delta is not None and cfg.dual_clip is not None:
        raise UserError(
            f"delta ({cfg.delta}) and dual_clip ({cfg.dual_clip}) both bound the loss at negative "
            f"advantages, and only the smaller would act: leave one out."
        )
    high = next((x for x in (cfg.epsilon_high, cfg.epsilon) if x is not None), DEFAULT_EPSILON)
    for name, value in _given(cfg, ("delta", "dual_clip")):
        if not 1 + high < value < math.inf:
            raise UserError(
                f"{name} is {value} and epsilon_high {high}: it must be finite and above "
                f"1 + epsilon_high."
            )


def _check_kl(cfg: "GRPOConfig") -> None:
    if cfg.beta == 0:
        for name in ("kl_estimator", "kl_clamp", "use_bias_correction_kl", "sync_ref_model"):
            if getattr(cfg, name) not in (None, False):
                _refuse(cfg, name, "with beta = 0", "set beta above 0, or leave it unset (None)")
    if cfg.kl_estimator == "k1" and cfg.use_bias_correction_kl is False:
        raise UserError(
            "kl_estimator is k1 without use_bias_correction_kl, where its gradient has mean zero: "
            "set use_bias_correction_kl, or use k2 or k3."
        )
    if cfg.kl_estimator == "k2" and cfg.use_bias_correction_kl:
        raise UserError(
            "use_bias_correction_kl is True with kl_estimator k2, whose gradient is unbiased "
            "without it and would not be with it: leave it unset (None)."
        )
    if not cfg.sync_ref_model:
        for name, _ in _given(cfg, ("ref_model_sync_steps", "ref_model_mixup_alpha")):
            _refuse(
                cfg,
                name,
                "while sync_ref_model is off",
                "set sync_ref_model, or leave it unset (None)",
            )
    every = cfg.ref_model_sync_steps or DEFAULT_REF_MODEL_SYNC_STEPS
    if cfg.sync_ref_model and every >= cfg.steps:
        raise UserError(
            f"ref_model_sync_steps is {every} and the run has {cfg.steps} steps, so that the "
            f"reference model would never move in time to matter: lower it."
        )


def _check_advantages(cfg: "GRPOConfig") -> None:
    estimator = cfg.advantage_estimator
    if estimator != "grpo" and cfg.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            f"multi_objective_aggregation is normalize_then_sum with advantage_estimator "
            f"{estimator}: it is defined for grpo; use that, or sum_then_normalize."
        )
    if cfg.scale_rewards is not None and not scales_rewards(cfg):
        if estimator == "grpo":
            because = "with multi_objective_aggregation normalize_then_sum, which has its own"
        elif estimator.startswith("reinforce_plus_plus"):
            because = f"with advantage_estimator {estimator}, which has its own"
        else:
            because = f"with advantage_estimator {estimator}, which is not scaled"
        _refuse(cfg, "scale_rewards", because, "leave it unset (None)")
    if not cfg.dynamic_sampling and cfg.max_generation_batches is not None:
        _refuse(
            cfg, "max_generation_batches", "while dynamic_sampling is off",
            "set dynamic_sampling, or leave it unset (None)",
        )  # fmt: skip
    if cfg.dynamic_sampling and estimator in ("reinforce", "reinforce_plus_plus"):
        raise UserError(
            f"dynamic_sampling is on with advantage_estimator {estimator}, for which groups with "
            f"equal rewards teach as well: leave it off, or use an estimator with a group baseline."
        )
    if cfg.dynamic_sampling and cfg.max_generation_batches == 1:
        raise UserError(
            "max_generation_batches is 1, which leaves dynamic_sampling no rollout to take fresh "
            "groups from: use 2 or more."
        )


def _check_sampler_correction(cfg: "GRPOConfig") -> None:
    low, high = cfg.importance_sampling_clip_min, cfg.importance_sampling_clip_max
    if cfg.importance_sampling_mode is None:
        for name, _ in _given(
            cfg, ("importance_sampling_clip_min", "importance_sampling_clip_max")
        ):
            _refuse(
                cfg, name, "without importance_sampling_mode",
                "set the mode, for example token_truncate, or leave it unset (None)",
            )  # fmt: skip
    if low is not None and not 0 < low < 1:
        raise UserError(
            f"importance_sampling_clip_min is {low}: it must be between 0 and 1, the weight of a "
            f"sampler that is the trainer."
        )
    if high is not None and not 1 < high < math.inf:
        raise UserError(
            f"importance_sampling_clip_max is {high}: it must be finite and above 1, the weight of "
            f"a sampler that is the trainer."
        )


def _check_updates(cfg: "GRPOConfig") -> None:
    if cfg.prompts_per_step % cfg.steps_per_generation:
        raise UserError(
            f"steps_per_generation is {cfg.steps_per_generation}, and prompts_per_step "
            f"({cfg.prompts_per_step}) cannot be split evenly over as many updates: use a divisor."
        )
    updates = cfg.steps * cfg.updates_per_step
    if cfg.warmup_steps > updates:
        raise UserError(
            f"warmup_steps ({cfg.warmup_steps}) exceeds the run's {updates} updates: lower it."
        )


def scales_rewards(cfg: "GRPOConfig") -> bool:
    return (
        cfg.advantage_estimator == "grpo"
        and cfg.multi_objective_aggregation == "sum_then_normalize"
    )


def _given(cfg: "GRPOConfig", names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the named fields that are not `None`, with their values."""
    return [(name, getattr(cfg, name)) for name in names if getattr(cfg, name) is not None]


def _refuse(cfg: "GRPOConfig", name: str, because: str, fix: str) -> None:
    raise UserError(f"{name} is {getattr(cfg, name)} {because}: it would do nothing; {fix}.")
