"""Settings that conflict, or would have no effect together.

Each check takes the settings that it reads, under their names in `GRPOConfig`, and raises
`UserError`.
"""

import math
from typing import Any

from grpo_eqx.common.choices import (
    ALL_LINEAR,
    CLIPPED_LOSSES,
    SAMPLER_WEIGHTS,
    TRACKERS,
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    MultiObjectiveAggregation,
    SamplerCorrection,
    ScaleRewards,
)
from grpo_eqx.common.errors import UserError, did_you_mean
from grpo_eqx.settings.types import parse_steps

DEFAULT_EPSILON = 0.2
DEFAULT_REF_MODEL_SYNC_STEPS = 64
DEFAULT_STEPS = 150
MOST_COMPLETIONS = 100_000_000
"""Completions of a rollout. Many more overflow the compiler's sizes."""


def check_rollout(prompts_per_step: int, num_generations: int) -> None:
    """Refuses rollouts of more completions than programs can be compiled for."""
    completions = prompts_per_step * num_generations
    if completions > MOST_COMPLETIONS:
        raise UserError(
            f"prompts_per_step ({prompts_per_step}) times num_generations ({num_generations}) is "
            f"{completions:,} completions, and at most {MOST_COMPLETIONS:,} are possible: lower "
            f"one of them."
        )


def check_clipping(
    loss_type: LossType,
    epsilon: float | None,
    epsilon_high: float | None,
    delta: float | None,
    dual_clip: float | None,
) -> None:
    """Refuses bounds on ratios that the loss does not have, or that exclude each other."""
    unclipped = f"with loss_type {loss_type}, which does not clip ratios"
    clipped = f"use one of {', '.join(CLIPPED_LOSSES)}, or leave it unset (None)"
    if loss_type not in CLIPPED_LOSSES:
        _refuse_given(unclipped, clipped, epsilon=epsilon, delta=delta, dual_clip=dual_clip)
    if loss_type == "sapo":
        _refuse_given(unclipped, clipped, epsilon_high=epsilon_high)
    if delta is not None and dual_clip is not None:
        raise UserError(
            f"delta ({delta}) and dual_clip ({dual_clip}) both bound the loss at negative "
            f"advantages, and only the smaller would have an effect: set only one."
        )
    high = next((x for x in (epsilon_high, epsilon) if x is not None), DEFAULT_EPSILON)
    for name, value in (("delta", delta), ("dual_clip", dual_clip)):
        if value is not None and not 1 + high < value < math.inf:
            raise UserError(
                f"{name} is {value} and epsilon_high is {high}: {name} must be finite and above "
                f"1 + epsilon_high."
            )


def check_sapo(
    loss_type: LossType, sapo_temperature_pos: float | None, sapo_temperature_neg: float | None
) -> None:
    """Refuses the gate's temperatures for losses without a gate."""
    if loss_type != "sapo":
        _refuse_given(
            f"with loss_type {loss_type}",
            "use sapo, or leave it unset (None)",
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
        )


def check_cispo(
    loss_type: LossType,
    epsilon_high: float | None,
    importance_sampling_level: ImportanceSamplingLevel,
) -> None:
    """Refuses `cispo` without a sensible cap on the ratio."""
    if loss_type != "cispo":
        return
    if epsilon_high is None:
        raise UserError(
            "loss_type is cispo and epsilon_high is not set: it is the cap on the ratio itself, "
            "for which the default, epsilon, is too small; set it, for example to 5.0."
        )
    if epsilon_high < 1:
        raise UserError(
            f"epsilon_high is {epsilon_high} with loss_type cispo, where it is the cap on the "
            f"ratio itself, not on its distance from 1: set it to 1 or more, for example 5.0."
        )
    if importance_sampling_level == "sequence_token":
        raise UserError(
            "importance_sampling_level is sequence_token with loss_type cispo, whose ratios carry "
            "no gradient, which makes it the same as sequence: use sequence or token."
        )


