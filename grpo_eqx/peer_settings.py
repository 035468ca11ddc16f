"""Settings that people know from TRL, Tunix and verl: what to use instead, or why nothing."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from grpo_eqx.errors import UserError

_ALL_RECORDED = "every step is recorded in metrics.jsonl"
_FROM_PROMPTS = "batches are set by prompts_per_step, and memory by micro_batch_size_per_device"
_ONE_ENGINE = "there is no second engine: the trainer's own weights sample, in the same process"
_MESH = "set mesh and rollout_sharding: JAX shards the model over it"
_XLA = "programs are always compiled by XLA"
_FILES = "checkpoints and the model are files in output_dir"
_EVALUATE = "call trainer.evaluate() before and after fit()"
_PUSH = "call trainer.push_to_hub(repo_id) after fit()"
_PYTORCH = "it is about PyTorch, which is not used here"
_DATA_ON_HOST = "problems are tokenized once and kept in memory"
_NO_TOOLS = "completions are single turns of text, without tools"
_NO_VESPO = "the vespo loss is not offered; loss_type lists those that are"
_NO_LORA = "LoRA is not supported: all parameters are trained"
_NO_QUANTIZATION = "quantized models are not supported; parameters are float32"
_LIBRARY_LOGS = "set the level of Python's logging in your script"

ADVICE: Mapping[str, str] = {
    # TRL's and transformers' batches and length of training
    "per_device_train_batch_size": (
        f"use prompts_per_step, which counts prompts, not completions, over all devices; "
        f"{_FROM_PROMPTS}"
    ),
    "per_device_eval_batch_size": "evaluations choose their batches by themselves",
    "gradient_accumulation_steps": "use micro_batch_size_per_device, which accumulates gradients",
    "generation_batch_size": "use prompts_per_step x num_generations",
    "auto_find_batch_size": "use micro_batch_size_per_device auto",
    "max_steps": "use steps",
    "recipe": "start from grpo_eqx.recipes.NAME(...); on the command line it is --recipe NAME",
    "config": "it is a flag of grpo-eqx train",
    "print_config": "it is a flag of grpo-eqx train",
    "coordinator_address": "it is a flag of grpo-eqx train",
    "num_processes": "it is a flag of grpo-eqx train",
    "process_id": "it is a flag of grpo-eqx train",
    "train_data": "use data; in Python, GRPOTrainer(train_data=...)",
    "reward_model": "reward models are not loaded: call yours in a reward function",
    "num_samples_per_prompt": "use num_generations",
    "dataloader_drop_last": "epochs are joined without gaps, so no batch is short",
    "average_tokens_across_devices": "it is always so: token counts are those of the whole batch",
    # what TRL's scripts add, and names that people try
    "model_revision": "write it after the name: model NAME@REVISION",
    "attn_implementation": "the best attention of each kind of device is always used",
    "torch_dtype": "use dtype; parameters stay in float32",
    "use_peft": _NO_LORA,
    "use_rslora": _NO_LORA,
    "use_dora": _NO_LORA,
    "load_in_8bit": _NO_QUANTIZATION,
    "load_in_4bit": _NO_QUANTIZATION,
    "dataset_config": "it is main or the first; load another with datasets, in a script",
    "dataset_train_split": "write it after the name: data NAME:SPLIT",
    "dataset_test_split": "use eval_data NAME:SPLIT",
    "dataset_streaming": _DATA_ON_HOST,
    "dataset_text_field": "name the column question or prompt",
    "gradient_checkpointing_use_reentrant": "use remat (none, dots, full)",
    "reward_model_name_or_path": "reward models are not loaded: call yours in a reward function",
    "max_seq_length": "use max_prompt_length and max_completion_length",
    "packing": "completions share rows by themselves",
    "tokenizer_name": "it is the model's; in Python, GRPOTrainer(tokenizer=...)",
    "tokenizer_name_or_path": "it is the model's; in Python, GRPOTrainer(tokenizer=...)",
    "wandb_entity": "set WANDB_ENTITY in the environment",
    "wandb_run_name": "use run_name",
    "lr_scheduler": "use lr_scheduler_type (constant, linear, cosine)",
    "grad_accum": "use micro_batch_size_per_device, which accumulates gradients",
    "eval_batch_size": "evaluations choose their batches by themselves",
    "device": "JAX uses the devices that it finds; JAX_PLATFORMS chooses among them",
    "device_map": _MESH,
    "precision": "use dtype",
    "mixed_precision": "use dtype: parameters are always float32",
    "compile": _XLA,
    "save_dir": "use output_dir",
    "log_dir": f"use output_dir; {_ALL_RECORDED}",
    "project_name": "use wandb_project",
    "experiment_name": "use run_name",
    "name": "use run_name",
    "clip_range": "use epsilon and epsilon_high",
    "clip_eps": "use epsilon and epsilon_high",
    "entropy_coeff": "use entropy_coef",
    "kl_beta": "use beta",
    "n_samples": "use num_generations",
    "num_rollouts": "use num_generations",
    "rollout_batch_size": "use prompts_per_step x num_generations",
    "total_steps": "use steps",
    "max_train_steps": "use steps",
    "num_train_steps": "use steps",
    "total_episodes": "use steps",
    # optimizer
    "lr_scheduler_kwargs": "lr_scheduler_type has no more settings; pass GRPOTrainer an optimizer",
    "optim": "use optimizer (adamw, lion), or pass GRPOTrainer an optax transformation",
    "optim_args": "pass GRPOTrainer an optax transformation as optimizer",
    "optim_target_modules": "pass GRPOTrainer an optax transformation as optimizer",
    "adam_epsilon": "it is optax's 1e-8; for another, pass GRPOTrainer an optimizer",
    "adam_eps": "it is optax's 1e-8; for another, pass GRPOTrainer an optimizer",
    "label_smoothing_factor": "GRPO's loss has no labels to smooth",
    "neftune_noise_alpha": "noise on embeddings is not offered: ratios must be exact",
    # precision and memory
    "bf16": "use dtype bfloat16 (auto uses it on TPU and GPU)",
    "fp16": "use dtype bfloat16: float16 would need loss scaling",
    "bf16_full_eval": "evaluations use dtype, as training does",
    "fp16_full_eval": "evaluations use dtype, as training does",
    "tf32": "use dtype, or jax.config's jax_default_matmul_precision",
    "gradient_checkpointing": "use remat (none, dots, full)",
    "gradient_checkpointing_kwargs": "use remat (none, dots, full)",
    "activation_checkpointing": "use remat (none, dots, full)",
    "activation_checkpointing_kwargs": "use remat (none, dots, full)",
    "use_liger_kernel": "use loss_backend (chunked, pallas), which never hold all logits",
    "liger_kernel_config": "use loss_backend (chunked, pallas), which never hold all logits",
    "cast_lm_head_to_fp32": "products with the head accumulate in float32; or use dtype float32",
    "use_cache": "sampling always keeps keys and values; kv_cache_dtype sets their dtype",
    "torch_compile": _XLA,
    "torch_compile_backend": _XLA,
    "torch_compile_mode": _XLA,
    "torch_empty_cache_steps": _PYTORCH,
    "pad_to_multiple_of": "prompts are padded to powers of two by themselves",
    # records
    "logging_strategy": _ALL_RECORDED,
    "logging_steps": _ALL_RECORDED,
    "logging_first_step": _ALL_RECORDED,
    "logging_dir": f"use output_dir; {_ALL_RECORDED}",
    "logging_nan_inf_filter": "updates that are not finite are skipped: max_skipped_updates",
    "log_on_each_node": "the first process logs",
    "log_level": _LIBRARY_LOGS,
    "log_level_replica": _LIBRARY_LOGS,
    "disable_tqdm": "progress is a live line on a terminal only",
    "include_num_input_tokens_seen": "it is always recorded, as num_tokens",
    "report_to": "use wandb (online, offline, disabled), or pass GRPOTrainer trackers",
    "project": "use wandb_project",
    "trackio_space_id": "pass GRPOTrainer a tracker of your own",
    "trackio_bucket_id": "pass GRPOTrainer a tracker of your own",
    "trackio_static_space_id": "pass GRPOTrainer a tracker of your own",
    "log_completions": "use log_completions_steps",
    "num_completions_to_print": "tables of completions are files: use log_completions_steps",
    "log_unique_prompts": "tables of completions have a row per completion",
    "log_completions_hub_repo": "tables of completions are files: use log_completions_steps",
    "log_multimodal": "prompts are text",
    "debug": "set jax.config's jax_debug_nans",
    "skip_memory_metrics": "peak memory is recorded where the device reports it",
    # evaluation
    "eval_strategy": _EVALUATE,
    "evaluation_strategy": _EVALUATE,
    "eval_steps": _EVALUATE,
    "eval_delay": _EVALUATE,
    "eval_on_start": _EVALUATE,
    "do_eval": _EVALUATE,
    "do_train": "call trainer.fit(), or grpo-eqx train",
    "do_predict": "call trainer.generate()",
    "num_generations_eval": "call trainer.evaluate(num_samples=...)",
    "prediction_loss_only": "evaluations sample completions; there is no loss",
    "eval_do_concat_batches": "evaluations choose their batches by themselves",
    "eval_use_gather_object": "evaluations are gathered by themselves",
    "eval_accumulation_steps": "evaluations choose their batches by themselves",
    "include_for_metrics": "pass GRPOTrainer an eval_func",
    "batch_eval_metrics": "pass GRPOTrainer an eval_func",
    # checkpoints
    "save_strategy": "use save_steps or save_minutes",
    "save_only_model": "checkpoints hold all that a run needs to resume; export writes the model",
    "save_on_each_node": "hosts share output_dir, and each writes its own shards",
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint within preemption_deadline",
    "load_best_model_at_end": "use metric_for_best_model, and export the step that it keeps",
    "overwrite_output_dir": "use resume never",
    "resume_from_checkpoint": "use resume, or trainer.fit(resume_from_checkpoint=...)",
    "ignore_data_skip": "data are addressed by step, so that resuming skips nothing",
    "restore_callback_states_from_checkpoint": "there are no callbacks; trackers continue theirs",
    "push_to_hub": _PUSH,
    "hub_token": "set HF_TOKEN in the environment",
    "hub_private_repo": _PUSH,
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "hub_always_push": _PUSH,
    "hub_revision": _PUSH,
    # draws
    "data_seed": "use seed: data order and sampling follow from it",
    "full_determinism": "draws are functions of seed, step and prompt; see XLA_FLAGS for GPUs",
    "shuffle_dataset": "prompts are reshuffled every epoch, in an order set by seed",
    "train_sampling_strategy": "prompts are reshuffled every epoch, in an order set by seed",
    "length_column_name": "prompts are reshuffled every epoch, in an order set by seed",
    # devices
    "use_cpu": "set JAX_PLATFORMS=cpu in the environment",
    "no_cuda": "set JAX_PLATFORMS=cpu in the environment",
    "local_rank": "use process_id on the command line, or let the launcher set it",
    "accelerator_config": _MESH,
    "parallelism_config": _MESH,
    "fsdp": _MESH,
    "fsdp_config": _MESH,
    "deepspeed": _MESH,
    # data
    "remove_unused_columns": "reward functions receive every column",
    "label_names": "reward functions receive every column",
    "chat_template_kwargs": "set them in a template, and use chat_template",
    "chat_template_path": "use chat_template",
    # model
    "model_name_or_path": "use model",
    "model_init_kwargs": "use model and dtype; parameters are float32",
    "model_id": "use model",
    "trust_remote_code": "code from a hub is never run",
    "disable_dropout": "it is always so: models have no dropout",
    "router_aux_loss_coef": "models with experts are not supported",
    # generation
    "generation_kwargs": "use temperature, top_k, top_p, min_p and stop_strings",
    "repetition_penalty": "it is not offered; use temperature, top_k, top_p and min_p",
    "cache_implementation": "use max_num_seqs and kv_cache_dtype",
    "use_vllm": _ONE_ENGINE,
    "use_transformers_paged": _ONE_ENGINE,
    "use_transformers_continuous_batching": f"use max_num_seqs; {_ONE_ENGINE}",
    "transformers_continuous_batching_config": f"use max_num_seqs; {_ONE_ENGINE}",
    "ds3_gather_for_generation": "use rollout_sharding",
    "max_tool_calling_iterations": _NO_TOOLS,
    # objective
    "use_adaptive_entropy": "entropy_coef is constant",
    "entropy_coef_min": "entropy_coef is constant",
    "entropy_coef_max": "entropy_coef is constant",
    "entropy_coef_delta": "entropy_coef is constant",
    "entropy_target": "entropy_coef is constant",
    "vllm_importance_sampling_correction": "use importance_sampling_mode",
    "vllm_importance_sampling_mode": "use importance_sampling_mode",
    "vllm_importance_sampling_cap": "use importance_sampling_clip_max",
    "vllm_importance_sampling_clip_max": "use importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "use importance_sampling_clip_min",
    # Tunix
    "max_prompt_tokens": "use max_prompt_length",
    "max_tokens_to_generate": "use max_completion_length",
    "total_generation_steps": "use max_completion_length",
    "kv_cache_size": "it follows from max_prompt_length, max_completion_length and max_num_seqs",
    "mini_batch_size": "use steps_per_generation, the updates per pass over a rollout",
    "train_micro_batch_size": "use micro_batch_size_per_device",
    "rollout_micro_batch_size": "use max_num_seqs",
    "compute_logps_micro_batch_size": "use micro_batch_size_per_device",
    "eval_every_n_steps": _EVALUATE,
    "checkpoint_root_directory": _FILES,
    "checkpointing_options": "use save_steps, save_minutes and save_total_limit",
    "actor_optimizer": "pass GRPOTrainer an optimizer",
    # verl and others
    "lr": "use learning_rate",
    "batch_size": "use prompts_per_step",
    "train_batch_size": "use prompts_per_step",
    "micro_batch_size": "use micro_batch_size_per_device",
    "ppo_mini_batch_size": "use steps_per_generation, the updates per pass over a rollout",
    "ppo_micro_batch_size_per_gpu": "use micro_batch_size_per_device",
    "ppo_epochs": "use num_iterations",
    "group_size": "use num_generations",
    "num_samples": "use num_generations",
    "n": "use num_generations",
    "kl_coef": "use beta",
    "kl_loss_coef": "use beta",
    "clip_ratio": "use epsilon",
    "clip_ratio_low": "use epsilon",
    "clip_ratio_high": "use epsilon_high",
    "clip_ratio_c": "use dual_clip",
    "epochs": "use num_train_epochs",
    "num_epochs": "use num_train_epochs",
    "total_epochs": "use num_train_epochs",
    "num_steps": "use steps",
    "total_training_steps": "use steps",
    "max_length": "use max_prompt_length and max_completion_length",
    "max_new_tokens": "use max_completion_length",
    "max_response_length": "use max_completion_length",
    "grad_clip": "use max_grad_norm",
    "warmup": "use warmup_steps or warmup_ratio",
    "num_warmup_steps": "use warmup_steps",
    "scheduler": "use lr_scheduler_type",
    "dataset": "use data",
    "dataset_name": "use data",
    "train_files": "use data",
    "val_files": "use eval_data",
    "reward_func": "use reward_funcs",
    "reward_fn": "use reward_funcs",
    "output": "use output_dir",
}  # fmt: skip
"""Advice on settings of other libraries, by name."""

_OF_PREFIX: Mapping[str, str] = {
    "vllm_": _ONE_ENGINE,
    "sglang_": _ONE_ENGINE,
    "dataloader_": _DATA_ON_HOST,
    "ddp_": _MESH,
    "fsdp_": _MESH,
    "vespo_": _NO_VESPO,
    "hub_": _PUSH,
    "torch_": _PYTORCH,
    "lora_": _NO_LORA,
    "peft_": _NO_LORA,
    "bnb_": _NO_QUANTIZATION,
    "use_bnb_": _NO_QUANTIZATION,
}


def advice(name: str) -> str | None:
    """Returns what to do instead of a setting that another library has, if that is known."""
    if name in ADVICE:
        return ADVICE[name]
    return next((text for start, text in _OF_PREFIX.items() if name.startswith(start)), None)


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raises `UserError` for names that are not known settings."""
    answers = []
    for name in dict.fromkeys(names):
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        answer = advice(name) or (f"did you mean {near[0]}?" if near else None)
        if answer is None:
            answer = "grpo-eqx train --help-all lists all settings"
        answers.append(f"{name} is no setting: {answer}" + ("" if answer[-1] == "?" else "."))
    if answers:
        raise UserError(" ".join(answers))


def refuse_sections(settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises `UserError` for settings in groups, which also says what is wrong with their names."""
    sections, names = list[str](), list[str]()
    left = list(settings.items())
    while left:
        name, value = left.pop(0)
        if isinstance(value, Mapping):
            sections.append(name)
            left += [(str(inner), x) for inner, x in value.items()]
        else:
            names.append(name)
    if not sections:
        return
    answer = f"there are no sections: write what is in {', '.join(sections)} at the top level."
    try:
        refuse_unknown(names, known)
    except UserError as error:
        answer += f" {error}"
    raise UserError(answer)
