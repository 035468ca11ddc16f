"""Everything a run can be told, in one frozen dataclass."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from grpo_eqx._types import Remat
from grpo_eqx.errors import UserError

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

    # Rewards and objective
    reward_funcs: tuple[str, ...] = ("correct",)
    """Built-in rewards: correct, correct_strict, format, tags."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function. None: 1 each."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or by nothing."""
    epsilon: float = 0.2
    """Clip range of the ratio below 1. Without effect while the ratio is exactly 1: in the first
    update after each rollout."""
    epsilon_high: float | None = None
    """Clip range of the ratio above 1. None: epsilon."""
    num_iterations: int = 1
    """Updates per rollout. From the second on, ratios are against the policy that sampled."""

    # Optimiser
    steps: int = 150
    """Training steps: rollouts, each with num_iterations updates."""
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
    micro_batch_size_per_device: int | None = None
    """Completions a device takes through the model at a time; the update is the same for any
    value. None: all of them."""
    loss_backend: Literal["chunked", "dense"] = "chunked"
    """Log-probs a stretch of tokens at a time, or from all logits at once."""
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
    wandb_project: str = "grpo_eqx"
    """Project of the Weights & Biases run."""
    seed: int = 0
    """Seed of data order and sampling."""

    def __post_init__(self) -> None:
        _check(self)

    def resolved(self) -> "GRPOConfig":
        """The same config with every rule-given `None` replaced by its value."""
        embedded = self.model == EMBEDDED_MODEL
        names = [
            str(x).rstrip("/").rsplit("/", 1)[-1].removesuffix(".jsonl")
            for x in (self.model, self.data)
        ]
        defaults: dict[str, Any] = {
            "max_completion_length": 48 if embedded else 512,
            "learning_rate": 1e-4 if embedded else 1e-6,
            "epsilon_high": self.epsilon,
            "output_dir": Path("runs") / f"{names[0]}-{names[1]}-seed{self.seed}",
        }
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def _check(cfg: GRPOConfig) -> None:
    """Raises `UserError` for the first setting that cannot work, alone or with another."""
    for name in (
        "prompts_per_step",
        "max_prompt_length",
        "max_completion_length",
        "num_iterations",
        "steps",
        "micro_batch_size_per_device",
        "eval_problems",
    ):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1.")
    for name in ("warmup_steps", "log_completions_steps", "seed", "weight_decay"):
        if not getattr(cfg, name) >= 0:
            raise UserError(f"{name} is {getattr(cfg, name)}: it must not be negative.")
    if cfg.num_generations < 2:
        raise UserError(
            f"num_generations is {cfg.num_generations}: advantages are relative to a group, so "
            f"use at least 2."
        )
    if not 0 < cfg.temperature < math.inf:
        raise UserError(
            f"temperature is {cfg.temperature}: training samples, so it must be above 0."
        )
    for name in ("learning_rate", "max_grad_norm"):
        value = getattr(cfg, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}: it must be above 0 and finite.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            raise UserError(f"{name} is {getattr(cfg, name)}: it must be at least 0 and below 1.")
    if not all(math.isfinite(weight) for weight in cfg.reward_weights or ()):
        raise UserError(f"reward_weights are {cfg.reward_weights}: they must be finite.")
    if not 0 < cfg.epsilon < 1:
        raise UserError(f"epsilon is {cfg.epsilon}: it must be between 0 and 1.")
    if cfg.epsilon_high is not None and not cfg.epsilon_high > 0:
        raise UserError(f"epsilon_high is {cfg.epsilon_high}: it must be above 0.")
    if cfg.warmup_steps > cfg.steps * cfg.num_iterations:
        raise UserError(
            f"warmup_steps ({cfg.warmup_steps}) exceeds the run's "
            f"{cfg.steps * cfg.num_iterations} updates: lower it."
        )