def check_kl(
    beta: float,
    kl_estimator: KLEstimator | None,
    kl_clamp: float | None,
    use_bias_correction_kl: bool | None,
) -> None:
    """Refuses KL settings without a KL term, and estimates whose gradients are wrong."""
    if beta == 0:
        _refuse_given(
            "with beta = 0",
            "set beta above 0, or leave it unset (None)",
            kl_estimator=kl_estimator,
            kl_clamp=kl_clamp,
            use_bias_correction_kl=use_bias_correction_kl or None,
        )
    if kl_estimator == "k1" and use_bias_correction_kl is False:
        raise UserError(
            "kl_estimator is k1 without use_bias_correction_kl, so its gradient has mean zero: "
            "set use_bias_correction_kl, or use k2 or k3."
        )
    if kl_estimator == "k2" and use_bias_correction_kl:
        raise UserError(
            "use_bias_correction_kl is True with kl_estimator k2, whose gradient is unbiased "
            "without it and would be biased with it: leave it unset (None)."
        )


def check_reference(
    beta: float,
    sync_ref_model: bool,
    ref_model_sync_steps: int | None,
    ref_model_mixup_alpha: float | None,
    steps: int,
) -> None:
    """Rejects reference-sync settings that would have no effect.

    Those are settings without a reference model, or whose first sync falls after the last step.
    """
    if beta == 0:
        _refuse_given(
            "with beta = 0",
            "set beta above 0, or leave it unset (None)",
            sync_ref_model=sync_ref_model or None,
        )
    if not sync_ref_model:
        _refuse_given(
            "while sync_ref_model is off",
            "set sync_ref_model, or leave it unset (None)",
            ref_model_sync_steps=ref_model_sync_steps,
            ref_model_mixup_alpha=ref_model_mixup_alpha,
        )
    every = ref_model_sync_steps or DEFAULT_REF_MODEL_SYNC_STEPS
    if sync_ref_model and every >= steps:
        raise UserError(
            f"ref_model_sync_steps is {every} and the run has {steps} steps, so the "
            f"reference model would never move in time to have an effect: lower it."
        )


def check_lora(
    lora_rank: int | None,
    lora_alpha: float | None,
    lora_target: str | None,
    use_rslora: bool,
    load_in_8bit: bool,
    sync_ref_model: bool,
) -> None:
    """Refuses settings of adapters without a rank, and a moving reference beside adapters."""
    if lora_rank is None:
        _refuse_given(
            "without lora_rank",
            "set lora_rank, or leave it unset (None)",
            lora_alpha=lora_alpha,
            lora_target=lora_target,
            use_rslora=use_rslora or None,
            load_in_8bit=load_in_8bit or None,
        )
        return
    if not all(name.strip() for name in (lora_target or ALL_LINEAR).split(",")):
        raise UserError(
            f"lora_target is {lora_target!r}: use {ALL_LINEAR}, or names such as q_proj,v_proj."
        )
    if sync_ref_model:
        raise UserError(
            "sync_ref_model is on with lora_rank, where the model without adapters is the "
            "reference: leave it out."
        )


def check_advantages(
    advantage_estimator: AdvantageEstimator,
    multi_objective_aggregation: MultiObjectiveAggregation,
    scale_rewards: ScaleRewards | None,
) -> None:
    """Refuses scales and aggregations that the estimator does not have."""
    estimator, aggregation = advantage_estimator, multi_objective_aggregation
    if estimator != "grpo" and aggregation != "sum_then_normalize":
        raise UserError(
            f"multi_objective_aggregation is normalize_then_sum with advantage_estimator "
            f"{estimator}: it is defined only for grpo; use grpo or sum_then_normalize."
        )
    if scales_rewards(estimator, aggregation):
        return
    if estimator == "grpo":
        because = "with multi_objective_aggregation normalize_then_sum, which scales by itself"
    elif estimator.startswith("reinforce_plus_plus"):
        because = f"with advantage_estimator {estimator}, which scales by itself"
    else:
        because = f"with advantage_estimator {estimator}, which is not scaled"
    _refuse_given(because, "leave it unset (None)", scale_rewards=scale_rewards)


