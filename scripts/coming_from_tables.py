"""Writes the tables of other libraries' settings into their pages.

python scripts/coming_from_tables.py
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generated_part import with_part

from grpo_eqx import GRPOConfig
from grpo_eqx.settings.unknown_names import advice, names_of_others

PAGES = Path(__file__).parents[1] / "docs" / "coming_from"

OURS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
_MODEL = "Qwen/Qwen2.5-3B-Instruct"
_RESOLVED = [
    GRPOConfig(model=_MODEL).resolved(),
    GRPOConfig(model=_MODEL, loss_type="sapo").resolved(),
    GRPOConfig(model=_MODEL, beta=0.1, sync_ref_model=True).resolved(),
]
"""Configs that between them use every field whose default depends on others."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Settings of another library."""

    page: str
    settings: tuple[str, ...]
    """Their names, with the sections that they are in."""
    differs: Mapping[str, str]
    """How those that have the name of a setting here differ from it, by their last part."""
    defaults: Mapping[str, Any] | None = None
    """Their defaults, by name, where the page shows them."""


TRL_DEFAULTS: Mapping[str, Any] = {
    "model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None,
    "disable_dropout": False, "cast_lm_head_to_fp32": False, "learning_rate": 1e-6,
    "remove_unused_columns": False, "num_generations": 8, "num_generations_eval": None,
    "max_completion_length": 512, "ds3_gather_for_generation": True, "shuffle_dataset": True,
    "pad_to_multiple_of": "auto", "generation_batch_size": None, "steps_per_generation": None,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": None,
    "chat_template_kwargs": None, "repetition_penalty": 1.0, "cache_implementation": None,
    "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1, "beta": 0.0,
    "num_iterations": 1, "epsilon": 0.2, "delta": None, "epsilon_high": None,
    "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token", "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group",
    "loss_type": "dapo", "mask_truncated_completions": False, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True, "log_completions": False, "log_multimodal": True,
    "num_completions_to_print": None, "log_unique_prompts": False,
    "log_completions_hub_repo": None, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    "vllm_importance_sampling_cap": None,
    # of transformers' TrainingArguments, those with the name of a setting here
    "output_dir": None, "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0,
    "report_to": "none", "run_name": None, "eval_steps": None, "eval_on_start": False,
    "save_steps": 500, "save_total_limit": None, "metric_for_best_model": None,
    "greater_is_better": None, "seed": 42,
}  # fmt: skip
"""Defaults of TRL's `GRPOConfig`: of its own fields, and of those that it inherits."""

TRL = Peer(
    page="trl.md",
    settings=tuple(TRL_DEFAULTS),
    defaults=TRL_DEFAULTS,
    differs={
        "learning_rate": "1e-6 as there, but 1e-4 for the embedded model, and ten times that with "
        "`lora_rank`",
        "num_generations_eval": "completions that are sampled besides a greedy one; by default "
        "none are. There: all completions of an evaluation, `num_generations` by default",
        "steps_per_generation": "updates per pass over a rollout, 1 by default. There: "
        "micro-steps, of which `gradient_accumulation_steps` make an update: divide by these",
        "top_k": "`None` samples from all tokens; there, 0",
        "min_p": "0.0 is off; there, `None`",
        "epsilon_high": "`cispo` requires it; there, it falls back to `epsilon`, a cap below 1",
        "delta": "must exceed 1 + `epsilon_high`; there, this is a recommendation",
        "importance_sampling_level": "has `sequence_token` (GSPO-token) too",
        "loss_type": "no `vespo`; `luspo` is `dr_grpo` with ratios of sequences, up to a constant "
        "factor; `bnpo` divides by the tokens of the update, there by those of a device",
        "scale_rewards": "`group`, `batch` or `none`; there `True` and `False` too, which are "
        "`group` and `none`",
        "ref_model_sync_steps": "training steps (rollouts), 64 by default; there updates, 512",
        "use_bias_correction_kl": "`True` as there, but `False` with `kl_estimator` `k2`, which is "
        "not there",
        "log_completions": "prints with each table (`log_completions_steps`); there, every "
        "`logging_steps`",
        "num_completions_to_print": "4 by default; there, all",
        "output_dir": "by default a folder in `runs` for each set of settings. A second run in a "
        "folder continues the first (`resume`)",
        "num_train_epochs": "in place of `steps`, which decides by default; there, 3.0",
        "lr_scheduler_type": "`constant`, `linear` or `cosine`",
        "warmup_steps": "updates; a share of them is `warmup_ratio`. There, a number below 1 is a "
        "share",
        "max_grad_norm": "must be above 0; a large one never clips",
        "report_to": "`wandb`, `tensorboard`, several, or `none`, which is the default. "
        "`metrics.jsonl` is always written",
        "eval_steps": "rollouts, and turns evaluations on; there updates, and `eval_strategy` does",
        "save_steps": "rollouts, beside `save_minutes`, 10 by default; there updates, 500",
        "metric_for_best_model": "a metric by its name [here](../guides/metrics.md), such as "
        "`eval/greedy/pass@1`",
    },
)  # fmt: skip

