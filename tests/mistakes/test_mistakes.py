"""Mistakes that people make, and the sentence that answers each."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import with_environments

WORKER = Path(__file__).with_name("worker.py")
PART = 160
"""Mistakes that one process makes."""

# Settings, in Python: what makes the config, and what it is answered.
CONFIGS = {
    "max_completion_length=8.5": "max_completion_length is 8.5: use a whole number",
    "steps=True": "steps is True: use a whole number (at least 1)",
    "steps=0": "steps is 0: it must be at least 1",
    "steps='many'": "steps is 'many': use a whole number",
    "max_grad_norm=None": "max_grad_norm is None: use a number (above 0 and finite)",
    "warmup_steps=0.1": "for a share of all updates set warmup_ratio",
    "warmup_ratio=1.5": "warmup_ratio is 1.5: it must be at least 0 and below 1",
    "warmup_ratio=0.1, warmup_steps=5": "set one of them",
    "warmup_steps=1000": "exceeds the run's 150 updates",
    "num_train_epochs=2, steps=5": "set one of them",
    "num_train_epochs=0": "num_train_epochs is 0: it must be above 0",
    "seed=2**32": "seed is 4294967296: it must be at least 0 and below 2^32",
    "seed=-1": "seed is -1: it must be at least 0",
    "seed=1.5": "seed is 1.5: use a whole number",
    "temperature=0": "temperature is 0: it must be above 0 and finite: training samples",
    "top_p=1.5": "top_p is 1.5: it must be above 0 and at most 1",
    "top_p=0": "top_p is 0: it must be above 0",
    "top_k=0": "top_k is 0: it must be at least 1",
    "min_p=2": "min_p is 2: it must be at least 0 and at most 1",
    "learning_rate='fast'": "learning_rate is 'fast': use a number (above 0 and finite) or None",
    "learning_rate=0": "learning_rate is 0: it must be above 0",
    "learning_rate=-1e-6": "learning_rate is -1e-06: it must be above 0",
    "num_generations=1": "it must be at least 2: advantages are relative to a group",
    "prompts_per_step=0": "prompts_per_step is 0: it must be at least 1",
    "steps_per_generation=3": "prompts_per_step (16) cannot be split evenly",
    "loss_type='grop'": "(did you mean grpo?)",
    "loss_type=None": "loss_type is None: use grpo, ",
    "advantage_estimator='gae'": "advantage_estimator is 'gae': use grpo, rloo",
    "beta=-1": "beta is -1: it must be finite and not negative",
    "beta=float('nan')": "beta is nan: it must be finite",
    "kl_estimator='k3'": "kl_estimator is k3 with beta = 0: it would do nothing",
    "epsilon=1.5": "epsilon is 1.5: it must be between 0 and 1",
    "delta=1.1": "delta is 1.1 and epsilon_high is 0.2",
    "scale_rewards=True": "TRL's True is group, and its False is none",
    "max_generation_batches=2": "while dynamic_sampling is off",
    "dynamic_sampling='yes'": "dynamic_sampling is 'yes': use True or False",
    "importance_sampling_clip_max=2.0": "without importance_sampling_mode",
    "max_staleness=1": "set it to token_truncate, or to none to learn from them as they are",
    "carried_caches='keep'": "with max_staleness = 0: it would do nothing",
    "importance_sampling_mode='coupled'": "with max_staleness = 0: it would do nothing",
    "importance_sampling_mode='token_mask', dtype='float32'": "the sampler is the trained model",
    "importance_sampling_mode='none', importance_sampling_clip_max=2.0": "mode none: it would do",
    "max_staleness=1, importance_sampling_mode='none', max_num_seqs=256": "more than the slots",
    "max_staleness=1, importance_sampling_mode='none', router_replay=True": "turn one of them off",
    "reward_funcs=[len]": "pass functions to GRPOTrainer(reward_funcs=...)",
    "reward_weights=[float('inf')]": "they must be finite",
    "reward_weights=['a']": "reward_weights is ['a']: use a list, each a number, or None",
    "stop_strings=('',)": "stop_strings has an empty string",
    "stop_after='soon'": "stop_after is 'soon': give hours, minutes and seconds",
    "stop_after=3600": "stop_after is 3600: use a string or None; as in '1h30m'",
    "profile_steps='0:3'": "profile_steps is '0:3': give one step, or the first and the last",
    "profile_steps='7:5'": "profile_steps is '7:5': give one step, or the first and the last",
    "profile_steps=307": "profile_steps is 307: use a string or None; as in '5:7'",
    "profile_steps='5:7', steps=6": "profile_steps is 5:7, and the run has 6 steps",
    "profile_memory=True": "profile_memory is True without profile_steps: it would do nothing",
    "data=[{'question': '1 + 1?', 'answer': 2}] * 20": "GRPOTrainer(train_data=...)",
    "output_dir=''": "output_dir is empty",
    "output_dir='runs/$USER'": "variables such as $USER are not expanded in settings",
    "wandb='off'": "use online, offline, disabled or None; off is disabled",
    "resume=False": "use a string; auto, never or a path",
    "save_steps=0": "save_steps is 0: it must be at least 1",
    "save_total_limit=0": "save_total_limit is 0: it must be at least 1",
    "hang_timeout=0": "hang_timeout is 0: it must be above 0",
    "greater_is_better=True": "greater_is_better is True without metric_for_best_model",
    "wandb_project='x'": "wandb_project is x while wandb is disabled",
    "wandb=True": "wandb is True: use online, offline, disabled or None",
    "report_to='csv'": "report_to has 'csv': use wandb or tensorboard; leave it out for metrics",
    "report_to=['mlflow']": "pass others to GRPOTrainer(trackers=[...]).",
    "report_to='tensorbord'": "(did you mean tensorboard?)",
    "report_to=['wandb'], wandb='disabled'": "report_to has wandb while wandb is disabled: leave",
    "mesh=[1, -1, 1]": "mesh is [1, -1, 1]: use a string; as in '1,-1,1'",
    "stop_strings=(r'\\n\\n',)": "which is a backslash and a letter: in a shell, write $'",
    "rollout_sharding=3": "pass an object to GRPOTrainer(rollout_sharding=...)",
    "dtype='fp16'": "dtype is 'fp16': use auto, float32 or bfloat16",
    "kv_cache_dtype='int4'": "(did you mean int8?)",
    "remat=True": "remat is True: use none, dots, full or auto",
    "micro_batch_size_per_device='atuo'": "(did you mean auto?)",
    "run_name='a/b'": "give a name without slashes",
    "output_dir=3": "output_dir is 3: use a string, a path or None",
    "output_dir='gs://bucket/run1'": "output_dir is 'gs://bucket/run1', an address, and runs are",
    "output_dir=Path('s3://bucket/run1')": "output_dir is 's3://bucket/run1', an address",
    "resume='gs://bucket/run1'": "mount the bucket, for example with gcsfuse, and give the folder.",
    "mesh={'fsdp': 1, 'tp': 1}": "use a string; as in '1,-1,1', or pass an object to GRPOTrainer(",
    "reward_weights={'correct': 1.0}": "use a list, each a number, or None",
    "overlong_buffer={'enable': True, 'len': 512}": "it is a share of max_completion_length",
    "lr_scheduler_kwargs={'min_lr': 0}": "lr_scheduler_type has no more settings; pass GRPOTrainer",
    "generation_kwargs={'temperature': 1}": "use temperature, top_k, top_p, min_p and stop_strings",
    "model_init_kwargs={'dtype': 'auto'}": "use model and dtype; parameters are float32",
    "gradient_checkpointing_kwargs={'x': 1}": "use remat (none, dots, full)",
    "optimizer={'kind': 'sgd'}": "use adamw or lion; pass an optax transformation to GRPOTrainer",
    "**{'actor_rollout_ref.rollout.n': 8}": "rollout.n is an unknown setting: use num_generations.",
    "loss_type='gspo'": "gspo is grpo with importance_sampling_level sequence, as in recipe gspo.",
    "loss_type='luspo'": "luspo is dr_grpo with importance_sampling_level sequence, up to a const",
    "loss_type='vespo'": "cispo or sapo; vespo is not offered.",
    "loss_type='ppo'": "ppo clips as grpo does, with a critic, which is not offered.",
    "loss_type='reinforce'": "reinforce is an advantage_estimator.",
    "loss_type='rloo'": "rloo is an advantage_estimator, and a recipe.",
    "advantage_estimator='reinforce++'": "reinforce++ is reinforce_plus_plus.",
    "kl_estimator='low_var_kl', beta=0.1": "use k1, k2, k3 or None; verl's low_var_kl is k3.",
    "top_k=-1": "top_k is -1: it must be at least 1; None samples from all tokens.",
    "top_p=None": "use a number (above 0 and at most 1); 1.0 samples from all tokens.",
    "min_p=None": "0.0 samples from all tokens.",
    "max_grad_norm=0": "a large one, such as 1e9, never clips.",
    "stop_strings=None": "stop_strings is None: use a list, each a string; an empty list for none.",
    "data=['a.jsonl']": "data is ['a.jsonl']: use a string",
}

# Settings of TRL, Tunix and verl: what to use instead.
OF_OTHERS = {
    "per_device_train_batch_size": "use prompts_per_step, which counts prompts, not completions",
    "gradient_accumulation_steps": "leave it out: batches are set by prompts_per_step",
    "max_steps": "use steps",
    "max_prompt_tokens": "use max_prompt_length",
    "logging_steps": "every step is recorded in metrics.jsonl",
    "bf16": "leave it out: dtype auto is bfloat16",
    "use_vllm": "there is no second engine",
    "vllm_mode": "there is no second engine",
    "vllm_gpu_memory_utilization": "there is no second engine",
    "lr": "use learning_rate",
    "batch_size": "use prompts_per_step",
    "eval_strategy": "set eval_steps, the steps between evaluations",
    "save_strategy": "use save_steps and save_minutes",
    "push_to_hub": "call trainer.push_to_hub(repo_id) after fit()",
    "gradient_checkpointing": "use remat",
    "fsdp": "set mesh and rollout_sharding",
    "deepspeed": "set mesh and rollout_sharding",
    "optim": "use optimizer (adamw, lion)",
    "model_name_or_path": "use model",
    "max_tokens_to_generate": "use max_completion_length",
    "group_size": "use num_generations",
    "kl_coef": "use beta",
    "lora_r": "use lora_rank",
    "learning_rat": "did you mean learning_rate?",
    "attn_implementation": "the best attention of each kind of device is always used",
    "load_in_4bit": "use load_in_8bit",
    "save_freq": "use save_steps (None in place of -1)",
    "test_freq": "set eval_steps, the steps between evaluations",
    "val_before_train": "use eval_on_start",
    "logger": "use report_to (wandb, tensorboard), or pass GRPOTrainer trackers",
    "loss_agg_mode": "use loss_type: token-mean is bnpo, seq-mean-token-mean is grpo",
    "use_kl_loss": "set beta above 0",
    "norm_adv_by_std_in_grpo": "use scale_rewards: True is group, False is none",
    "gpu_memory_utilization": "use max_num_seqs; there is no second engine",
    "tensor_model_parallel_size": "set mesh and rollout_sharding",
    "path": "use model",
    "rollout_engine": "there is no second engine",
    "rollout_vllm_hbm_utilization": "there is no second engine",
    "metrics_logging_options": "use output_dir and report_to",
    "offload_to_cpu": "fsdp in mesh splits it over more of them",
    "version": "grpo-eqx --version prints it",
    "wibble": "grpo-eqx train --help-all lists all settings",
}

# Lines as they are typed after grpo-eqx.
COMMANDS = {
    "train --max_steps 3": "max_steps is an unknown setting: use steps, which counts rollouts.",
    "train --per-device-train-batch-size=4": "use prompts_per_step",
    "train --learning-rat 1": "learning_rat is an unknown setting: did you mean learning_rate?",
    "train --steps x": "steps is 'x': use a whole number (at least 1); leave it out beside num",
    "train --steps 1.5": "steps is '1.5': use a whole number",
    "train --steps": "--steps has no value",
    "train --steps --seed 1": "--steps has no value",
    "train --steps 5 6": "--steps takes one value: leave out '6'",
    "train --learning-rate fast": "learning_rate is 'fast': use a number (above 0",
    "train --warmup-steps 0.1": "for a share of all updates set warmup_ratio",
    "train --dynamic-sampling true": "--dynamic-sampling takes no value: leave out 'true'.",
    "train --greater-is-better maybe": "greater_is_better is 'maybe': use True, False or None.",
    "train --reward-weights heavy": "reward_weights is ('heavy',): use a list, each a number",
    "train --loss-type grop": "loss_type is 'grop': use grpo, ",
    "train --recipe ppo": "recipe is 'ppo': use grpo, ",
    "train -n 3": "'-n' is not a flag: flags start with --.",
    "train --config nowhere.yaml": "config 'nowhere.yaml' cannot be read",
    "train --config {DATA}": "is not valid JSON (Extra data at line 2, column 1)",
    "train --config {HERE}": "is a folder: give a file, such as the config.json of a run.",
    "train --stop-strings ---": "'---' starts with dashes: write --stop-strings='---'",
    "train --temperature 0.7x --learning-rate nan": (
        "temperature is '0.7x': use a number (above 0 and finite: training samples completions). "
        "learning_rate is nan: it must be above 0 and finite, or None."
    ),
    "evaluate --help": "there is no subcommand 'evaluate': use one of train, plan, compile, eval",
    "eval": "--model is missing; grpo-eqx eval --help says more",
    "eval --model tiny_qwen2 --temperature 0.5": "temperature is 0.5 without num_samples",
    "eval --model tiny_qwen2 --steps 3": "--steps is not a flag of grpo-eqx eval",
    "launch tpu-vm create --name a --zone us-east5-b --type v6e-16": (
        "--zone is not a flag of grpo-eqx launch tpu-vm create: did you mean --zones?"
    ),
    "eval --model {HERE}": "has no config.json: give a folder",
    "exprt --help": "there is no subcommand 'exprt': use one of train",
    "train --lr 1 --dynamic-sampling true": (
        "lr is an unknown setting: use learning_rate. --dynamic-sampling takes no value: leave out"
    ),
    "train --help losses": "--help has no group 'losses'",
    "train --dynamic-sampling false": "takes no value: leave it out, or use --no-dynamic-sampling",
    "train --config a.yaml --config b.yaml": "--config is given twice",
    "train --train-data x.jsonl": "train_data is an unknown setting: use data",
    "train --eval-data no.jsonl": "eval_data 'no.jsonl' is neither a file",
    "train algorithm.adv_estimator=grpo data.train_batch_size=4": (
        "'algorithm.adv_estimator=grpo' is not a flag: use advantage_estimator. "
        "'data.train_batch_size=4' is not a flag: use prompts_per_step."
    ),
    "train learning_rate=1e-6": "'learning_rate=1e-6' is not a flag: write --learning-rate 1e-6.",
    "train --topology v6e-8": "topology is an unknown setting: it belongs to grpo-eqx plan: leave",
    "train --config run.toml": "config 'run.toml' is TOML, which is not read: write YAML or JSON",
    "train extra": "'extra' is not a flag: flags start with --.",
    "train -- python train.py": "this subcommand takes no COMMAND",
    "train --data nowhere.jsonl": "data 'nowhere.jsonl' is neither a file",
    "train --data {HERE}": "is a folder: give a JSONL file",
    "train --data {DATA} {DATA}": "--data takes one file: join several, as cat A.jsonl",
    "train --model ./nowhere": "model './nowhere' does not exist here",
    "train --output-dir {DATA}/run": "cannot be written",
    "train --output-dir {HERE}/r --mesh 3,1,1": "mesh 3,1,1",
    "train --output-dir {HERE}/r --mesh bananas": "bananas",
    "train --output-dir {HERE}/r --resume nowhere": "resume is 'nowhere', which does not exist",
    "train --reward-funcs correct tags --reward-weights=1 0.5": (
        "--reward-weights=... takes one value: for several, write --reward-weights A B"
    ),
    "train --reward-funcs mine.py:brief": "functions of your own are passed in a script",
    "train --reward-funcs right": "no reward function named 'right'",
    "train --chat-template nowhere": "chat_template 'nowhere' cannot be read",
    "trian": "use one of train, plan, compile, eval, report, export, check, inspect, serve, "
    "doctor, launch (did you mean train?)",
    "": "a subcommand is missing: use one of train",
    "--steps 2 train": "--steps comes before the subcommand (train",
    "train config.yaml": "'config.yaml' is not a flag: flags start with --, or use --config",
    "train --dynamic-sampling=true": "--dynamic-sampling takes no value: leave out 'true'.",
    "train --reward-funcs correct --reward-funcs tags": "--reward-funcs is given twice",
    "train --reward-funcs correct,tags": "separate names with spaces in a command, and write a",
    "train --reward-funcs 'correct tags'": "separate names with spaces in a command, and write a",
    "train --mesh 1 -1 1": "join the sizes with commas, as in --mesh 1,-1,1.",
    "train --wandb": "--wandb has no value: use online, offline, disabled or None",
    "train --resume --steps 1": "--resume has no value: use a string; auto, never or a path.",
    "train --config": "--config has no value: use a path or None.",
    "train --output-dir gs://bucket/run1": "mount the bucket, for example with gcsfuse",
    "export {RUN} --output gs://bucket/model": "output is 'gs://bucket/model', an address",
    "export {RUN} --output {RUN}": "and is not an empty folder: choose another.",
    "export {RUN} --output {RUN}/model/..": "and is not an empty folder: choose another.",
    "export {RUN} --output {HERE}": "and is not an empty folder: choose another.",
    "export {RUN} --output {MODEL}": "and is not an empty folder: choose another, or delete it fi",
    "train --output-dir ''": "output_dir is empty",
    "train --output-dir {HERE}/link": "it is a link to nowhere, which does not exist",
    "train --output-dir /proc/run": "'/proc/run' cannot be written",
    "train --output-dir {RUN}/checkpoints": "it is part of the run in",
    "train --model {RUN}": "is the folder of a run: use",
    "plan --topology cpu": "or local, the devices of this machine",
    "plan --topology v9-8": "unknown TPU type 'v9-8'",
    "plan --serch steps": "serch is an unknown setting: did you mean search?",
    "export": "CHECKPOINT",
    "export {HERE} --output {HERE}/out": "has no checkpoints",
    "export nowhere --output {HERE}/out": "does not exist",
    "launch": "a subcommand is missing: use one of local, tpu-vm, slurm, gke, skypilot.",
    "launch tpu-vm creat": "there is no subcommand 'creat': use one of create, bootstrap,",
    "launch tpu-vm --name x create": "--name comes before the subcommand (create, bootstrap,",
    "launch tpu-vm run": "--type, --name and --zone are missing; grpo-eqx launch tpu-vm run --help",
    "launch local": "COMMAND is missing",
    "launch local 3": "3 belongs to no flag; grpo-eqx launch local --help says more.",
    "launch local --processes 2 grpo-eqx train": "-- is missing before grpo-eqx",
    "launch slurm python train.py": "-- is missing before python",
    "launch local --processes 0 -- python x.py": "processes",
    "doctor --outputdir x": "--outputdir",
    "launch local --max-restarts=3 -- python x.py": (  # which two other launchers have
        "--max-restarts is not a flag of grpo-eqx launch local: use --restarts."
    ),
    "launch local --nproc_per_node 2 -- python x.py": (
        "--nproc_per_node is not a flag of grpo-eqx launch local: use --processes."
    ),
    "export {RUN} --format hf": (
        "--format is not a flag of grpo-eqx export: grpo-eqx export --help lists all."
    ),
    "export {RUN} model": "--output is missing, and model belongs to no flag; grpo-eqx export",
    "export --checkpoint {RUN} --output-dir x": "checkpoint has no flag: give it by itself, as in "
    "grpo-eqx export CHECKPOINT. --output-dir is not a flag of grpo-eqx export: did you mean "
    "--output",
    "launch local -- 'grpo-eqx train'": "leave out the quotes around the command",
}

# Bodies of scripts: data, calls, rewards and models.
SCRIPTS = {
    # data
    "trainer(train_data=datasets.DatasetDict(train=Dataset.from_list(ROWS)))": (
        "train_data is a DatasetDict of train: pass one data set, as in train_data=data['train']"
    ),
    "trainer(train_data={'question': ['x']})": "train_data is a dict of question",
    "trainer(train_data=Dataset.from_list(ROWS).to_pandas())": (
        "pass datasets.Dataset.from_pandas(train_data, preserve_index=False)."
    ),
    "trainer(train_data=['1 + 1?'])": "problem 1 is of type str: give an object",
    "trainer(train_data=[{'text': 'x', 'label': 1}])": "no column question or prompt, only label",
    "trainer(train_data=[ROWS[0], {'question': 'x'}])": "problem 2 has the columns question, but",
    "trainer(train_data=[])": "train_data has no problems: add problems",
    "trainer(eval_data={'easy': ROWS, 'hard': ROWS})": (
        "eval_data is a dict of easy, hard: pass one data set, as in eval_data=data['easy']"
    ),
    "trainer(trackers=[lambda step, metrics: None])": "subclass grpo_eqx.tracking.Tracker, with",
    "trainer(trackers=[type('T', (Tracker,), {'log': lambda s, m: 0, 'finish': id})()])": (
        "the method log of tracker T must take step and metrics: too many positional arguments"
    ),
    "GRPOConfig(num_train_epochs=1, steps=None)": "leave it out beside num_train_epochs.",
    "GRPOConfig(data='$HOME/x.jsonl', model='${HOME}/m')": (
        "as $HOME are not expanded in settings: write the name itself."
    ),
    "trainer(train_data=[{'question': 'a\\ud83d', 'answer': 1}])": "character 2 of a text, half",
    "trainer(train_data=[{'prompt': json.dumps(TALK[:1])}])": (
        "problem 1: prompt is the JSON text of a list of messages: make it a list, as json.loads"
    ),
    "trainer(train_data=[{'prompt': np.array(TALK[:1])}])": "make it a list of messages, as its",
    "trainer(train_data=3)": "train_data is of type int: pass a datasets.Dataset",
    "trainer(train_data={'question': ['x'], 'answer': [1]})": "pass datasets.Dataset.from_dict(",
    "trainer(train_data=[{'messages': [{'role': 'user', 'content': 'x'}]}])": "rename messages to",
    "trainer(train_data=ROWS, eval_data=datasets.DatasetDict(test=Dataset.from_list(ROWS)))": (
        "as in eval_data=data['test']"
    ),
    "trainer(train_data=Dataset.from_list(ROWS).data.table)": "pass datasets.Dataset(train_data)",
    "trainer(train_data=[{'question': 'x', 'answer': 1, 0: 2}] * 40)": "a column named 0: give it",
    "trainer(train_data=[{'question;answer': '1 + 1?;2'}] * 20)": "with the delimiter ';'",
    'trainer(train_data=file(\'twice.jsonl\', \'{"question": "1?", "question": "2?"}\'))': (
        "twice.jsonl, line 1: question is set twice: leave out one of them"
    ),
    "trainer(train_data=[{'data': ROWS}])": "rename data to prompt, and make it a list of objects",
    "trainer(train_data=[{'question': [{'role': 'user', 'content': 'x'}], 'answer': 1}] * 40)": (
        "name the column prompt for a list of messages"
    ),
    "trainer(train_data=[{'prompt': {'role': 'user', 'content': 'x'}, 'answer': 1}] * 40)": (
        "put the message into a list"
    ),
    "trainer(train_data=[{'prompt': [{'role': 'human', 'content': 'x'}]}] * 40)": (
        "a message of the role 'human': use one of system, user, assistant, tool"
    ),
    "trainer(train_data=[{'prompt': [{'role': 'system', 'content': 'x'}]}] * 40)": (
        "ends with the system's message: end it with the user's"
    ),
    "trainer(train_data=[{'prompt': 'x'}, {'prompt': [{'role': 'user', 'content': 'x'}]}])": (
        "problem 2: prompt is a conversation, but that of the first problem is a text"
    ),
    "trainer(system_prompt='Add.', train_data=[{'answer': 1, 'prompt': [{'role': 'system', "
    "'content': 'x'}, {'role': 'user', 'content': 'x'}]}] * 40)": "system_prompt is set, and all",
    "trainer(eval_data='no.jsonl')": "eval_data 'no.jsonl' is neither a file",
    "trainer(train_data=f'{DATA}:train[:9]')": "only names on the Hugging Face hub have splits",
    "trainer(train_data=ROWS[:1])": "a single problem, which would be held out",
    "trainer(train_data=ROWS[:9])": "8 problems to train on, and prompts_per_step is 16: lower",
    "trainer(train_data=ROWS, eval_data=[{'a': 1}])": "eval_data, problem 1 has no column",
    "trainer(train_data=[{'prompt': [{'role': 'assistant', 'content': 'x'}]}])": (
        "ends with the assistant's message: end it with the user's"
    ),
    "trainer(train_data=[{'prompt': [{'role': 'user'}]}])": "give messages as objects with role",
    "trainer(train_data=[{'prompt': [{'role': 'user', 'content': [1]}]}])": "both text",
    "trainer(train_data=[{'question': ' '}, ROWS[1]])": "it must be non-empty text",
    "trainer(train_data=[{'question': None}, ROWS[1]])": "question is None: it must be non-empty",
    "trainer(train_data=[{**row, 'completions': 1} for row in ROWS])": (
        "has a column 'completions', the name of an argument of every reward function: rename it"
    ),
    "trainer(train_data=[{'question': 'x', 'gold': 1}] * 40)": (
        "no column answer to compare with, only gold"
    ),
    "trainer(train_data=[{'question': 'x', 'answer': 'none'}] * 40)": "a gold answer must be one",
    "trainer(train_data=[{'question': 'x' * 9000, 'answer': 1}] * 40)": (
        "max_prompt_length is 1024: raise it, or set overlong_prompts"
    ),
    "trainer(train_data=file('a.jsonl', '{\"question\": \"x\"}'.encode('utf-16')))": "in UTF-16",
    "trainer(train_data=file('b.jsonl', '{\"question\": \"é\"}'.encode('latin-1')))": "Latin-1",
    "trainer(train_data=file('c.jsonl', '[{}]'))": "is a JSON list: write one object per line",
    "trainer(train_data=file('d.csv', 'question,answer'))": "load_dataset('csv'",
    "trainer(train_data=file('e.jsonl', '{oops'))": "line 1 is not valid JSON",
    "trainer(train_data=file('f.jsonl', ''))": "is empty: it needs one JSON object per line",
    "trainer(train_data=file('g.json', json.dumps({'version': 1, 'data': ROWS})))": (
        "is one JSON object with the problems under 'data': write one object per line, as "
        "jq -c '.data[]' FILE.json > FILE.jsonl does, or pass that list to GRPOTrainer."
    ),
    "trainer(train_data=file('h.json', json.dumps({'rows': ROWS}, indent=2)))": (
        "is one JSON object with the problems under 'rows'"
    ),
    "trainer(train_data=[{'chosen': TALK, 'rejected': TALK}])": (
        "these are preference pairs, and GRPO samples its own completions: make a column prompt of"
    ),
    "trainer(train_data=[{'input_ids': [1, 2], 'attention_mask': [1, 1]}])": (
        "these are tokens: give problems as text, in a column question or prompt"
    ),
    "class S(data.PromptSource):\n    def __len__(self): return 40\n"
    "    def __getitem__(self, index): return ROWS[index]\ntrainer(train_data=S())": (
        "S: __getitem__ returned a dict for problem 1: return grpo_eqx.data.Prompt(text, columns)."
    ),
    "trainer(train_data='someone/nothing')": "could not be loaded from the Hugging Face hub",
    "trainer(train_data='word_problems@main')": "only names on the Hugging Face hub have revisions",
    # calls
    "GRPOTrainer('Qwen/Qwen2.5-0.5B')": "as in GRPOTrainer(model='Qwen/Qwen2.5-0.5B')",
    "GRPOTrainer({'steps': 3})": "pass GRPOConfig(**that)",
    "GRPOTrainer(args={'steps': 3})": "the config is a dict",
    "trainer(args=GRPOConfig())": "args and cfg are the same argument: pass one of them",
    "GRPOTrainer(mesh='auto')": "fsdp=-1, tp=1), or set GRPOConfig(mesh=...)",
    "GRPOTrainer(loss_backend='dense')": "or set GRPOConfig(loss_backend=...)",
    "GRPOTrainer(rollout_sharding='legacy')": "or set GRPOConfig(rollout_sharding=...)",
    "GRPOTrainer(optimizer='adamw')": "or set GRPOConfig(optimizer=...)",
    "import optax\nGRPOTrainer(optimizer=optax.adamw)": "optimizer is the function adamw: call it",
    "import optax\nGRPOTrainer(optimizer=optax.MultiSteps(optax.sgd(1.0), 2))": (
        "optimizer is an optax.MultiSteps: pass its gradient_transformation()."
    ),
    "trainer(trackers='wandb')": "for Weights & Biases, set GRPOConfig(report_to=['wandb'])",
    "trainer(trackers=[print])": "trackers is of type builtin_function_or_method, of builtins",
    "from grpo_eqx.tracking import Tracker\ntrainer(trackers=[Tracker])": (
        "trackers: Tracker is a class: pass an object of it"
    ),
    "trainer(peft_config=1)": "set lora_rank",
    "trainer(callbacks=[1])": "callbacks has one of type builtins.int: pass objects of subclasses",
    "from grpo_eqx import Callback\ntrainer(callbacks=[Callback])": (
        "callbacks has the class grpo_eqx.loop.callbacks.Callback: pass objects"
    ),
    "trainer(callbacks='wandb')": "callbacks is 'wandb': pass a list of grpo_eqx.Callback objects",
    "from grpo_eqx import Callback\n"
    "class Old(Callback):\n"
    "    def on_step_end(self, args, state, control): ...\n"
    "trainer(callbacks=[Old()])": (
        "the method on_step_end of callback Old must take event: missing a required argument"
    ),
    "class Mine(sharding.Mesh):\n    def shape(self): ...\nGRPOTrainer(mesh=Mine())": (
        "the method shape of mesh Mine must take devices: too many positional arguments."
    ),
    "class Mine(sharding.LegacySharding):\n"
    "    def layout(self, mesh, num_prompts, num_generations): ...\n"
    "GRPOTrainer(rollout_sharding=Mine())": (
        "the method layout of rollout sharding Mine must take mesh, num_prompts, num_generations "
        "and num_slots: too many positional arguments."
    ),
    "class Mine(loss_backends.LossBackend):\n"
    "    def token_stats(self, hidden, head, ids, temperature): ...\n"
    "GRPOTrainer(loss_backend=Mine())": (
        "the method token_stats of loss backend Mine must take hidden, head, ids, temperature, "
        "mesh and softcap: too many positional arguments."
    ),
    "trainer(ref_model=1)": "the reference is the model that the run starts from: set beta",
    "GRPOTrainer(learning_rate=1e-6)": "it is a setting: GRPOConfig(learning_rate=...)",
    "GRPOTrainer(max_steps=3)": "use steps",
    "trainer(processing_class=1, tokenizer=2)": "are the same argument",
    # rewards
    "trainer(reward_funcs=lambda completions: [])": "add **columns to its arguments",
    "def f(gold, **columns): return []\ntrainer(reward_funcs=f)": (
        "reward function f asks for the column gold, which the problems do not have: they have"
    ),
    "trainer(reward_funcs=3)": "reward_funcs has 3, which is not a function",
    "trainer(reward_funcs=[3])": "reward_funcs has 3, which is not a function",
    "trainer(reward_funcs='right')": "no reward function named 'right'",
    "trainer(reward_funcs=['format', 'format'])": "two reward functions have the same name",
    "trainer(reward_funcs=[])": "give at least one function",
    "trainer(reward_funcs=['format'], reward_weights=(1.0, 2.0))": "one weight for each",
    "trainer(reward_funcs=['format'], reward_weights=(0.0,))": "all reward_weights are 0",
    "def f(**columns): return []\ntrainer(reward_funcs=f, reward_timeout=1.0)": (
        "set reward_workers, or write it as async def"
    ),
    "def f(**columns): return None\ntrainer(reward_funcs=f).fit()": (
        "reward function f returned None for 1 completion: return a list with one float"
    ),
    "def f(**columns): return ['1.0']\ntrainer(reward_funcs=f).fit()": (
        "reward function f returned '1.0' for completion 0: return a float"
    ),
    "def f(**columns): return [1.0, 2.0]\ntrainer(reward_funcs=f).fit()": (
        "reward function f returned 2 values for 1 completion:"
    ),
    "trainer(reward_workers=2)": "there is no plain function of your own",
    "class F:\n    def __call__(self, **columns): pass\ntrainer(reward_funcs=F)": (
        "reward function F is a class: pass an object of it, F()."
    ),
    "rewards.gsm8k.correct(['6 * 7?'], ['42'], answer='42')": (
        "answer is '42': pass a list with one entry per completion."
    ),
    "rewards.gsm8k.correct_strict(['6 * 7?'], ['42'], answer=42)": "answer is 42: pass a list",
    "rewards.gsm8k.correct(['6 * 7?'], ['42', '43'], answer=['42'])": (
        "len(answer) is 1 and len(completions) is 2: pass lists with one entry per completion."
    ),
    "rewards.gsm8k.format(['6 * 7?'], '<think>')": "completions is '<think>': pass a list with one",
    "trainer(reward_funcs=lambda question, **columns: [])": "the questions are its prompts",
    "trainer(reward_funcs=lambda **columns: [10**400]).fit()": "for completion 0: return a float",
    "trainer(eval_func=3)": "eval_func has 3, which is not a function",
    "trainer(eval_metrics=[3])": "eval_metrics has 3, which is not a function",
    "trainer(eval_metrics={'gold': lambda gold, **columns: []})": "asks for the column gold",
    "trainer(eval_func=lambda gold, **columns: [])": "asks for the column gold",
    "trainer(eval_data=[{**x, 'answer': 'a'} for x in ROWS], reward_funcs='format').evaluate()": (
        "for other answers, pass eval_func of your own"
    ),
    "trainer().evaluate(num_samples=0)": "num_samples is 0: use a whole number",
    "trainer().generate('What is 1 + 1?')": "pass a list of texts or conversations",
    "trainer().generate([{'role': 'user', 'content': 'x'}])": "pass a list of conversations",
    "trainer().generate(ROWS[0])": "pass a list of texts or conversations",
    "trainer().generate(Dataset.from_list([{'text': 'x'}]))": (
        "prompt 1 has no column question or prompt, only text: rename the column that the model"
    ),
    "trainer().generate(['x'], max_new_tokens=5)": "set GRPOConfig(max_completion_length=...)",
    "trainer().generate(['x'], do_sample=True)": "generate has no argument do_sample",
    "trainer().evaluate(eval_dataset=ROWS)": "pass it to GRPOTrainer(eval_dataset=...)",
    "trainer().generate([1])": "prompt 1: prompt is 1: it must be non-empty text",
    "trainer().save_pretrained(DATA)": "is a file: give the path of a folder",
    "trainer().save_pretrained('/proc/nowhere/model')": (
        "'/proc/nowhere/model' cannot be written (No such file or directory): choose another."
    ),
    "trainer().save_model(DATA / 'model')": "cannot be written (Not a directory): choose another.",
    "trainer().save_pretrained('x', safe_serialization=True)": (
        "save_pretrained has no argument safe_serialization: safetensors are always written."
    ),
    "trainer().save_pretrained(save_directory='x')": "the folder is its first argument",
    "trainer().save_model('x', push_to_hub=True)": "save_model has no argument push_to_hub",
    "trainer().push_to_hub('me/model', token='x')": "set the environment variable HF_TOKEN",
    "trainer().push_to_hub('my model!!')": "repo_id is 'my model!!': use owner/name",
    # models
    "trainer(model='')": "model is empty",
    "trainer(model=DATA)": "is a file: give its folder",
    "trainer(model=model(weights='version https://git-lfs.github.com/spec/v1'))": "run git lfs",
    "trainer(model=model(tokenizer='version https://git-lfs.github.com/spec/v1'))": (
        "tokenizer.json cannot be read: it is a pointer of Git LFS; run git lfs pull."
    ),
    "trainer(model={'norm.weight': np.ones(3)}, processing_class=3)": (
        "model is of type dict, of builtins: pass an object of grpo_eqx.models.CausalLM, or set "
        "GRPOConfig(model=...)."
    ),
    "trainer(model=models.from_pretrained, processing_class=3)": (
        "model is the function from_pretrained: call it, as in from_pretrained(...)."
    ),
    "models.from_pretrained(MODEL, torch_dtype='auto')": (
        "from_pretrained has no argument torch_dtype: use dtype."
    ),
    "trainer(model=model(num_hidden_layers=2))": "have 1 of the layers that config.json",
    "trainer(tokenizer='base')": "the tokenizer is of type str: pass one of transformers",
    "trainer(chat_template=file('same.jinja', 'hello'))": "leaves out the user's message",
    "trainer(system_prompt='Add.', chat_template=file('u.jinja', '{{ messages[-1].content }}'))": (
        "leaves out the system message"
    ),
    "trainer(model=model(without='tokenizer*'))": "contains no tokenizer",
    "trainer(model=model(without='chat_template*'))": "the tokenizer has no chat template: set",
    "trainer(model=model(without='config.json'))": "config.json",
    "trainer(model=model(without='*.safetensors'))": "has no model.safetensors",
    "trainer(model=model(model_type='gpt2'))": "gpt2",
    "trainer(model=model(hidden_size='big'))": "hidden_size",
    "trainer(model=model(hidden_size=30))": "but config.json says (448, 30)",
    "trainer(model=model(vocab_size=7))": "but the model's vocabulary has 7",
    "trainer(model=model(vocab_size=100_000))": "far fewer than the 100000",
    "trainer(model=model(layer_types=['sliding_attention']))": "set sliding_window too",
    "trainer(model=model(rope_scaling={'rope_type': 'yarn', 'factor': 4.0}))": "rope",
    "trainer(model=model(max_position_embeddings=16))": "16 positions of the model",
    "trainer(model=model(quantization_config={'bits': 4}))": "quantization_config",
    "trainer(chat_template='none', system_prompt='Think.')": "without a template there are no",
    "trainer(chat_template='{% for m in messages %}{{ m.content }}{% endfor %}')": (
        "chat_template is the path of a file, and this is a template itself"
    ),
    "trainer(chat_template='nowhere.jinja')": "cannot be read: No such file or directory",
    "trainer(system_prompt='Add.', chat_template=file('gemma.jinja', NO_SYSTEM))": (
        "(no system role): leave system_prompt unset, with its text in the problems"
    ),
    "trainer(reward_funcs='me/reward-model')": "reward models are not loaded: call yours in a",
    "trainer(train_data=[{'prompt': [{'role': 'user', 'content': [{'text': 'x'}]}]}] * 20)": (
        "with role and content, both text; images and other parts are not supported"
    ),
    "trainer(system_prompt=DATA.as_posix())": "the name of a file: give its text, as in",
    "trainer().save_model()": "nothing is trained yet: name a folder",
    "trainer().train(resume_from_checkpoint=True)": "has no checkpoint of this run to resume fro",
    "loss_backends.ChunkedLoss(token_tile='512')": "token_tile is '512': it must be a whole",
    "recipes.dapo(loss_type='sapo')": "The recipe sets epsilon=0.2, epsilon_high=0.28",
    "recipes.dapo(prompts_per_step=2)": (
        "overlong_buffer=0.2, steps_per_generation=4: where that does not apply, pass the default, "
        "steps_per_generation=1."
    ),
    "trainer(save_total_limit=2, metric_for_best_model='eval_reward')": (
        "evaluations are not made without eval_steps: set eval_steps"
    ),
    "trainer(save_total_limit=2, metric_for_best_model='rewards/correct')": (
        "(did you mean rewards/correct/"
    ),
    "trainer(model='./nowhere')": "model './nowhere' does not exist here, and is not a name on the",
    "trainer(model='/nowhere/qwen')": "model '/nowhere/qwen' does not exist here",
    "trainer(model=model(adapter=True))": "is an adapter, and lora_rank is not set: set lora_rank",
    "trainer(train_data=[{'messages': TALK}] * 20, reward_funcs='format')": (
        "rename messages to prompt, without the assistant's last message"
    ),
    "trainer(eval_func=lambda log_metric, **columns: [])": (
        "function of evaluations <lambda> asks for log_metric, which it does not get: functions"
    ),
    # what TRL has, and this library has not
    "async def one(): return 1.0\ndef f(**columns): return [one()]\n"
    "trainer(reward_funcs=f).fit()": "returned a coroutine for completion 0: write it as async def",
    "async def one(): return 1.0\ndef f(**columns): return one()\n"
    "trainer(reward_funcs=f).fit()": "returned a coroutine: write it as async def",
    "trainer().fit(steps=3)": "fit has no argument steps: set GRPOConfig(steps=...)",
    "trainer().train(trial=None, ignore_keys_for_eval=[])": "train has no argument trial",
    "trainer().plan(search='steps')": "search is 'steps': use micro_batch_size_per_device or",
    "trainer().plan('a100')": "local, the devices of this machine (the only way to plan for GPUs)",
    "trainer().evaluate(num_samples=2, temperature=1.0).pass_at(3)": "pass@3 needs 1 <= k <= 2",
    "GRPOTrainer(recipes.dapo)": "the config is the function or class dapo: call it",
    "from grpo_eqx import Callback\nclass C(Callback):\n"
    "    def on_log(self, event): pass\nGRPOTrainer(callbacks=[C()])": (
        "C has a method on_log, which no run calls: use on_step_end, the nearest of the events"
    ),
    "from grpo_eqx import Callback\nclass C(Callback):\n    def on_evaluated(self, event): pass\n"
    "GRPOTrainer(callbacks=[C()])": "which no run calls: use on_evaluate",
    "trainer(metric_for_best_model='eval_reward', eval_steps=1)": (
        "'eval_reward', which no evaluation logs (did you mean eval/greedy/pass@1?): use one of"
    ),
    "GRPOConfig(lora_rank=2, lora_target=['q_proj'])": "names are one text, as in 'q_proj,v_proj'",
    "GRPOConfig(lr_scheduler_type='constant_with_warmup')": "constant with warmup_steps",
    # objects of their own
    "class R(sharding.RolloutSharding):\n    def layout(self, mesh, *batch):\n"
    "        return sharding.RolloutLayout(mesh, 'fsdp', (), 'mine')\n"
    "GRPOTrainer(rollout_sharding=R())": "prompts='fsdp': return a tuple of mesh axes",
    "GRPOTrainer(mesh=jax.make_mesh((1, 1, 1), ('dp', 'fsdp', 'tp')))": (
        "mesh is of type Mesh, of jax: pass an object of grpo_eqx.sharding.Mesh, such as"
    ),
    "class M(sharding.Mesh):\n    def shape(self, devices): return 1, len(devices)\n"
    "GRPOTrainer(GRPOConfig(steps=2), mesh=M())": "the sizes of dp, fsdp, tp, whose product",
    "class M(sharding.Mesh):\n    def shape(self, devices): return {'dp': 1, 'fsdp': 1, 'tp': 1}\n"
    "GRPOTrainer(GRPOConfig(steps=2), mesh=M())": "return three whole numbers",
    "class R(sharding.RolloutSharding):\n    def layout(self, *batch): return 'dp'\n"
    "GRPOTrainer(rollout_sharding=R())": "R.layout returned a str: return a grpo_eqx.sharding.Ro",
    "class B(loss_backends.LossBackend):\n    def token_stats(self, hidden, head, ids, *rest):\n"
    "        return loss_backends.TokenStats(hidden, hidden, hidden)\n"
    "GRPOTrainer(loss_backend=B())": "B returned logps of shape",
}

TABLE = [
    *(("script", f"GRPOConfig({text})", said) for text, said in CONFIGS.items()),
    *(("script", f"GRPOConfig({name}=1)", said) for name, said in OF_OTHERS.items()),
    *(("command", text, said) for text, said in COMMANDS.items()),
    *(("script", text, said) for text, said in SCRIPTS.items()),
    *(("script", text, said) for text, said in with_environments.SCRIPTS.items()),
]


@pytest.fixture(scope="module")
def outcome(small_model: Path) -> Callable[[int], tuple[int, str]]:
    """What a mistake exits with and prints, by its number.

    Parts of the table have processes of their own, so that workers of pytest share the work.
    """

    @functools.cache
    def outcomes_of_part(part: int) -> list[tuple[int, str]]:
        rows = [(kind, text) for kind, text, _ in TABLE[part * PART : (part + 1) * PART]]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(WORKER), str(small_model)],
            input=json.dumps(rows), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1])]

    return lambda number: outcomes_of_part(number // PART)[number % PART]


def test_the_table_is_long() -> None:
    assert len(TABLE) >= 120


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[text[:60] for _, text, _ in TABLE])
def test_a_mistake_is_answered_in_a_sentence(
    outcome: Callable[[int], tuple[int, str]], number: int
) -> None:
    kind, _, said = TABLE[number]
    code, printed = outcome(number)
    assert said in " ".join(printed.split()), printed
    assert code == 2, printed
    assert "Traceback" not in printed
    if kind == "script":
        lines = [line for line in printed.splitlines() if not line.startswith("[")]  # progress
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