def scales_rewards(
    advantage_estimator: AdvantageEstimator, multi_objective_aggregation: MultiObjectiveAggregation
) -> bool:
    """Returns whether `scale_rewards` applies."""
    return advantage_estimator == "grpo" and multi_objective_aggregation == "sum_then_normalize"


def check_dynamic_sampling(
    dynamic_sampling: bool,
    max_generation_batches: int | None,
    advantage_estimator: AdvantageEstimator,
) -> None:
    """Refuses dynamic sampling that cannot replace groups, or should not."""
    if not dynamic_sampling:
        _refuse_given(
            "while dynamic_sampling is off",
            "set dynamic_sampling, or leave it unset (None)",
            max_generation_batches=max_generation_batches,
        )
        return
    if advantage_estimator in ("reinforce", "reinforce_plus_plus"):
        raise UserError(
            f"dynamic_sampling is on with advantage_estimator {advantage_estimator}, which "
            f"also learns from groups with equal rewards: turn it off, or use an estimator with a "
            f"group baseline."
        )
    if max_generation_batches == 1:
        raise UserError(
            "max_generation_batches is 1, which leaves dynamic_sampling no rollout to take fresh "
            "groups from: use 2 or more."
        )


def check_reward_limits(
    reward_timeout: float | None,
    reward_batch_timeout: float | None,
    reward_failures: str,
    max_failed_rewards: float | None,
) -> None:
    """Refuses a share of failures that stop the run, and a timeout that comes too late."""
    if reward_failures == "stop":
        _refuse_given(
            "while reward_failures is stop",
            "set reward_failures to drop, or leave it unset (None)",
            max_failed_rewards=max_failed_rewards,
        )
    each, batch = reward_timeout, reward_batch_timeout
    if each is not None and batch is not None and each >= batch:
        raise UserError(
            f"reward_timeout is {each} and reward_batch_timeout is {batch}, which ends every call "
            f"before: lower reward_timeout, or leave it unset (None)."
        )


def check_sampler_correction(
    importance_sampling_mode: SamplerCorrection | None,
    importance_sampling_clip_min: float | None,
    importance_sampling_clip_max: float | None,
    rollout_dtype: str,
) -> None:
    """Refuses a clip range without a correction, or without the weight 1 in it."""
    low, high = importance_sampling_clip_min, importance_sampling_clip_max
    mode = importance_sampling_mode or ("token_truncate" if rollout_dtype == "int8" else None)
    if mode not in SAMPLER_WEIGHTS:
        _refuse_given(
            f"with importance_sampling_mode {mode}" if mode else "without importance_sampling_mode",
            "set the mode, for example token_truncate, or leave it unset (None)",
            importance_sampling_clip_min=low,
            importance_sampling_clip_max=high,
        )
    if low is not None and not 0 < low < 1:
        raise UserError(
            f"importance_sampling_clip_min is {low}: it must be between 0 and 1, the weight "
            f"where the sampler and the trainer agree."
        )
    if high is not None and not 1 < high < math.inf:
        raise UserError(
            f"importance_sampling_clip_max is {high}: it must be finite and above 1, the "
            f"weight where the sampler and the trainer agree."
        )