TRL_INHERITED = (
    "per_device_train_batch_size", "max_steps", "lr_scheduler_kwargs", "optim", "optim_args",
    "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps",
    "average_tokens_across_devices", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval",
    "fp16_full_eval", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config",
    "use_cache", "neftune_noise_alpha", "torch_empty_cache_steps", "auto_find_batch_size",
    "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
    "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica",
    "disable_tqdm", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "eval_strategy", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
    "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
    "include_for_metrics", "batch_eval_metrics", "save_only_model", "save_strategy",
    "save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo",
    "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "data_seed",
    "use_cpu", "accelerator_config", "parallelism_config", "dataloader_drop_last",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
    "label_names", "train_sampling_strategy", "length_column_name", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout",
    "fsdp", "fsdp_config", "deepspeed", "debug", "skip_memory_metrics", "do_train", "do_eval",
    "do_predict", "resume_from_checkpoint", "local_rank",
)  # fmt: skip
"""Fields that TRL's `GRPOConfig` inherits, without those with the name of a setting here."""

TUNIX = Peer(
    page="tunix.md",
    settings=(
        # GRPOConfig and DAPOConfig
        "algo_variant", "advantage_estimator", "policy_loss_fn", "loss_agg_mode", "loss_algo",
        "reward_manager", "num_generations", "num_iterations", "beta", "kl_loss_mode",
        "kl_clamp_value", "epsilon", "epsilon_high", "dynamic_sampling", "overlong_buffer",
        # of the agentic GRPOConfig
        "system_prompt", "max_response_length", "sampler_is", "sampler_is_threshold",
        "use_rollout_logps", "degenerate_group_masking", "off_policy_steps", "max_concurrency",
        # RLTrainingConfig
        "actor_optimizer", "critic_optimizer", "max_steps", "mini_batch_size",
        "train_micro_batch_size", "rollout_micro_batch_size", "compute_logps_micro_batch_size",
        "gradient_accumulation_steps", "max_seq_token_per_tpu", "eval_every_n_steps",
        "checkpoint_root_directory", "checkpointing_options", "metrics_logging_options",
        "metrics_prefix", "pbar_description", "profiler_options", "perf_metrics_options",
        "data_sharding_axis", "max_inflight_computations",
        # RolloutConfig
        "max_tokens_to_generate", "max_prompt_length", "temperature", "top_p", "top_k", "seed",
        "eos_tokens", "kv_cache_size", "data_type", "return_logprobs", "tensor_parallel_size",
        "data_parallel_size", "expert_parallel_size", "rollout_mapping_config",
        # ClusterConfig
        "role_to_mesh", "role_to_logical_axis_rule", "rollout_engine", "offload_to_cpu",
        # GRPOLearner
        "reward_fns", "metric_fns", "data_shuffle_seed",
    ),
    differs={
        "advantage_estimator": "`grpo`, as there, and others. Deviations are divided by with 1e-4 "
        "added; there, 1e-6",
        "num_generations": "8 by default; there, 2",
        "beta": "0 by default; there, 0.04",
        "temperature": "1.0 by default; there, 0.9",
        "top_k": "`None` samples from all tokens; there, -1 does so too",
        "seed": "an integer, which the order of problems follows from too",
        "max_prompt_length": "1024 by default, and longer prompts are refused "
        "(`overlong_prompts`); there, 64, and they are cut",
        "dynamic_sampling": "replaces groups of equal rewards; there, no code reads it",
        "overlong_buffer": "a share of `max_completion_length`, in tokens; there a dict, whose "
        "lengths are compared with those of texts",
    },
)  # fmt: skip

