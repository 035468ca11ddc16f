"""Settings that people know from other libraries: what to use instead, or why nothing."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from grpo_eqx.common.errors import UserError

_ALL_RECORDED = "every step is recorded in metrics.jsonl"
_FROM_PROMPTS = "batches are set by prompts_per_step, and memory by micro_batch_size_per_device"
_ONE_ENGINE = "there is no second engine: the trainer's own weights sample, in the same process"
_MESH = "set mesh and rollout_sharding: JAX shards the model over it"
_XLA = "programs are always compiled by XLA"
_FILES = "checkpoints and the model are files in output_dir"
_EVALUATE = "set eval_steps, the steps between evaluations; without it there are none"
_PUSH = "call trainer.push_to_hub(repo_id) after fit()"
_PYTORCH = "it is about PyTorch, which is not used here"
_DATA_ON_HOST = "problems are tokenized once and kept in memory"
_NO_TOOLS = "completions are single turns of text, without tools"
_NO_VESPO = "the vespo loss is not offered; loss_type lists those that are"
_LORA = "use lora_rank, lora_alpha, lora_target and use_rslora"
_PLAIN_LORA = "adapters are plain LoRA: use lora_rank, lora_alpha, lora_target and use_rslora"
_NO_QUANTIZATION = "weights are float32 where they are trained; beneath adapters, use load_in_8bit"
_DISPLAY = "progress is a display of five lines on a terminal, and lines elsewhere"
_LIBRARY_LOGS = "set the level of Python's logging in your script"
_ONE_DTYPE = "use dtype for what is computed; what is trained is float32"
_WHOLE_TOKENS = "use micro_batch_size_per_device; completions share rows by themselves"
_NO_LOGITS = "use loss_backend (chunked, pallas), which compute logits tile by tile"
_TILES = "pass GRPOTrainer a loss_backend, which has the sizes of its tiles"
_NO_CRITIC = "there is no critic: advantages are relative to a group or a batch"
_ALWAYS_SHUFFLED = "prompts are reshuffled every epoch, in an order set by seed"
_ONE_SEED = "use seed: data order and sampling follow from it"
_JAX_PROFILER = "use profile_steps, as in 5:7"
_OF_PLAN = "it belongs to grpo-eqx plan: leave it out, or use that"
_OF_LAUNCH = "it belongs to grpo-eqx launch local, before the --"
_LAUNCHED = "a process uses all devices of its host; grpo-eqx launch starts one on every host"

ADVICE: Mapping[str, str] = {
    # TRL's and transformers' batches and length of training
    "per_device_train_batch_size": (
        f"use prompts_per_step, which counts prompts, not completions, over all devices; "
        f"{_FROM_PROMPTS}"
    ),
    "per_device_batch_size": f"use prompts_per_step; {_FROM_PROMPTS}",
    "per_device_eval_batch_size": "evaluations choose their batches by themselves",
    "gradient_accumulation_steps": f"leave it out: {_FROM_PROMPTS}",
    "generation_batch_size": "set prompts_per_step to it / num_generations",
    "ref_model": "it is the model as it starts, kept where beta is above 0; or set sync_ref_model",
    "auto_find_batch_size": "use micro_batch_size_per_device auto",
    "max_steps": "use steps, which counts rollouts",
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
    "use_peft": "use lora_rank, which turns adapters on",
    "use_dora": _PLAIN_LORA,
    "lora_r": "use lora_rank",
    "lora_target_modules": "use lora_target (all-linear, or names such as q_proj,v_proj)",
    "lora_dropout": "adapters have no dropout: leave it out",
    "load_in_4bit": _NO_QUANTIZATION,
    "dataset_config": "write it after the name: data OWNER/NAME/CONFIG",
    "dataset_config_name": "write it after the name: data OWNER/NAME/CONFIG",
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
    "grad_accum": f"leave it out: {_FROM_PROMPTS}",
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
    "bf16": "leave it out: dtype auto is bfloat16 on TPU and GPU",
    "fp16": "use dtype bfloat16: float16 would need loss scaling",
    "bf16_full_eval": "evaluations use dtype, as training does",
    "half_precision_backend": "leave it out: dtype sets the precision, and XLA compiles it",
    "fp16_backend": "leave it out: dtype sets the precision, and XLA compiles it",
    "fp16_opt_level": "use dtype bfloat16: float16 would need loss scaling",
    "fp16_full_eval": "evaluations use dtype, as training does",
    "tf32": "use dtype, or jax.config's jax_default_matmul_precision",
    "gradient_checkpointing": "use remat (none, dots, full)",
    "gradient_checkpointing_kwargs": "use remat (none, dots, full)",
    "activation_checkpointing": "use remat (none, dots, full)",
    "activation_checkpointing_kwargs": "use remat (none, dots, full)",
    "use_liger_kernel": _NO_LOGITS,
    "use_liger_loss": _NO_LOGITS,
    "liger_kernel_config": _NO_LOGITS,
    "cast_lm_head_to_fp32": "products with the head accumulate in float32; or use dtype float32",
    "use_cache": "sampling always keeps keys and values; kv_cache_dtype sets their dtype",
    "torch_compile": _XLA,
    "torch_compile_backend": _XLA,
    "torch_compile_mode": _XLA,
    "torch_empty_cache_steps": _PYTORCH,
    "pad_to_multiple_of": "prompts are padded to their own one or two widths",
    # records
    "logging_strategy": _ALL_RECORDED,
    "logging_steps": _ALL_RECORDED,
    "logging_first_step": _ALL_RECORDED,
    "logging_dir": f"use output_dir; {_ALL_RECORDED}",
    "logging_nan_inf_filter": "updates that are not finite are skipped: max_skipped_updates",
    "log_on_each_node": "the first process logs",
    "log_level": _LIBRARY_LOGS,
    "log_level_replica": _LIBRARY_LOGS,
    "disable_tqdm": _DISPLAY,
    "include_num_input_tokens_seen": "it is always recorded, as num_tokens",
    "project": "use wandb_project",
    "trackio_space_id": "pass GRPOTrainer a tracker of your own",
    "trackio_bucket_id": "pass GRPOTrainer a tracker of your own",
    "trackio_static_space_id": "pass GRPOTrainer a tracker of your own",
    "log_unique_prompts": "tables of completions have a row per completion",
    "log_completions_hub_repo": "tables of completions are files: use log_completions_steps",
    "log_multimodal": "prompts are text",
    "debug": "set jax.config's jax_debug_nans",
    "tokenizer": "it is the model's; in Python, GRPOTrainer(tokenizer=...)",
    "skip_memory_metrics": "peak memory is recorded where the device reports it",
    # evaluation
    "eval_strategy": _EVALUATE,
    "evaluation_strategy": _EVALUATE,
    "eval_delay": _EVALUATE,
    "do_eval": _EVALUATE,
    "do_train": "call trainer.fit(), or grpo-eqx train",
    "do_predict": "call trainer.generate()",
    "prediction_loss_only": "evaluations sample completions; there is no loss",
    "eval_do_concat_batches": "evaluations choose their batches by themselves",
    "eval_use_gather_object": "evaluations are gathered by themselves",
    "eval_accumulation_steps": "evaluations choose their batches by themselves",
    "include_for_metrics": "pass GRPOTrainer eval_metrics",
    "batch_eval_metrics": "pass GRPOTrainer eval_metrics",
    # checkpoints
    "save_strategy": "use save_steps and save_minutes; without both, the last step alone is saved",
    "save_only_model": "checkpoints hold all that a run needs to resume; export writes the model",
    "save_on_each_node": "hosts share output_dir, and each writes its own shards",
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint within preemption_deadline",
    "load_best_model_at_end": "use metric_for_best_model, and export the step that it keeps",
    "overwrite_output_dir": "use resume never",
    "resume_from_checkpoint": "use resume, or trainer.fit(resume_from_checkpoint=...)",
    "ignore_data_skip": "data are addressed by step, so that resuming skips nothing",
    "restore_callback_states_from_checkpoint": "callbacks keep their own state",
    "push_to_hub": _PUSH,
    "hub_token": "set HF_TOKEN in the environment",
    "hub_private_repo": _PUSH,
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "hub_always_push": _PUSH,
    "hub_revision": _PUSH,
    # draws
    "data_seed": _ONE_SEED,
    "full_determinism": "draws are functions of seed, step and prompt; see XLA_FLAGS for GPUs",
    "shuffle_dataset": _ALWAYS_SHUFFLED,
    "train_sampling_strategy": _ALWAYS_SHUFFLED,
    "group_by_length": _ALWAYS_SHUFFLED,
    "length_column_name": _ALWAYS_SHUFFLED,
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
    "router_aux_loss_coef": "no loss balances the load of experts; moe/* metrics record it",
    # generation
    "generation_kwargs": "use temperature, top_k, top_p, min_p and stop_strings",
    "repetition_penalty": "there is none, as with 1.0; use temperature, top_k, top_p and min_p",
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
    "rollout_engine": _ONE_ENGINE,
    "rollout_mapping_config": _ONE_ENGINE,
    "rollout_config": "use temperature, top_k, top_p, min_p and max_completion_length",
    "data_type": _ONE_DTYPE,
    "eos_tokens": "use stop_strings; the tokenizer's end of sequence always ends a completion",
    "return_logprobs": "sampling/* metrics compare the sampler's log-probs with the trainer's",
    "role_to_mesh": _MESH,
    "role_to_logical_axis_rule": _MESH,
    "data_sharding_axis": _MESH,
    "offload_to_cpu": "all stays on the devices: fsdp in mesh splits it over more of them",
    "metrics_logging_options": f"use output_dir and report_to; {_ALL_RECORDED}",
    "metrics_logger_options": f"use output_dir and report_to; {_ALL_RECORDED}",
    "metrics_prefix": "use run_name",
    "profiler_options": _JAX_PROFILER,
    "pbar_description": _DISPLAY,
    "max_inflight_computations": "steps are dispatched by themselves",
    "algo_variant": "use a recipe, as in grpo_eqx.recipes.gspo(), or --recipe gspo",
    "loss_algo": "use importance_sampling_level (token, sequence, sequence_token)",
    "policy_loss_fn": "use loss_type",
    "reward_manager": "use reward_funcs",
    "off_policy_steps": "sampling and training alternate: use num_iterations",
    "max_concurrency": "use max_num_seqs",
    "max_turns": _NO_TOOLS,
    "num_mini_batches": "use steps_per_generation, the updates per pass over a rollout",
    "degenerate_group_masking": "groups of equal rewards have no advantage; dynamic_sampling "
    "replaces them",
    "critic_optimizer": _NO_CRITIC,
    "kl_clamp_value": "use kl_clamp",
    "kl_loss_mode": "use kl_estimator: kl is k1, mse_kl is k2, low_var_kl is k3",
    "perf_metrics_options": "times and throughput of every step are recorded in metrics.jsonl",
    "max_seq_token_per_tpu": _WHOLE_TOKENS,
    "data_shuffle_seed": _ONE_SEED,
    "metric_fns": "pass GRPOTrainer eval_metrics",
    "reward_fns": "use reward_funcs",
    "sampler_is": "use importance_sampling_mode (token_truncate and others)",
    "sampler_is_threshold": "use importance_sampling_clip_max",
    "use_rollout_logps": "ratios are relative to log-probs that the trainer computes",
    "force_compute_kl": "the divergence is computed where beta is above 0",
    # verl: the model and its update
    "path": "use model",
    "tokenizer_path": "it is the model's; in Python, GRPOTrainer(tokenizer=...)",
    "lora_adapter_path": "use model, with the adapter's folder, and its lora_rank",
    "use_prefix_grouper": "a group always shares its prompt, in the update too",
    "data_loader_seed": _ONE_SEED,
    "qat": _NO_QUANTIZATION,
    "override_config": "write them into the model's config.json",
    "custom_chat_template": "use chat_template",
    "external_lib": "import it in your script",
    "use_remove_padding": _WHOLE_TOKENS,
    "enable_gradient_checkpointing": "use remat (none, dots, full)",
    "enable_activation_offload": "use remat (none, dots, full)",
    "target_modules": "use lora_target (all-linear, or names such as q_proj,v_proj)",
    "exclude_modules": "use lora_target, with the names to adapt",
    "use_liger": _NO_LOGITS,
    "use_fused_kernels": _NO_LOGITS,
    "use_shm": "weights are read from the model's folder",
    "strategy": _MESH,
    "use_dynamic_bsz": _WHOLE_TOKENS,
    "ppo_max_token_len_per_gpu": _WHOLE_TOKENS,
    "ppo_micro_batch_size": "use micro_batch_size_per_device",
    "forward_max_token_len_per_gpu": _WHOLE_TOKENS,
    "log_prob_micro_batch_size": "use micro_batch_size_per_device",
    "log_prob_micro_batch_size_per_gpu": "use micro_batch_size_per_device",
    "log_prob_use_dynamic_bsz": _WHOLE_TOKENS,
    "log_prob_max_token_len_per_gpu": _WHOLE_TOKENS,
    "loss_agg_mode": "use loss_type: token-mean is bnpo, seq-mean-token-mean is grpo, and "
    "seq-mean-token-sum-norm is dr_grpo",
    "loss_scale_factor": "use loss_type dr_grpo, which divides by max_completion_length",
    "loss_mode": "use loss_type and importance_sampling_level, or a recipe such as gspo",
    "tau_pos": "use sapo_temperature_pos",
    "tau_neg": "use sapo_temperature_neg",
    "use_kl_loss": "set beta above 0",
    "kl_loss_type": "use kl_estimator: kl is k1, mse is k2, low_var_kl is k3",
    "use_kl_in_reward": "the KL term is part of the loss: set beta",
    "kl_penalty": "use kl_estimator: kl is k1, mse is k2, low_var_kl is k3",
    "kl_ctrl": "use beta, which is constant",
    "target_kl": "beta is constant",
    "horizon": "beta is constant",
    "calculate_entropy": "it is always recorded, as entropy",
    "entropy_from_logits_with_chunking": "use loss_backend chunked",
    "entropy_checkpointing": "use loss_backend chunked",
    "use_torch_compile": _XLA,
    "shuffle": _ALWAYS_SHUFFLED,
    "ulysses_sequence_parallel_size": "sequences are not split: use tp and fsdp in mesh",
    "betas": "use adam_beta1 and adam_beta2",
    "clip_grad": "use max_grad_norm",
    "optimizer_impl": "use optimizer (adamw, lion), or pass GRPOTrainer an optax transformation",
    "lr_warmup_steps": "use warmup_steps",
    "lr_warmup_steps_ratio": "use warmup_ratio",
    "warmup_style": "use lr_scheduler_type (constant, linear, cosine)",
    "min_lr_ratio": "decay ends at 0; for another end, pass GRPOTrainer an optimizer",
    "num_cycles": "pass GRPOTrainer an optimizer, an optax transformation",
    "offload_policy": "all stays on the devices: fsdp in mesh splits it over more of them",
    "param_offload": "all stays on the devices: fsdp in mesh splits it over more of them",
    "optimizer_offload": "all stays on the devices: fsdp in mesh splits it over more of them",
    "model_dtype": _ONE_DTYPE,
    "forward_prefetch": _MESH,
    "wrap_policy": _MESH,
    "reshard_after_forward": _MESH,
    "checkpoint": "use save_steps, save_minutes and save_total_limit",
    "save_contents": "checkpoints hold all that a run needs to resume",
    "async_save": "checkpoints are always written in the background",
    "load_contents": "checkpoints hold all that a run needs to resume",
    # verl: sampling
    "rollout.name": _ONE_ENGINE,
    "rollout.mode": _ONE_ENGINE,
    "rollout.dtype": "use dtype, rollout_dtype and kv_cache_dtype",
    "load_format": _ONE_ENGINE,
    "gpu_memory_utilization": f"use max_num_seqs; {_ONE_ENGINE}",
    "enforce_eager": _ONE_ENGINE,
    "free_cache_engine": _ONE_ENGINE,
    "engine_kwargs": _ONE_ENGINE,
    "enable_chunked_prefill": _ONE_ENGINE,
    "enable_prefix_caching": "a prompt is prefilled once for its group",
    "disable_log_stats": _ONE_ENGINE,
    "layered_summon": _ONE_ENGINE,
    "max_num_batched_tokens": f"use max_num_seqs; {_ONE_ENGINE}",
    "max_model_len": "use max_prompt_length and max_completion_length",
    "prompt_length": "use max_prompt_length",
    "response_length": "use max_completion_length",
    "ignore_eos": "completions end at the end of sequence",
    "do_sample": "training samples with temperature; call trainer.evaluate(temperature=...)",
    "val_kwargs": "use num_generations_eval and eval_temperature",
    "calculate_log_probs": "sampling/* metrics compare the sampler's log-probs with the trainer's",
    "tensor_model_parallel_size": _MESH,
    "tensor_parallel_size": _MESH,
    "data_parallel_size": _MESH,
    "pipeline_model_parallel_size": "layers are not split over devices: set fsdp and tp in mesh",
    "pipeline_parallel_size": "layers are not split over devices: set fsdp and tp in mesh",
    "expert_parallel_size": "experts are not spread over devices: set fsdp and tp in mesh",
    "enable_rollout_routing_replay": "use router_replay",
    "use_rollout_routing_replay": "use router_replay",
    "quantization": "use rollout_dtype (int8)",
    "logprobs_mode": "log-probs are those of the distribution that tokens were drawn from",
    "scheduling_policy": _ONE_ENGINE,
    "multi_turn": _NO_TOOLS,
    "agent": _NO_TOOLS,
    "rollout_is": "use importance_sampling_mode (token_truncate, sequence_truncate and others)",
    "rollout_is_level": "use importance_sampling_mode (token_truncate, sequence_truncate)",
    "rollout_rs": "use importance_sampling_mode (token_mask, sequence_mask)",
    "rollout_is_threshold": "use importance_sampling_clip_max",
    "rollout_rs_threshold": "use importance_sampling_clip_min and importance_sampling_clip_max",
    "rollout_is_batch_normalize": "weights are not normalized",
    "bypass_mode": "ratios are relative to log-probs that the trainer computes",
    "tis_imp_ratio_cap": "use importance_sampling_mode token_truncate and "
    "importance_sampling_clip_max",
    "rollout_correction": "use importance_sampling_mode and importance_sampling_clip_max",
    # verl: rewards, advantages and data
    "critic": _NO_CRITIC,
    "critic_warmup": _NO_CRITIC,
    "gamma": "rewards are those of whole completions: nothing is discounted",
    "lam": _NO_CRITIC,
    "adv_estimator": "use advantage_estimator",
    "norm_adv_by_std_in_grpo": "use scale_rewards: True is group, False is none",
    "filter_groups": "use dynamic_sampling and max_generation_batches",
    "max_num_gen_batches": "use max_generation_batches",
    "gen_batch_size": "use prompts_per_step",
    "custom_reward_function": "pass functions to GRPOTrainer(reward_funcs=...)",
    "reward_kwargs": "pass functools.partial(f, ...) to GRPOTrainer(reward_funcs=...)",
    "reward_fn_key": "reward functions receive every column",
    "sandbox_fusion": "call it in a reward function, with reward_workers and reward_timeout",
    "launch_reward_fn_async": "write the reward function as async def, or use reward_workers",
    "prompt_key": "name the column question or prompt",
    "reward.num_workers": "use reward_workers",
    "image_key": "prompts are text",
    "audio_key": "prompts are text",
    "mm_processor_kwargs": "prompts are text",
    "video_key": "prompts are text",
    "train_max_samples": "pass fewer rows to GRPOTrainer(train_data=...)",
    "val_max_samples": "use eval_problems",
    "val_batch_size": "evaluations choose their batches by themselves",
    "return_raw_chat": "reward functions receive every column",
    "return_raw_input_ids": "reward functions receive every column",
    "return_full_prompt": "reward functions receive every column",
    "filter_overlong_prompts": "use overlong_prompts (error, drop, truncate_left)",
    "filter_overlong_prompts_workers": "use overlong_prompts (error, drop, truncate_left)",
    "truncation": "use overlong_prompts (error, drop, truncate_left)",
    "apply_chat_template_kwargs": "set them in a template, and use chat_template",
    "validation_shuffle": "evaluations do not depend on the order of problems",
    "custom_cls": "pass problems to GRPOTrainer(train_data=...)",
    "sampler": _ALWAYS_SHUFFLED,
    # verl: the trainer
    "logger": "use report_to (wandb, tensorboard), or pass GRPOTrainer trackers",
    "save_freq": "use save_steps (None in place of -1)",
    "test_freq": _EVALUATE,
    "val_before_train": "use eval_on_start",
    "val_only": "use grpo-eqx eval, or call trainer.evaluate() without fit()",
    "log_val_generations": "use log_completions_steps, for those of training",
    "rollout_data_dir": "use log_completions_steps: tables are in output_dir",
    "validation_data_dir": "call trainer.generate(prompts), and write what it returns",
    "resume_mode": "use resume (auto, never, a path)",
    "resume_from_path": "use resume",
    "default_local_dir": "use output_dir",
    "default_hdfs_dir": "use output_dir, on a file system that all hosts share",
    "del_local_ckpt_after_load": "use save_total_limit",
    "max_actor_ckpt_to_keep": "use save_total_limit",
    "max_critic_ckpt_to_keep": _NO_CRITIC,
    "nnodes": _LAUNCHED,
    "n_gpus_per_node": _LAUNCHED,
    "balance_batch": _WHOLE_TOKENS,
    "ray_init": _LAUNCHED,
    "ray_kwargs": _LAUNCHED,
    "hybrid_engine": _ONE_ENGINE,
    "nccl_timeout": "use hang_timeout",
    "esi_redundant_time": "use stop_after",
    "profiler": _JAX_PROFILER,
    "global_profiler": _JAX_PROFILER,
    "use_legacy_worker_impl": _ONE_ENGINE,
    # MLLM-JAX
    "model_path": "use model",
    "backend": _ONE_ENGINE,
    "num_pre_q": "use num_generations",
    "global_length": "use max_prompt_length",
    "max_length_sample": "use max_completion_length",
    "max_length_total": "use max_prompt_length and max_completion_length",
    "fast_generate": "there is one way to decode, for all models",
    "fast_qwen2_decode_attention": "there is one way to decode, for all models",
    "sharding_style": "use rollout_sharding, which has legacy, maxtext and faster ones",
    "max_extra_roll_rounds": "use max_generation_batches, which counts the first rollout too",
    "grad_accum_steps": f"leave it out: {_FROM_PROMPTS}",
    "policy_loss_impl": _NO_LOGITS,
    "pallas_time_block": _TILES,
    "pallas_block_size": _TILES,
    "pallas_compute_dtype": _ONE_DTYPE,
    "log_tpu_memory": "peak memory is recorded where the device reports it",
    "optimizer.name": "use optimizer (adamw, lion)",
    "clip_norm": "use max_grad_norm",
    "peak_value": "use learning_rate",
    "init_value": "warm-up starts at 0",
    "end_value": "decay ends at 0; for another end, pass GRPOTrainer an optimizer",
    "lr_schedule.type": "use lr_scheduler_type (constant, linear, cosine)",
    "lr_schedule.name": "use lr_scheduler_type (constant, linear, cosine)",
    "algo.name": "use advantage_estimator, or a recipe, as in --recipe rloo",
    "estimator.name": "use advantage_estimator (grpo, rloo, reinforce and others)",
    "estimator.kwargs": "use scale_rewards; advantages have no more settings",
    "update.name": "use loss_type; ppo's critic is not offered",
    "mesh_shape": "use mesh, with the same values",
    "wandb_mode": "use wandb (online, offline, disabled)",
    "wandb_name": "use run_name",
    "eval_every_steps": _EVALUATE,
    "eval_full_every_epochs": _EVALUATE,
    "eval_batches_per_process": "use eval_problems",
    "eval_split": "use eval_data NAME:SPLIT",
    "eval_full_num_pre_q": "use num_generations_eval",
    "eval_full_greedy": "every evaluation has a greedy completion of each problem",
    "train_steps_per_epoch": "use num_train_epochs",
    "require_jax_process_count": "use require_processes",
    # flags of other commands
    "topology": _OF_PLAN,
    "search": _OF_PLAN,
    "json": _OF_PLAN,
    "processes": _OF_LAUNCH,
    "devices_per_process": _OF_LAUNCH,
    # others
    "version": "grpo-eqx --version prints it",
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
    "rollout_vllm_": _ONE_ENGINE,
    "rollout_sglang_": _ONE_ENGINE,
    "dataloader_": _DATA_ON_HOST,
    "ddp_": _MESH,
    "fsdp_": _MESH,
    "vespo_": _NO_VESPO,
    "hub_": _PUSH,
    "torch_": _PYTORCH,
    "lora_": _LORA,
    "peft_": _LORA,
    "bnb_": _NO_QUANTIZATION,
    "use_bnb_": _NO_QUANTIZATION,
}


def advice(name: str) -> str | None:
    """Returns what to do instead of a setting that another library has, if that is known."""
    key = _key(name)
    if key in ADVICE:
        return ADVICE[key]
    return next((text for start, text in _OF_PREFIX.items() if key.startswith(start)), None)


def _key(name: str) -> str:
    """Returns the longest end of a dotted name that has advice of its own, else its last part."""
    *_, section, last = ["", *name.split(".")]  # as in rollout.name
    return next((key for key in (name, f"{section}.{last}") if key in ADVICE), last)


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raises `UserError` for names that are not known settings."""
    answers = []
    for name in dict.fromkeys(names):
        if name in known:
            continue
        answer = advice(name) or _guess(name, known)
        if answer is None:
            answer = "grpo-eqx train --help-all lists all settings"
        answers.append(f"{name} is no setting: {answer}" + ("" if answer[-1] == "?" else "."))
    if answers:
        raise UserError(" ".join(answers))