def check_staleness(
    max_staleness: int,
    carried_caches: str | None,
    importance_sampling_mode: SamplerCorrection | None,
    rollout_dtype: str,
    kv_cache_dtype: str,
    dtype: str,
    top_k: int | None,
    top_p: float,
    min_p: float,
    router_replay: bool,
    prompts_per_step: int,
    num_generations: int,
    max_num_seqs: int | None,
    rollout_devices: int | None,
) -> None:
    """Refuses stale tokens without a word on their correction, and corrections of nothing."""
    mode = importance_sampling_mode
    if max_staleness == 0:
        _refuse_given(
            "with max_staleness = 0",
            "set max_staleness above 0, or leave it unset (None)",
            carried_caches=carried_caches,
            importance_sampling_mode="coupled" if mode == "coupled" else None,
        )
        as_trained = (
            (rollout_dtype, kv_cache_dtype) in (("auto", "auto"), ("auto", "float32"))
            and dtype == "float32"
            and (top_k, top_p, min_p) == (None, 1.0, 0.0)
        )
        if as_trained:
            _refuse_given(
                "and the sampler is the trained model, in float32 and with max_staleness = 0",
                "leave it unset (None)",
                importance_sampling_mode=mode,
            )
        return
    if mode is None and rollout_dtype != "int8":  # whose default is a mode
        raise UserError(
            f"max_staleness is {max_staleness}, and importance_sampling_mode is not set: tokens of "
            f"older policies are drawn with other probabilities; set it to token_truncate, or to "
            f"none to learn from them as they are."
        )
    carried_steps = max_staleness - (rollout_devices is not None)
    if carried_steps == 0:
        _refuse_given(
            "with rollout_devices and max_staleness = 1, where no completion goes on after an "
            "update",
            "raise max_staleness, or leave it unset (None)",
            carried_caches=carried_caches,
        )
    in_flight = (carried_steps + 1) * prompts_per_step * num_generations
    if carried_steps and max_num_seqs is not None and max_num_seqs >= in_flight:
        raise UserError(
            f"max_num_seqs is {max_num_seqs}, and with max_staleness {max_staleness} there are "
            f"{in_flight} completions, which must be more than the slots: lower it, or leave it "
            f"unset (None), for the {prompts_per_step * num_generations} completions of a step."
        )
    if router_replay:
        raise UserError(
            f"max_staleness is {max_staleness} with router_replay: the experts of completions that "
            f"go on after an update are not recorded; turn one of them off."
        )


def check_rollout_devices(rollout_devices: int | None, router_replay: bool) -> None:
    """Refuses what cannot be sent from devices that sample to others."""
    if rollout_devices is not None and router_replay:
        raise UserError(
            f"rollout_devices is {rollout_devices} with router_replay: the experts that routers "
            f"chose stay on the devices that sampled; turn one of them off."
        )


def check_updates(
    prompts_per_step: int,
    num_iterations: int,
    steps_per_generation: int,
    steps: int,
    num_train_epochs: float | None,
    warmup_steps: int,
) -> None:
    """Refuses uneven shares of a rollout, and a warm-up longer than the run."""
    if prompts_per_step % steps_per_generation:
        raise UserError(
            f"steps_per_generation is {steps_per_generation}, and prompts_per_step "
            f"({prompts_per_step}) cannot be split evenly into that many updates: use a divisor of "
            f"prompts_per_step."
        )
    updates = steps * num_iterations * steps_per_generation
    if warmup_steps > updates and num_train_epochs is None:
        raise UserError(
            f"warmup_steps ({warmup_steps}) exceeds the run's {updates} updates: lower it."
        )


def check_alternatives(
    steps: int, num_train_epochs: float | None, warmup_steps: int, warmup_ratio: float | None
) -> None:
    """Refuses two settings for one thing."""
    if num_train_epochs is not None and steps != DEFAULT_STEPS:
        raise UserError(
            f"steps is {steps} and num_train_epochs is {num_train_epochs:g}: set one of them, and "
            f"leave the other at its default (steps=150, num_train_epochs=None)."
        )
    if warmup_ratio is not None and warmup_steps > 0:
        raise UserError(
            f"warmup_steps is {warmup_steps} and warmup_ratio is {warmup_ratio:g}: set one of them."
        )