VERL = Peer(
    page="verl.md",
    settings=(
        "data.train_files", "data.val_files", "data.prompt_key", "data.reward_fn_key",
        "data.max_prompt_length", "data.max_response_length", "data.train_batch_size",
        "data.gen_batch_size", "data.val_batch_size", "data.shuffle", "data.seed",
        "data.filter_overlong_prompts", "data.truncation", "data.apply_chat_template_kwargs",
        "data.dataloader_num_workers", "model.path", "model.tokenizer_path",
        "model.custom_chat_template", "model.lora_rank", "model.lora_alpha",
        "model.target_modules", "model.lora_adapter_path", "model.trust_remote_code",
        "model.enable_gradient_checkpointing", "model.use_remove_padding", "model.use_liger",
        "model.use_fused_kernels", "actor.strategy", "actor.fsdp_config.fsdp_size",
        "actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload",
        "actor.fsdp_config.model_dtype", "actor.ulysses_sequence_parallel_size",
        "actor.ppo_mini_batch_size", "actor.ppo_micro_batch_size_per_gpu",
        "actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", "actor.ppo_epochs",
        "actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high",
        "actor.clip_ratio_c", "actor.policy_loss.loss_mode", "actor.tau_pos", "actor.tau_neg",
        "actor.loss_agg_mode", "actor.loss_scale_factor", "actor.entropy_coeff",
        "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type",
        "actor.use_prefix_grouper", "actor.router_replay", "actor.data_loader_seed",
        "actor.grad_clip", "actor.optim.optimizer", "actor.optim.lr",
        "actor.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps_ratio",
        "actor.optim.lr_scheduler_type", "actor.optim.min_lr_ratio", "actor.optim.weight_decay",
        "actor.optim.betas", "ref.log_prob_micro_batch_size_per_gpu", "rollout.name",
        "rollout.mode", "rollout.n", "rollout.temperature", "rollout.top_k", "rollout.top_p",
        "rollout.dtype", "rollout.quantization", "rollout.gpu_memory_utilization",
        "rollout.tensor_model_parallel_size", "rollout.max_num_seqs",
        "rollout.max_num_batched_tokens", "rollout.max_model_len", "rollout.enforce_eager",
        "rollout.free_cache_engine", "rollout.enable_prefix_caching", "rollout.val_kwargs",
        "rollout.calculate_log_probs", "rollout.enable_rollout_routing_replay",
        "rollout.multi_turn", "rollout.agent", "reward.custom_reward_function",
        "reward.reward_manager", "reward.reward_model", "reward.num_workers",
        "reward.sandbox_fusion", "algorithm.adv_estimator",
        "algorithm.norm_adv_by_std_in_grpo", "algorithm.filter_groups", "algorithm.gamma",
        "algorithm.lam", "algorithm.use_kl_in_reward", "algorithm.kl_penalty",
        "algorithm.kl_ctrl", "algorithm.rollout_correction.rollout_is",
        "algorithm.rollout_correction.rollout_is_threshold",
        "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "algorithm.rollout_correction.bypass_mode", "trainer.total_epochs",
        "trainer.total_training_steps", "trainer.project_name", "trainer.experiment_name",
        "trainer.logger", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.save_freq",
        "trainer.test_freq", "trainer.val_before_train", "trainer.resume_mode",
        "trainer.resume_from_path", "trainer.default_local_dir",
        "trainer.max_actor_ckpt_to_keep", "trainer.balance_batch", "trainer.critic_warmup",
        "trainer.esi_redundant_time",
    ),
    differs={
        "lora_rank": "`None` is off; there, 0",
        "lora_alpha": "32 by default; there, 16",
        "top_k": "`None` samples from all tokens; there, -1",
        "max_num_seqs": "over all devices, by default all of a step; there those of an engine, 256",
        "optimizer": "`adamw` or `lion`; there, the name of a class",
        "weight_decay": "0 by default; there, 0.01",
        "lr_scheduler_type": "`linear` by default; there, `constant`",
        "max_prompt_length": "1024 by default; there, 512",
        "router_replay": "`True` is R3; there, a section with a mode",
    },
)  # fmt: skip

MLLM_JAX = Peer(
    page="seed_yaml.md",
    settings=(
        "model_path", "steps", "rollout.backend", "rollout.batch_size", "rollout.n",
        "rollout.global_length", "rollout.max_length_sample", "rollout.fast_generate",
        "rollout.fast_qwen2_decode_attention", "rollout.sharding_style",
        "rollout.dynamic_sampling", "rollout.dynamic_sampling.max_extra_roll_rounds",
        "train.micro_batch_size", "train.micro_batch_size_per_device", "train.grad_accum_steps",
        "train.ppo_epochs", "train.beta", "train.gradient_checkpointing",
        "train.policy_loss_impl", "train.pallas_time_block", "train.pallas_block_size",
        "train.pallas_compute_dtype", "train.log_tpu_memory", "train.optimizer.name",
        "train.optimizer.clip_norm", "train.optimizer.weight_decay",
        "train.optimizer.lr_schedule.type", "train.optimizer.lr_schedule.peak_value",
        "train.optimizer.lr_schedule.init_value", "train.optimizer.lr_schedule.end_value",
        "train.optimizer.lr_schedule.warmup_ratio", "algo.name", "algo.estimator.name",
        "algo.estimator.kwargs", "algo.update.name", "mesh_shape", "wandb_project", "wandb_mode",
        "wandb_name", "reward_weights", "eval_every_steps", "eval_batches_per_process",
        "eval_split", "eval_full_every_epochs", "eval_full_num_pre_q", "eval_full_greedy",
        "train_steps_per_epoch",
    ),
    differs={
        "steps": "150 by default; there, 100",
        "dynamic_sampling": "`true` or `false`; there, a section",
        "micro_batch_size_per_device": "completions of full length, with their prompts; the "
        "update is the same for any value",
        "beta": "adds a KL term to the loss; there, it was computed and not added",
        "weight_decay": "0 by default; there, 1e-8",
        "warmup_ratio": "off by default; there, 0.05",
        "reward_weights": "1 each by default, for the one reward `correct`; there, 1, 0.5 and 0.5 "
        "for `correct`, `format` and `tags`",
    },
)  # fmt: skip