def _guess(name: str, known: Collection[str]) -> str | None:
    """Returns what to do instead of a name that is close to one of ours, or of another library."""
    of_ours = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    started = [each for each in known if each.startswith(f"{name}_")]
    if not of_ours and len(started) == 1:
        return f"did you mean {started[0]}?"
    # Advice for another name than was meant would mislead.
    of_others = difflib.get_close_matches(name, ADVICE, n=1, cutoff=0.9)
    near = difflib.get_close_matches(name, [*of_ours, *of_others], n=1, cutoff=0.7)
    if not near:
        return None
    return f"did you mean {near[0]}?" + ("" if near[0] in known else f" {ADVICE[near[0]]}")


_ALSO_SECTIONS = frozenset({"data", "model", "optim", "optimizer"})
"""Names of settings that are sections in other libraries' files."""


def _is_section(name: str, value: Mapping[Any, Any], known: Collection[str]) -> bool:
    """Returns whether a dict is a group of settings, and no value of one."""
    if name in _ALSO_SECTIONS:
        return any(inner in known or advice(str(inner)) for inner in value)
    return name not in known and advice(name) is None


def refuse_sections(settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises `UserError` for settings in groups, which also says what is wrong with their names."""
    sections, names = list[str](), list[str]()
    left = list(settings.items())
    while left:
        path, value = left.pop(0)
        name = _key(path)
        if isinstance(value, Mapping) and _is_section(name, value, known):
            sections.append(name)
            left += [(f"{name}.{inner}", x) for inner, x in value.items()]
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