def check_trackers(
    report_to: tuple[str, ...], wandb: str | None, wandb_project: str | None
) -> None:
    """Refuses unknown trackers, and settings of Weights & Biases that contradict each other."""
    for name in report_to:
        if name not in TRACKERS:
            guess = did_you_mean(name, TRACKERS)
            raise UserError(
                f"report_to has {name!r}: use {' or '.join(TRACKERS)}{guess}; leave it out for "
                f"metrics.jsonl alone, and pass others to GRPOTrainer(trackers=[...])."
            )
    if "wandb" in report_to and wandb == "disabled":
        raise UserError(
            "report_to has wandb while wandb is disabled: leave one of them out, or set wandb to "
            "online or offline."
        )
    if wandb in (None, "disabled") and "wandb" not in report_to:
        _refuse_given(
            "while wandb is disabled",
            "set wandb, or leave it unset (None)",
            wandb_project=wandb_project,
        )


def check_printed_completions(
    log_completions_steps: int, log_completions: bool, num_completions_to_print: int | None
) -> None:
    """Refuses a number of completions to print, or printing them, where none are printed."""
    if not log_completions:
        _refuse_given(
            "without log_completions",
            "set that, or leave it unset (None)",
            num_completions_to_print=num_completions_to_print,
        )
    elif log_completions_steps == 0:
        raise UserError(
            "log_completions prints completions of the steps whose tables are written, and "
            "log_completions_steps is 0: set it to 1 or more."
        )


def check_evaluations(
    eval_steps: int | None,
    eval_on_start: bool,
    num_generations_eval: int | None,
    eval_temperature: float | None,
) -> None:
    """Refuses settings of evaluations that are not made."""
    if eval_steps is None:
        _refuse_given(
            "without eval_steps",
            "set that (as large as steps to evaluate at the end alone), or leave it unset",
            eval_on_start=eval_on_start or None,
            num_generations_eval=num_generations_eval,
            eval_temperature=eval_temperature,
        )
    if num_generations_eval is None:
        _refuse_given(
            "without num_generations_eval",
            "set that, or leave it unset (None)",
            eval_temperature=eval_temperature,
        )


def check_best_model(
    metric_for_best_model: str | None,
    greater_is_better: bool | None,
    save_total_limit: int | None,
    eval_steps: int | None,
) -> None:
    """Rejects settings of the best checkpoint that cannot take effect."""
    if metric_for_best_model is None:
        _refuse_given(
            "without metric_for_best_model",
            "set that, or leave it unset (None)",
            greater_is_better=greater_is_better,
        )
        return
    if metric_for_best_model.startswith("eval/") and eval_steps is None:
        raise UserError(
            f"metric_for_best_model is {metric_for_best_model}, a metric of evaluations, and "
            f"eval_steps is not set: set it, so that they are made during training."
        )
    if save_total_limit is None:
        raise UserError(
            f"metric_for_best_model is {metric_for_best_model} while all checkpoints are kept: it "
            f"would do nothing; set save_total_limit, or leave it unset (None)."
        )


def check_profile(
    profile_steps: str | None, profile_memory: bool, steps: int, num_train_epochs: float | None
) -> None:
    """Refuses profiles of steps that the run does not make, and of memory at no step."""
    if profile_steps is None:
        _refuse_given(
            "without profile_steps",
            "set that, or leave it False",
            profile_memory=profile_memory or None,
        )
        return
    # Without num_train_epochs, from which steps follow later, the last step is known.
    if num_train_epochs is None and parse_steps("profile_steps", profile_steps)[-1] > steps:
        raise UserError(
            f"profile_steps is {profile_steps}, and the run has {steps} steps: choose among these."
        )


CHECKS = (
    check_rollout,
    check_clipping,
    check_sapo,
    check_cispo,
    check_kl,
    check_reference,
    check_lora,
    check_advantages,
    check_dynamic_sampling,
    check_reward_limits,
    check_sampler_correction,
    check_staleness,
    check_rollout_devices,
    check_updates,
    check_alternatives,
    check_trackers,
    check_printed_completions,
    check_evaluations,
    check_best_model,
    check_profile,
)


def _refuse_given(because: str, fix: str, **settings: Any) -> None:
    """Refuses the first of the settings that is not `None`."""
    for name, value in settings.items():
        if value is not None:
            raise UserError(f"{name} is {value} {because}: it would do nothing; {fix}.")
