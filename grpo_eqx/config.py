"""Everything a run can be told, in one frozen dataclass."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from grpo_eqx._types import (
    CLIPPED_LOSSES,
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    MultiObjectiveAggregation,
    Remat,
    SamplerCorrection,
    ScaleRewards,
)
from grpo_eqx.config_checks import (
    DEFAULT_EPSILON,
    DEFAULT_REF_MODEL_SYNC_STEPS,
    check_combinations,
    check_values,
    scales_rewards,
)

EMBEDDED_MODEL = "tiny_qwen2"
"""The name of the model that comes with the package."""

EMBEDDED_DATA = "word_problems"
"""The name of the problems that come with the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Settings of a GRPO run. Without arguments: the embedded model on the embedded problems.

    Names are TRL's where TRL has the field. A field that is `None` where its docstring names
    a rule is filled in by `resolved()`.
    """

    # What to train on what
    model: str = EMBEDDED_MODEL
    """Model folder, hub name (Qwen/Qwen2.5-3B-Instruct), or tiny_qwen2: the embedded model."""
    data: str = EMBEDDED_DATA
    """Training problems: word_problems (embedded), a GSM8K-like JSONL file, or a hub name
    (openai/gsm8k)."""
    eval_data: str | None = None
    """Held-out problems, a name or file as for data. None: the embedded held-out set, the hub's
    test split, or problems set apart from the end of a JSONL file."""
    system_prompt: str | None = None
    """Text of a system message before each problem. None: whatever the chat template does."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens, chat template included."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with longer ones: refuse to start, leave them out and say how many, or keep
    their last max_prompt_length tokens."""

    # Generation
    prompts_per_step: int = 16
    """Prompts per training step, over all devices."""
    num_generations: int = 8
    """Completions per prompt: the group that advantages are relative to."""
    max_completion_length: int | None = None
    """Longest completion in tokens. None: 48 for the embedded model, else 512."""
    temperature: float = 1.0
    """Sampling temperature; also divides the logits in training."""
    top_k: int | None = None
    """Sample from the top_k likeliest tokens. None: all. The trainer's log-probs are always those
    of the full softmax."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion, as its end-of-sequence tokens do; they stay in its text."""
    max_num_seqs: int | None = None
    """Completions decoded at a time, over all devices: whenever some end, others take their place.
    Fewer take less memory, though each then keeps its prompt's keys and values for itself. None:
    all of a step's."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Dtype of keys and values while sampling. Rounded ones sample from another distribution than
    is trained: sampling/* metrics record by how much, and importance_sampling_mode corrects it.
    auto: that of the model's arithmetic."""

    # Rewards
    reward_funcs: tuple[str, ...] = ("correct",)
    """Built-in rewards: correct, correct_strict, format, tags."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function. None: 1 each."""
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"
    """Several rewards: sum them, then normalise; or normalise each in its group, then their sum in
    the batch (GDPO)."""
    overlong_buffer: float = 0.0
    """DAPO's soft over-long penalty: over this last share of max_completion_length the reward
    falls linearly by up to 1 (DAPO: 0.2). 0: none."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by fresh prompts (DAPO)."""
    max_generation_batches: int | None = None
    """With dynamic_sampling: rollouts a step may make, at most. None: 4."""

    # Advantages
    advantage_estimator: AdvantageEstimator = "grpo"
    """What a reward is compared with: its group's mean (grpo), the mean of the group's others
    (rloo), nothing (reinforce), the batch (reinforce_plus_plus), or its group's mean and then the
    batch (reinforce_plus_plus_baseline)."""
    scale_rewards: ScaleRewards | None = None
    """Divide advantages by the standard deviation of the group, of the batch, or by nothing; grpo
    estimator only. None: group."""

    # Objective
    loss_type: LossType = "dapo"
    """Clipped ratios: the mean over sequences of token means (grpo), or the sum over tokens, by the
    rollout's mean tokens an update (dapo), the update's own tokens (bnpo) or a constant (dr_grpo);
    cispo: capped ratios as weights of log-probs, summed as dapo; sapo: a soft gate in place of
    clipping, averaged as grpo."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """Ratios of tokens, of whole sequences (GSPO), or of sequences with gradients of tokens
    (GSPO-token)."""
    epsilon: float | None = None
    """Clip range of the ratio below 1. Without effect with one update a rollout, where ratios are
    exactly 1. None: 0.2."""
    epsilon_high: float | None = None
    """Clip range of the ratio above 1; for cispo, which needs it, the cap on the ratio itself.
    None: epsilon."""
    delta: float | None = None
    """Cap on the ratio at negative advantages, where clipping has none (INTELLECT-2). Above
    1 + epsilon_high."""
    dual_clip: float | None = None
    """Dual-clip PPO's bound c on the loss at negative advantages, -c A (verl: 3). Above
    1 + epsilon_high, where it is delta by another name."""
    sapo_temperature_pos: float | None = None
    """Sharpness of sapo's gate at positive advantages. None: 1.0."""
    sapo_temperature_neg: float | None = None
    """Sharpness of sapo's gate at negative advantages. None: 1.05."""
    mask_truncated_completions: bool = False
    """Leave completions that max_completion_length cut off out of the loss."""
    top_entropy_quantile: float = 1.0
    """Share of the tokens, those of the highest entropy, that the policy term acts on. Below 1 each
    update takes one more forward pass."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy, which the loss rewards."""

    # Several updates on a rollout
    num_iterations: int = 1
    """Passes over each rollout. From the second update on, ratios are against the policy that
    sampled."""
    steps_per_generation: int = 1
    """Updates in each pass, each on an equal share of the rollout's prompts (in TRL: micro-steps,
    of which accumulation makes updates)."""

    # KL to a reference policy
    beta: float = 0.0
    """Weight of the KL divergence to the reference model. 0: no such model is kept."""
    kl_estimator: KLEstimator | None = None
    """Estimator of the divergence: k1, k2 or k3. None: k3."""
    kl_clamp: float | None = None
    """Clamp each token's estimate to this size (verl: 10). None: no clamp."""
    use_bias_correction_kl: bool | None = None
    """Multiply the estimate by the ratio, which makes the gradients of k1 and k3 unbiased
    (DeepSeek-V3.2); that of k2 is so as it is. False with k3 is the GRPO paper's form. None: True,
    with k2 False."""
    sync_ref_model: bool = False
    """Move the reference model towards the trained one every ref_model_sync_steps steps."""
    ref_model_sync_steps: int | None = None
    """Training steps, that is rollouts, between two such moves (in TRL: updates). None: 64."""
    ref_model_mixup_alpha: float | None = None
    """Share of the trained model in the mixture that becomes the reference. None: 0.6."""

    # Where the sampler's distribution is not the trainer's
    importance_sampling_mode: SamplerCorrection | None = None
    """Weight tokens by the ratio of the trainer's probability to the sampler's, a token's own or
    its sequence's, truncated to the clip range or masked outside it. None: unweighted."""
    importance_sampling_clip_min: float | None = None
    """Lower end of that range, below 1. None: open."""
    importance_sampling_clip_max: float | None = None
    """Upper end of that range, above 1. None: 3.0, or open where the lower end is given."""
    off_policy_mask_threshold: float | None = None
    """Leave out sequences of negative advantage whose tokens' mean of sampler's less policy's
    log-prob exceeds this (DeepSeek-V3.2). None: none."""

    # Optimiser
    steps: int = 150
    """Training steps: rollouts, each with num_iterations x steps_per_generation updates."""
    optimizer: Literal["adamw", "lion"] = "adamw"
    """Optimiser; any other optax transformation can be passed to GRPOTrainer."""
    learning_rate: float | None = None
    """Peak learning rate. None: 1e-4 for the embedded model, else 1e-6."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up: level, or down to 0."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    adam_beta1: float = 0.9
    """Decay of the first moment (Lion: of the update's interpolation)."""
    adam_beta2: float = 0.99
    """Decay of the second moment (Lion: of the momentum)."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm."""

    # Devices and memory
    mesh: str = "auto"
    """Devices as dp,fsdp,tp: auto (1,-1,1), host_local, 2,-1,1 or dp:2,fsdp:-1,tp:1."""
    rollout_sharding: Literal["auto", "legacy", "maxtext"] = "auto"
    """Completions over all devices (legacy), or over dp only, with weights that stay where they are
    (maxtext). auto: legacy where they divide."""
    require_processes: int | None = None
    """Processes, one a host, that the run must have, or it does not start. None: as many as
    whatever started it says there are."""
    start_timeout: float | None = None
    """Seconds to wait at the start for the other processes. None: what the launcher says, or 30."""
    micro_batch_size_per_device: int | Literal["auto"] | None = None
    """Completions a device takes through the model at a time; the update is the same for any
    value. auto: as many as fit, found by compiling for the devices. None: all of them."""
    loss_backend: Literal["dense", "chunked", "pallas"] = "chunked"
    """Log-probs from all logits at once (dense), from a tile of them at a time (chunked), or in
    kernels for TPUs and GPUs (pallas; interpreted, slowly, on CPUs)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the model's arithmetic; parameters are float32. auto: bfloat16 on TPU and GPU,
    float32 on CPU."""
    remat: Remat | Literal["auto"] = "auto"
    """What the backward pass finds stored of each layer: all of it (none), matrix products (dots),
    only its input (full). auto: none on CPU, full on TPU and GPU."""

    # Evaluation and records
    eval_problems: int = 512
    """Held-out problems that an evaluation uses, at most."""
    output_dir: str | Path | None = None
    """Folder of the run. None: runs/MODEL-DATA-seedSEED."""
    log_completions_steps: int = 10
    """Write the table of prompts, completions and rewards every so many steps; 0: never."""
    wandb: Literal["online", "offline", "disabled"] = "disabled"
    """Weights & Biases: stream, write locally, or not at all."""
    wandb_project: str | None = None
    """Project of the Weights & Biases run. None: grpo_eqx."""
    seed: int = 0
    """Seed of data order and sampling, below 2^32."""

    def __post_init__(self) -> None:
        check_values(self)
        check_combinations(self)

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps on each rollout."""
        return self.num_iterations * self.steps_per_generation

    def resolved(self) -> "GRPOConfig":
        """The same config with every rule-given `None` that has a part in it replaced."""
        embedded = self.model == EMBEDDED_MODEL
        names = [
            str(x).rstrip("/").rsplit("/", 1)[-1].removesuffix(".jsonl")
            for x in (self.model, self.data)
        ]
        defaults: dict[str, Any] = {
            "max_completion_length": 48 if embedded else 512,
            "learning_rate": 1e-4 if embedded else 1e-6,
            "output_dir": Path("runs") / f"{names[0]}-{names[1]}-seed{self.seed}",
            **_active_defaults(self),
        }
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def _active_defaults(cfg: GRPOConfig) -> dict[str, Any]:
    """Values for the fields that are `None` and have a part in this combination."""
    defaults: dict[str, Any] = {}
    if cfg.loss_type in CLIPPED_LOSSES:
        defaults["epsilon"] = DEFAULT_EPSILON
        defaults["epsilon_high"] = defaults["epsilon"] if cfg.epsilon is None else cfg.epsilon
    if cfg.loss_type == "sapo":
        defaults |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    if cfg.beta > 0:
        unbiased = cfg.kl_estimator == "k2"
        defaults |= {"kl_estimator": "k3", "use_bias_correction_kl": not unbiased}
    if cfg.sync_ref_model:
        defaults |= {
            "ref_model_sync_steps": DEFAULT_REF_MODEL_SYNC_STEPS,
            "ref_model_mixup_alpha": 0.6,
        }
    if cfg.importance_sampling_mode is not None and cfg.importance_sampling_clip_min is None:
        defaults["importance_sampling_clip_max"] = 3.0
    if scales_rewards(cfg):
        defaults["scale_rewards"] = "group"
    if cfg.dynamic_sampling:
        defaults["max_generation_batches"] = 4
    if cfg.wandb != "disabled":
        defaults["wandb_project"] = "grpo_eqx"
    return defaults
