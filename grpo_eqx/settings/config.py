"""All settings of a run, in one frozen dataclass."""

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grpo_eqx.common.choices import (
    ALL_LINEAR,
    CLIPPED_LOSSES,
    SAMPLER_WEIGHTS,
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KLEstimator,
    LearningRateCourse,
    LossType,
    MultiObjectiveAggregation,
    Remat,
    RolloutShardingName,
    SamplerCorrection,
    ScaleRewards,
)
from grpo_eqx.common.errors import listed
from grpo_eqx.common.read_files import expanded
from grpo_eqx.settings.checks import (
    CHECKS,
    DEFAULT_EPSILON,
    DEFAULT_REF_MODEL_SYNC_STEPS,
    DEFAULT_STEPS,
    scales_rewards,
)
from grpo_eqx.settings.embedded import EMBEDDED_DATA, EMBEDDED_MODEL, is_embedded
from grpo_eqx.settings.hints import HINTS
from grpo_eqx.settings.run_names import run_name
from grpo_eqx.settings.types import (
    GroupSize,
    InnerShare,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    SamplingTemperature,
    Seconds,
    Seed,
    Share,
    ShareBelowOne,
    convert_settings,
)
from grpo_eqx.settings.value_checks import VALUE_CHECKS

_PATHS = "model", "data", "eval_data", "output_dir", "resume", "chat_template"
"""Settings that may be a path."""
_OF_MODEL = "learning_rate", "max_completion_length"
"""Settings whose defaults follow the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Settings of a GRPO run. The defaults train the embedded model on the embedded problems.

    Fields that TRL has too keep TRL's names. `resolved()` fills in fields that are `None` where
    their docstring gives a rule.
    """

    # Model and data
    model: str = EMBEDDED_MODEL
    """Model folder, hub name (Qwen/Qwen2.5-3B-Instruct), or tiny_qwen2, the embedded model. A hub
    name can end in a branch, tag or commit: NAME@REVISION."""
    data: str = EMBEDDED_DATA
    """JSONL file with training problems, hub name (openai/gsm8k), or word_problems, the embedded
    ones. A hub name can have a configuration, a revision and another split than train:
    OWNER/NAME/CONFIG@REVISION:SPLIT."""
    eval_data: str | None = None
    """Held-out problems, for evaluations: a name or file as for data. None: the embedded held-out
    set, the hub's split test, or problems held out from the end of data, at most a tenth."""
    system_prompt: str | None = None
    """System message before each problem. None: left to the chat template."""
    chat_template: str | None = None
    """File with a chat template (Jinja) in place of the tokenizer's own, or none: problems are
    texts that the model continues as they are. None: the tokenizer's own."""
    chat_template_kwargs: tuple[str, ...] | Mapping[str, Any] = ()
    """Variables of the chat template, each as NAME=VALUE with a value in JSON, such as
    enable_thinking=false; in Python and files also a mapping."""
    max_prompt_length: PositiveInt = 1024
    """Maximum prompt length in tokens, including the chat template."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """Handling of longer prompts: refuse to start, drop them and report how many, or keep their
    last max_prompt_length tokens."""

    # Generation
    prompts_per_step: PositiveInt = 16
    """Prompts per training step, across all devices."""
    num_generations: GroupSize = 8
    """Completions per prompt: the group that advantages are relative to."""
    max_completion_length: PositiveInt | None = None
    """Maximum completion length in tokens. None: 48 for the embedded model and those of its shape,
    such as what was trained from it; else 512."""
    temperature: SamplingTemperature = 1.0
    """Sampling temperature; also divides the logits in training."""
    top_k: PositiveInt | None = None
    """Sample from the top_k most likely tokens. None: all. The trainer's log-probs are always those
    of the full softmax."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens that together have this probability."""
    min_p: Share = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion, like end-of-sequence tokens; they stay in its text. A shell
    writes the end of a line as $'\\n'."""
    max_num_seqs: PositiveInt | None = None
    """Completions decoded at a time, across all devices. Where one ends, another takes its place.
    Fewer take less memory, although each then keeps its own copy of its prompt's keys and values.
    With max_staleness, fewer than the completions of max_staleness + 1 steps. None: all completions
    of a step."""
    rollout_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    """Dtype of the weights while sampling, in evaluations too. int8 has a scale per output, and
    decoding reads half the bytes of bfloat16; sampling/* metrics record the difference to the
    trained weights, and importance_sampling_mode corrects for it. auto: the dtype that the model
    computes in."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Dtype of keys and values while sampling. With rounded ones the sampler's distribution is not
    the trained one: sampling/* metrics record the difference, and importance_sampling_mode corrects
    for it. auto: the dtype that the model computes in."""

    max_staleness: NonNegativeInt = 0
    """Steps by which the policy that drew a token may be older than the one that learns from it.
    Above 0, a step learns from the first prompts_per_step groups that are whole; other completions
    go on with the weights of the next step. A group that would become older is waited for, and none
    is dropped. 0: each step samples what it learns from."""
    carried_caches: Literal["recompute", "keep"] | None = None
    """Keys and values of completions that go on after an update: recompute them with the new
    weights, or keep those of the weights that drew the tokens, which is faster, takes memory during
    updates, and draws tokens from a mixture of policies. None: recompute with max_staleness."""
    router_replay: bool = False
    """Train each token through the experts that the sampler chose for it, weighted by the trained
    router (R3); for models with experts."""

    # Tools and environments
    max_tool_calling_iterations: PositiveInt | None = None
    """Turns of a completion that tools or its environment answer. None: as many as
    max_completion_length has room for."""
    tool_timeout: Seconds | None = None
    """Seconds that a call of a tool or an environment may take. None: no limit."""
    tool_workers: NonNegativeInt = 0
    """Processes that call tools that are functions and not async, and are killed at tool_timeout.
    0: threads of the run's own process."""
    max_tool_response_length: PositiveInt | None = None
    """Tokens of an answer; a longer answer is cut. None: no limit."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Part of a longer answer that is kept; middle: half of either end."""
    tool_failures: Literal["answer", "stop"] = "answer"
    """When a call raises or runs out of time: answer the model with the error, or stop the run.
    Completions of a harness that fails are left out, or stop the run."""

    # Agents that speak to the model over HTTP
    harness: str | None = None
    """Command line of an agent, such as "python agent.py", which makes each completion. It finds
    the model in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and its problem as JSON on
    standard input; a number in the last line that it prints is the reward. None: no agent, or the
    function that GRPOTrainer is given."""
    harness_timeout: Seconds | None = None
    """Seconds that the harness may take for a completion. None: no limit."""
    harness_concurrency: PositiveInt | None = None
    """Completions that the harness works on at a time. None: 64 programs, or 256 calls of a
    function."""
    harness_host: str = "127.0.0.1"
    """Address at which the first process serves the model to agents. With another than 127.0.0.1,
    other machines can connect; they get answers only with the secret of a completion."""
    harness_port: Port = 0
    """Port of that address. 0: any that is free, another in each step."""
    fork_threshold_tokens: NonNegativeInt = 1024
    """Where an agent changes its last answer, fewer tokens than this are left out of the loss; more
    begin a trajectory of their own, as does any change of what came before."""

    # Rewards
    reward_funcs: tuple[str, ...] = ("correct",)
    """Built-in rewards: correct, correct_strict, format, tags."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function. None: 1 each."""
    reward_timeout: Seconds | None = None
    """Seconds that a reward function of your own may take for one completion; an async one, or one
    in reward_workers. None: no limit."""
    reward_batch_timeout: Seconds | None = None
    """Seconds that it may take for all completions of a rollout. None: no limit."""
    reward_workers: NonNegativeInt = 0
    """Processes that call reward functions of your own that are not async, with one completion at a
    time. 0: they are called in the run's own process, with all completions."""
    reward_failures: Literal["stop", "drop"] = "stop"
    """When a reward function raises, returns a number that is not finite, crashes its worker or
    runs out of time: stop the run, or drop these completions from advantages and loss."""
    max_failed_rewards: PositiveShare | None = None
    """Share of a rollout's completions that reward_failures drop may drop for each function; with
    more, the run stops. None: 0.1."""
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"
    """Aggregation of several rewards: sum them, then normalize; or normalize each within its group,
    then their sum within the batch (GDPO)."""
    overlong_buffer: ShareBelowOne = 0.0
    """DAPO's soft overlong penalty: over this last fraction of max_completion_length the reward
    falls linearly by up to 1 (DAPO: 0.2). 0: none."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with fresh prompts (DAPO)."""
    max_generation_batches: PositiveInt | None = None
    """Maximum rollouts per step with dynamic_sampling. None: 4."""

    # Advantages
    advantage_estimator: AdvantageEstimator = "grpo"
    """Baseline of a reward: the mean of its group (grpo), the mean of the other completions in its
    group (rloo), none (reinforce), the batch (reinforce_plus_plus), or the mean of its group and
    then the batch (reinforce_plus_plus_baseline)."""
    scale_rewards: ScaleRewards | None = None
    """Standard deviation that divides advantages: of the group, of the batch, or none;
    grpo estimator only. None: group."""

    # Objective
    loss_type: LossType = "dapo"
    """Policy loss. Clipped ratios: the mean over sequences of token means (grpo), or the sum over
    tokens divided by the rollout's mean tokens per update (dapo), by the update's own tokens (bnpo)
    or by a constant (dr_grpo). cispo: capped ratios as weights of log-probs, summed as in dapo.
    sapo: a soft gate instead of clipping, averaged as in grpo."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """Ratios per token, per sequence (GSPO), or per sequence with per-token gradients
    (GSPO-token)."""
    epsilon: InnerShare | None = None
    """Clip range of the ratio below 1. No effect with one update per rollout, where ratios are
    exactly 1. None: 0.2."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the ratio above 1; for cispo, which requires it, the cap on the ratio itself.
    None: epsilon."""
    delta: float | None = None
    """Cap on the ratio at negative advantages, where clipping sets none (INTELLECT-2). Must exceed
    1 + epsilon_high."""
    dual_clip: float | None = None
    """Dual-clip PPO's bound c on the loss at negative advantages, -c A (verl: 3). Must exceed
    1 + epsilon_high, where it is equivalent to delta."""
    sapo_temperature_pos: PositiveFloat | None = None
    """Sharpness of sapo's gate at positive advantages. None: 1.0."""
    sapo_temperature_neg: PositiveFloat | None = None
    """Sharpness of sapo's gate at negative advantages. None: 1.05."""
    mask_truncated_completions: bool = False
    """Leave completions truncated at max_completion_length out of the loss."""
    top_entropy_quantile: PositiveShare = 1.0
    """Fraction of the tokens, those with the highest entropy, that the policy term acts on. Values
    below 1 cost one more forward pass per update."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight with which the mean entropy is subtracted from the loss."""

    # Updates per rollout
    num_iterations: PositiveInt = 1
    """Passes over each rollout. From the second update on, ratios are relative to the policy that
    sampled."""
    steps_per_generation: PositiveInt = 1
    """Updates per pass, each on an equal share of the rollout's prompts (in TRL: micro-steps, which
    gradient accumulation combines into updates)."""

    # KL to a reference policy
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model. 0: no reference model is kept."""
    kl_estimator: KLEstimator | None = None
    """Estimator of the KL divergence: k1, k2 or k3. None: k3."""
    kl_clamp: PositiveFloat | None = None
    """Bound on the magnitude of each token's estimate (verl: 10). None: no bound."""
    use_bias_correction_kl: bool | None = None
    """Multiply the estimate by the ratio, which makes the gradients of k1 and k3 unbiased
    (DeepSeek-V3.2); that of k2 is unbiased without it. False with k3 is the GRPO paper's form.
    None: True, but False with k2."""
    sync_ref_model: bool = False
    """Move the reference model toward the trained one every ref_model_sync_steps steps."""
    ref_model_sync_steps: PositiveInt | None = None
    """Training steps (rollouts) between two such moves (in TRL: updates). None: 64."""
    ref_model_mixup_alpha: PositiveShare | None = None
    """Weight of the trained model in the mixture that becomes the reference. None: 0.6."""

    # Correction for a sampler whose distribution is not the trainer's
    importance_sampling_mode: SamplerCorrection | None = None
    """Weight tokens by the ratio of the trainer's probability, before the updates, to the
    sampler's, per token or per sequence, truncated to the clip range or masked outside it (with
    max_staleness, the decoupled form). coupled: the loss's own ratios, and their clipping, are
    relative to the policies that drew the tokens. none: unweighted. Required with max_staleness.
    None: none, but token_truncate where rollout_dtype is int8."""
    importance_sampling_clip_min: float | None = None
    """Lower end of that range, below 1. None: unbounded."""
    importance_sampling_clip_max: float | None = None
    """Upper end of that range, above 1. None: 3.0, or unbounded if the lower end is given."""
    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Mask sequences of negative advantage for which sampler minus policy log-prob, averaged over
    tokens, exceeds this (DeepSeek-V3.2). None: mask none."""

    # Optimizer
    steps: PositiveInt = DEFAULT_STEPS
    """Training steps: rollouts, each with num_iterations x steps_per_generation updates."""
    num_train_epochs: PositiveFloat | None = None
    """Passes over the training problems, in place of steps, which is left out. None: steps
    decides."""
    optimizer: Literal["adamw", "lion"] = "adamw"
    """Optimizer; any other optax transformation can be passed to GRPOTrainer."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. None: 1e-4 for the embedded model and those of its shape, else 1e-6; ten
    times that with lora_rank."""
    lr_scheduler_type: LearningRateCourse = "linear"
    """Learning rate schedule after the warm-up: constant, or decaying to 0."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from 0."""
    warmup_ratio: ShareBelowOne | None = None
    """Share of all updates to warm up for, in place of warmup_steps. None: warmup_steps decides."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, applied to matrices only."""
    adam_beta1: ShareBelowOne = 0.9
    """Decay rate of the first moment (Lion: of the update's interpolation)."""
    adam_beta2: ShareBelowOne = 0.99
    """Decay rate of the second moment (Lion: of the momentum)."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm that the gradient is clipped to."""
    max_skipped_updates: NonNegativeInt = 3
    """Updates in a row that may be skipped because their loss or gradient is not finite; one more
    ends the run."""

    # LoRA
    lora_rank: PositiveInt | None = None
    """Rank of the low-rank adapters that are trained in place of the model, whose weights stay as
    they are, in the compute dtype. None: all parameters are trained."""
    lora_alpha: PositiveFloat | None = None
    """Factor of the adapters, divided by the rank. None: 32 with lora_rank."""
    lora_target: str | None = None
    """Linear maps with an adapter: all-linear, or names such as q_proj,v_proj. None: all-linear
    with lora_rank."""
    use_rslora: bool = False
    """Divide lora_alpha by the root of the rank instead (rank-stabilized LoRA)."""
    load_in_8bit: bool = False
    """With lora_rank, hold the layers' frozen matrices as int8, with a scale per output."""

    # Devices and memory
    mesh: str = "auto"
    """Device mesh as dp,fsdp,tp: auto (1,-1,1), host_local, 2,-1,1 or dp:2,fsdp:-1,tp:1."""
    rollout_sharding: RolloutShardingName = "auto"
    """Layout while generating. Each device holds all weights (replicated), or N neighbors share
    them (tensor:N), for completions of their own; weights are sent for every token (legacy), or
    stay in place and devices decode the same completions (maxtext). auto: the fastest that fits, by
    an estimate."""
    rollout_devices: PositiveInt | None = None
    """Devices of the run that sample while the others train; on several hosts half of them, whole
    hosts each. With max_staleness, they sample during updates. Weights are sent from device to
    device, once per step. None: all devices do both."""
    require_processes: PositiveInt | None = None
    """Number of processes, one per host, that the run requires to start. None: as many as its
    launcher or environment reports."""
    start_timeout: Seconds | None = None
    """Seconds to wait for the other processes at startup. None: the launcher's value, or 30."""
    micro_batch_size_per_device: PositiveInt | Literal["auto"] | None = None
    """Completions of full length that a device processes at a time, with their prompts; the update
    is the same for any value. auto: the fewest micro-batches that fit, found by compiling for the
    devices. None: one, or as many as fit 8,192 tokens, and 1,024 on CPUs."""
    loss_backend: Literal["dense", "chunked", "pallas"] = "chunked"
    """Log-probs from all logits at once (dense), from one tile of logits at a time (chunked), or in
    kernels for TPUs and GPUs (pallas; interpreted, and slow, on CPUs)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that the model computes in; parameters are float32. auto: bfloat16 on TPU and GPU,
    float32 on CPU."""
    remat: Remat | Literal["auto"] = "auto"
    """Rematerialization: each layer stores all values (none), its matrix products (dots), or only
    its input (full) for the backward pass. auto: none on CPU, full on TPU and GPU."""

    # Records and evaluation
    eval_problems: PositiveInt = 512
    """Maximum number of held-out problems per evaluation."""
    eval_steps: PositiveInt | None = None
    """Steps between evaluations of the model while it is trained; one more is made at the end.
    None: none are made."""
    eval_on_start: bool = False
    """Evaluate the model before the first step too."""
    num_generations_eval: PositiveInt | None = None
    """Completions of each problem in these evaluations that are sampled, for pass@k and maj@k,
    besides a greedy one. None: greedy ones alone."""
    eval_temperature: PositiveFloat | None = None
    """Temperature of the sampled ones. None: temperature."""
    output_dir: str | Path | None = None
    """Output folder of the run. None: runs/RUN_NAME, or runs/MODEL-DATA-seedSEED, followed by a
    hash of other settings that make it another run."""
    run_name: str | None = None
    """Name of the run, for its folder, if output_dir is not set, and for its trackers."""
    log_completions_steps: NonNegativeInt = 1
    """Steps between tables of prompts, completions, rewards and log-probs in the run's folder, for
    grpo-eqx inspect; 0: none are written."""
    log_completions: bool = False
    """Print some of a step's completions, from the best to the worst, whenever a table is
    written."""
    num_completions_to_print: PositiveInt | None = None
    """Completions that log_completions prints. None: 4 (in TRL: all)."""
    save_minutes: PositiveFloat | None = 10.0
    """Minutes between checkpoints. None: they are saved by save_steps alone, and at the end."""
    save_steps: PositiveInt | None = None
    """Steps between checkpoints. None: they are saved by save_minutes alone, and at the end."""
    save_total_limit: PositiveInt | None = 2
    """Newest checkpoints to keep; older ones are deleted. None: all."""
    metric_for_best_model: str | None = None
    """Metric, such as reward. The saved step with its best value is kept as well. With
    one of an evaluation, such as eval/greedy/pass@1, all evaluated steps are saved. None: only the
    newest are kept."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better. None: True."""
    hang_timeout: Seconds | None = 1800.0
    """Seconds without any progress, compilation included, after which a run ends itself, with the
    stacks of all threads in its output. None: it waits forever."""
    preemption_deadline: Seconds = 25.0
    """Seconds after SIGTERM within which the process ends, with a new checkpoint if the step is
    done and saved by then."""
    stop_after: str | None = None
    """Time since the trainer was made, such as 11h50m, by which the run stops with a checkpoint,
    before a batch queue ends it. None: no limit."""
    resume: str = "auto"
    """Checkpoint to continue from: the newest in output_dir, if there is one (auto), none (never),
    or a run folder or checkpoint by its path."""
    profile_steps: str | None = None
    """Steps whose work a JAX trace in the run's folder shows, such as 5:7, the last included, or 7.
    None: no trace."""
    profile_memory: bool = False
    """Write what is in the devices' memory after each of these steps, too."""
    report_to: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, whose files are in the run's folder, and wandb
    (Weights & Biases), which a mode in the next setting turns on by itself."""
    wandb: Literal["online", "offline", "disabled"] | None = None
    """Weights & Biases: stream, write locally, or off. None: if report_to has wandb, offline where
    WANDB_MODE is, else online; without it, disabled."""
    wandb_project: str | None = None
    """Project of the Weights & Biases run. None: that of WANDB_PROJECT, else grpo_eqx."""
    seed: Seed = 0
    """Seed for data order and sampling, below 2^32."""

    def __post_init__(self) -> None:
        if self.report_to in ("none", ["none"], ("none",)):  # as TRL's scripts have it
            object.__setattr__(self, "report_to", ())
        convert_settings(self, HINTS)
        for check in (*VALUE_CHECKS, *CHECKS):
            read = inspect.signature(check).parameters
            check(**{name: getattr(self, name) for name in read})

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout."""
        return self.num_iterations * self.steps_per_generation

    @property
    def num_warmup_updates(self) -> int:
        """Updates over which the learning rate rises."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * self.steps * self.updates_per_step)

    def for_problems(self, count: int) -> "GRPOConfig":
        """Returns a copy in which `steps` replaces `num_train_epochs`, for so many problems."""
        if self.num_train_epochs is None:
            return self
        steps = math.ceil(self.num_train_epochs * count / self.prompts_per_step)
        return dataclasses.replace(self, steps=steps, num_train_epochs=None)

    def without_effect(self) -> str | None:
        """Returns notes on settings without effect, or `None`."""
        of_ratios = (
            "epsilon", "epsilon_high", "delta", "dual_clip", "sapo_temperature_pos",
            "sapo_temperature_neg",
        )  # fmt: skip
        defaults = _active_defaults(self)  # which a run's config.json has
        names = [
            name for name in of_ratios if getattr(self, name) not in (None, defaults.get(name))
        ]
        if self.importance_sampling_level != "token":
            names.append("importance_sampling_level")
        notes = []
        slots, completions = self.max_num_seqs, self.prompts_per_step * self.num_generations
        if slots is not None and slots >= completions and not self.carried_steps:
            notes.append(
                f"note: max_num_seqs is {slots}, and a rollout has {completions} completions: all "
                f"are decoded at once, as without it."
            )
        if self.rollout_devices is not None and not self.max_staleness:
            notes.append(
                f"note: rollout_devices is {self.rollout_devices}, and max_staleness is 0: devices "
                f"that sample wait for those that train, and the reverse; with max_staleness 1, "
                f"both work at the same time."
            )
        is_coupled = self.importance_sampling_mode == "coupled"
        if self.updates_per_step > 1 or is_coupled or not names:
            return "\n".join(notes) or None
        notes.append(
            f"note: with one update per rollout the ratio is exactly 1, and {', '.join(names)} "
            f"{'has' if len(names) == 1 else 'have'} no effect; raise num_iterations or "
            f"steps_per_generation for more updates."
        )
        return "\n".join(notes)

    @property
    def samples_ahead(self) -> bool:
        """Whether the completions of a step are sampled while the step before it trains."""
        return self.rollout_devices is not None and self.max_staleness > 0

    @property
    def carried_steps(self) -> int:
        """Steps by which a token may be older than the weights that its completion ends with.

        It is 1 less than `max_staleness` where sampling is a step ahead.
        """
        return self.max_staleness - self.samples_ahead

    def resolved(self, architecture: Mapping[str, Any] | None = None) -> "GRPOConfig":
        """Returns a copy in which defaults replace `None` in the fields that this config uses.

        **Arguments:**

        - `architecture`: fields of the `config.json` of a model that was passed as an object.
        """
        embedded = is_embedded(self.model, architecture)
        filled = self._filled(embedded)
        paths = {name: str(getattr(filled, name)) for name in _PATHS}
        in_home = {name: str(expanded(x)) for name, x in paths.items() if x[0] == "~"}
        filled = dataclasses.replace(filled, **in_home)  # type: ignore[arg-type]
        if filled.output_dir is not None:
            return filled
        name = self.run_name or run_name(vars(filled), filled._defaults(embedded))
        return dataclasses.replace(filled, output_dir=f"runs/{name}")

    def with_absolute_paths(self) -> "GRPOConfig":
        """Returns a copy of a resolved config whose run stays in its folder, whatever changes the
        working directory.
        """
        assert self.output_dir is not None  # resolved
        resume = str(self.resume)
        paths = {"output_dir": str(self.output_dir)}
        if resume not in ("auto", "never"):
            paths["resume"] = resume
        absolute = {name: str(Path(path).absolute()) for name, path in paths.items()}
        return dataclasses.replace(self, **absolute)  # type: ignore[arg-type]

    def note_on_defaults(self, architecture: Mapping[str, Any] | None = None) -> str | None:
        """Returns a note on the defaults that follow from a model other than the named default."""
        names = [name for name in _OF_MODEL if getattr(self, name) is None]
        if not names or (architecture is None and self.model == EMBEDDED_MODEL):
            return None
        embedded = is_embedded(self.model, architecture)
        filled = self._filled(embedded)
        said = listed([f"{name} is {getattr(filled, name):g}" for name in names])
        which = "one of the shape of" if embedded else "another than"
        return f"note: by default, {said}: the model is {which} {EMBEDDED_MODEL}"

    def _filled(self, embedded: bool) -> "GRPOConfig":
        adapters = self.lora_rank is not None
        full, lora = (1e-4, 1e-3) if embedded else (1e-6, 1e-5)  # "LoRA Without Regret"
        defaults: dict[str, Any] = {
            "max_completion_length": 48 if embedded else 512,
            "learning_rate": lora if adapters else full,
            **_active_defaults(self),
        }
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)

    def _defaults(self, embedded: bool) -> dict[str, Any]:
        """Returns the settings of a run of the same model that sets nothing else."""
        own = {
            field.name: field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in dataclasses.fields(self)
        }
        return own | dataclasses.asdict(GRPOConfig(model=self.model)._filled(embedded))


def _active_defaults(cfg: GRPOConfig) -> dict[str, Any]:
    """Returns the defaults of the fields that this combination of settings uses."""
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
    if cfg.lora_rank is not None:
        defaults |= {"lora_alpha": 32.0, "lora_target": ALL_LINEAR}
    if cfg.rollout_dtype == "int8":
        defaults["importance_sampling_mode"] = "token_truncate"
    mode = cfg.importance_sampling_mode or defaults.get("importance_sampling_mode")
    if mode in SAMPLER_WEIGHTS and cfg.importance_sampling_clip_min is None:
        defaults["importance_sampling_clip_max"] = 3.0
    if cfg.carried_steps:
        defaults["carried_caches"] = "recompute"
        defaults["max_num_seqs"] = cfg.prompts_per_step * cfg.num_generations
    if scales_rewards(cfg.advantage_estimator, cfg.multi_objective_aggregation):
        defaults["scale_rewards"] = "group"
    if cfg.dynamic_sampling:
        defaults["max_generation_batches"] = 4
    if cfg.reward_failures == "drop":
        defaults["max_failed_rewards"] = 0.1
    if cfg.log_completions:
        defaults["num_completions_to_print"] = 4
    if cfg.num_generations_eval is not None:
        defaults["eval_temperature"] = cfg.temperature
    wandb = "offline" if os.environ.get("WANDB_MODE") == "offline" else "online"
    defaults["wandb"] = wandb if "wandb" in cfg.report_to else "disabled"
    if (cfg.wandb or defaults["wandb"]) != "disabled":
        defaults["wandb_project"] = os.environ.get("WANDB_PROJECT") or "grpo_eqx"
    return defaults