PEERS = (TRL, TUNIX, VERL, MLLM_JAX)


def with_tables(page: str, peer: Peer) -> str:
    """Returns a peer's page with the tables of its settings between its two marks."""
    parts = [_same(peer), _differing(peer)]
    parts += _answers(name for name in peer.settings if _is_other(name))
    if peer is TRL:
        parts.append("## What TRL inherits from transformers")
        parts += _answers(TRL_INHERITED, level=3)
    text = "\n\n".join(filter(None, parts))
    return with_part(page, "settings", "coming_from_tables", text)


def _same(peer: Peer) -> str:
    """Returns what has the same name and meaning."""
    same = [
        name
        for name in peer.settings
        if _last(name) in OURS and _last(name) not in peer.differs and not _is_other(name)
    ]
    if peer.defaults is None:
        return f"## Same name, same meaning\n\n{_joined(same)}."
    rows = [f"| `{x}` | {_value(peer.defaults[x])} | {_value(_default(x))} |" for x in same]
    head = "| setting | default there | default here |\n|---|---|---|"
    return "\n".join(["## Same name, same meaning", "", head, *rows])


def _differing(peer: Peer) -> str:
    rows = [f"| `{x}` | {peer.differs[_last(x)]} |" for x in peer.settings if _differs(x, peer)]
    head = "| setting | here |\n|---|---|"
    return "\n".join(["## Same name, with a difference", "", head, *rows]) if rows else ""


def _differs(name: str, peer: Peer) -> bool:
    return _last(name) in peer.differs and not _is_other(name)


def _answers(names: Iterable[str], level: int = 2) -> list[str]:
    """Returns tables of settings with another name here, and of those without any."""
    other: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for name in names:
        text = advice(name)
        assert text is not None, f"nothing is known of {name}"
        of_kind = (
            other if re.match(r"(use|set|write|call|pass|name|read|start) ", text) else missing
        )
        of_kind.setdefault(text, []).append(name)
    marks = "#" * level
    tables = []
    for title, head, answers in (
        ("Another name, or another way", "| there | here |", other),
        ("Not here", "| there | why, or what instead |", missing),
    ):
        rows = [f"| {_joined(of)} | {_code(text)} |" for text, of in answers.items()]
        tables.append("\n".join([f"{marks} {title}", "", head, "|---|---|", *rows]))
    return tables


def _is_other(name: str) -> bool:
    """Returns whether a setting is answered, although its last part is the name of one here."""
    return _last(name) not in OURS or ".".join(name.split(".")[-2:]) in names_of_others("settings")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _default(name: str) -> Any:
    """Returns a setting's default, also where it depends on others."""
    values = [getattr(cfg, name) for cfg in _RESOLVED] if OURS[name] is None else [OURS[name]]
    return next((value for value in values if value is not None), None)


def _value(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CODE = re.compile(
    r"(?:GRPOTrainer|trainer\.\w+|grpo_eqx\.recipes\.\w+)\([^)]*\)"  # calls
    r"|GRPOTrainer|grpo-eqx \w+|--\w+ \w+|sampling/\*|moe/\*|metrics\.jsonl|JAX_PLATFORMS=cpu"
    r"|\b[A-Z]{2,}(?:_[A-Z]+)+\b|jax\.config|\bjax_\w+"
    r"|\b(?:" + "|".join(sorted((x for x in OURS if "_" in x), key=len, reverse=True)) + r")\b"
    r"|(?<=\buse )(?:" + "|".join(x for x in OURS if "_" not in x) + r")\b"
    r"|(?<=\bset )(?:" + "|".join(x for x in OURS if "_" not in x) + r")\b"
)


def _code(text: str) -> str:
    """Returns a text for consoles with settings and calls in code style."""
    return _CODE.sub(lambda found: f"`{found[0]}`", text)


if __name__ == "__main__":
    for each in PEERS:
        path = PAGES / each.page
        path.write_text(with_tables(path.read_text(), each), encoding="utf-8")
