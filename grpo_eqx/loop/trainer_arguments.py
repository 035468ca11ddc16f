"""Arguments of `GRPOTrainer` as people make them, TRL's names among them."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import MissingAttributeError, UserError, refuse_unknown
from grpo_eqx.loop.callback_calls import EVENTS
from grpo_eqx.loop.callbacks import Callback
from grpo_eqx.run.passed import check_method, check_object
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.peer_settings import advice
from grpo_eqx.tracking.trackers import Tracker

_ARGUMENTS: Mapping[str, str] = {
    "args": "cfg",
    "config": "cfg",
    "train_dataset": "train_data",
    "eval_dataset": "eval_data",
    "processing_class": "tokenizer",
}
"""Arguments of `GRPOTrainer` by what TRL calls them."""

_ARGUMENT_ADVICE: Mapping[str, str] = {
    "optimizers": "pass optimizer, an optax transformation",
    "peft_config": "set lora_rank, lora_alpha, lora_target and use_rslora in the config",
    "quantization_config": "use load_in_8bit of the config, beneath adapters",
    "reward_processing_classes": "reward models are not loaded: call yours in a reward function",
    "rollout_func": "the trainer samples by itself; max_num_seqs and top_p are settings",
    "environment_factory": "completions are single turns of text, without tools",
    "tools": "completions are single turns of text, without tools",
    "compute_metrics": "pass eval_metrics",
    "data_collator": "prompts are padded by themselves",
    "dataset": "use train_data",
    "reward_func": "use reward_funcs",
    "reward_fn": "use reward_funcs",
    "ref_model": "the reference is the model that the run starts from: set beta",
}  # fmt: skip
"""Advice on arguments of other libraries' trainers, by name."""


_METHOD_ADVICE: Mapping[str, str] = {
    "eval_dataset": "pass it to GRPOTrainer(eval_dataset=...)",
    "eval_data": "pass it to GRPOTrainer(eval_data=...)",
    "max_new_tokens": "set GRPOConfig(max_completion_length=...)",
    "max_length": "set GRPOConfig(max_completion_length=...)",
    "num_generations": "evaluate has num_samples",
    "steps": "set GRPOConfig(steps=...)",
    "do_sample": "set temperature",
    "save_directory": "the folder is its first argument",
    "safe_serialization": "safetensors are always written",
    "max_shard_size": "files hold at most 5 GB",
    "commit_message": "it is always the same",
    "token": "set the environment variable HF_TOKEN",
}
"""Advice on arguments that methods of `GRPOTrainer` do not have."""

_ATTRIBUTE_ADVICE: Mapping[str, str] = {
    "args": "use cfg",
    "config": "use cfg",
    "model": "the model is state.model; save_pretrained writes it for transformers",
    "processing_class": "use tokenizer",
    "ref_model": "it is state.reference",
    "reward_funcs": "they are rewards.funcs, by name; pass others to GRPOTrainer",
    "train_dataset": "the problems are prompts.data.prompts; pass others to GRPOTrainer",
    "train_data": "the problems are prompts.data.prompts; pass others to GRPOTrainer",
    "eval_dataset": "the held-out problems are heldout.prompts; pass others to GRPOTrainer",
    "eval_data": "the held-out problems are heldout.prompts; pass others to GRPOTrainer",
    "optimizer": "it is programs.optimizer; pass another to GRPOTrainer",
    "lr_scheduler": "the rate of a step is its metric learning_rate",
    "log": "metrics are recorded by themselves; pass trackers to get them",
    "log_metrics": "metrics are recorded by themselves, in metrics.jsonl",
    "save_metrics": "metrics are recorded by themselves, in metrics.jsonl",
    "save_state": "checkpoints are saved by themselves: save_steps and save_minutes",
    "add_callback": "pass GRPOTrainer(callbacks=[...])",
    "remove_callback": "pass GRPOTrainer the callbacks that are to be called",
    "predict": "use evaluate or generate",
    "create_model_card": "write a README.md into the folder that save_pretrained makes",
    "compute_loss": "the loss is set by loss_type and its settings; pass loss_backend for another",
    "training_step": "a step is fixed; settings, rewards and strategy objects change it",
    "prediction_step": "use evaluate or generate",
    "get_train_dataloader": "pass train_data",
    "get_eval_dataloader": "pass eval_data",
    "create_optimizer": "pass optimizer, an optax transformation",
    "create_scheduler": "pass optimizer, an optax transformation with its learning rates",
    "_generate_and_score_completions": "pass reward_funcs; completions are in completions/",
    "_prepare_inputs": "pass train_data",
    "_save_checkpoint": "checkpoints are saved by themselves: save_steps and save_minutes",
}
"""Advice on attributes of other libraries' trainers, by name."""

_EVENT_ADVICE: Mapping[str, str] = {
    "on_log": "on_step_end",
    "on_step_begin": "on_step_end",
    "on_substep_end": "on_step_end",
    "on_optimizer_step": "on_step_end",
    "on_pre_optimizer_step": "on_step_end",
    "on_push_begin": "on_save",
    "on_epoch_begin": "on_train_begin",
    "on_epoch_end": "on_evaluate",
    "on_prediction_step": "on_evaluate",
    "on_predict": "on_evaluate",
    "on_init_end": "on_train_begin",
}
"""Events of transformers' callbacks that there are not, and the nearest that there is."""

_OTHER_ARGUMENTS = (
    "model", "reward_funcs", "eval_func", "optimizer", "mesh", "rollout_sharding", "loss_backend",
    "trackers", "callbacks", "eval_metrics",
)  # fmt: skip


def with_trl_names(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `GRPOTrainer`, with those under TRL's names in their places.

    Raises `UserError` for arguments that there are not, with what to use, or that are given twice.
    """
    arguments, answers = dict(given), list[str]()
    for name, value in others.items():
        if value is None and name in {*_ARGUMENTS, *_ARGUMENT_ADVICE}:  # as a script may pass it
            continue
        own = _ARGUMENTS.get(name)
        if own is None:
            answers.append(f"GRPOTrainer has no argument {name}: {_instead_of(name, given)}.")
        elif arguments[own] is not None:
            answers.append(f"{name} and {own} are the same argument: pass one of them.")
        else:
            arguments[own] = value
    if answers:
        raise UserError(" ".join(answers))
    return arguments


def _instead_of(name: str, given: Iterable[str]) -> str:
    """Returns what to use instead of an argument that `GRPOTrainer` does not have."""
    if name in _ARGUMENT_ADVICE:
        return _ARGUMENT_ADVICE[name]
    if name in GRPOConfig.__dataclass_fields__:
        return f"it is a setting: GRPOConfig({name}=...)"
    if (of_config := advice(name)) is not None:
        return f"it is none of the settings either; {of_config}"
    near = difflib.get_close_matches(name, [*given, *_OTHER_ARGUMENTS, *_ARGUMENTS], n=1)
    return f"use {near[0]}" if near else "its docstring lists all"


def check_trackers_and_callbacks(trackers: Any, callbacks: Any) -> None:
    """Raises `UserError` for trackers or callbacks that no run could use.

    So too for callbacks with methods for events that there are not.
    """
    if isinstance(trackers, str) or not isinstance(trackers, Sequence):
        raise UserError(
            f"trackers is {trackers!r}: pass a list of Tracker objects; for Weights & Biases, set "
            f"GRPOConfig(report_to=['wandb'])."
        )
    for tracker in trackers:
        if inspect.isfunction(tracker):
            raise UserError(
                f"trackers has the function {tracker.__name__}: subclass "
                f"grpo_eqx.tracking.Tracker, with methods log(step, metrics) and finish()."
            )
        check_object("trackers", tracker, Tracker, setting="report_to")
        for method in ("log", "completions", "finish"):
            check_method("tracker", tracker, Tracker, method)
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks is {callbacks!r}: pass a list of grpo_eqx.Callback objects.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = callback if isinstance(callback, type) else type(callback)
            what = "the class" if isinstance(callback, type) else "one of type"
            raise UserError(
                f"callbacks has {what} {kind.__module__}.{kind.__qualname__}: pass objects of "
                f"subclasses of grpo_eqx.Callback, with methods {', '.join(EVENTS)}, which take "
                f"one event each."
            )
        for event in EVENTS:
            check_method("callback", callback, Callback, event)
        _refuse_other_events(callback)


def _refuse_other_events(callback: Callback) -> None:
    """Raises `UserError` for methods that are meant for events, and that no run calls."""
    kind = type(callback)
    for name in [each for each in dir(kind) if each.startswith("on_") and each not in EVENTS]:
        near = difflib.get_close_matches(name, EVENTS, n=1, cutoff=0.85)
        nearest = _EVENT_ADVICE.get(name, near[0] if near else None)
        if nearest is not None:
            raise UserError(
                f"callback {kind.__name__} has a method {name}, which no run calls: use "
                f"{nearest}, the nearest of the events {', '.join(EVENTS)}."
            )


def note_on_replaced(cfg: GRPOConfig, **passed: Any) -> str | None:
    """Returns a note on settings in whose place objects were passed, or `None`."""
    defaults = GRPOConfig()
    names = [
        name
        for name, value in passed.items()
        if value is not None and getattr(cfg, name) != getattr(defaults, name)
    ]
    if not names:
        return None
    return (
        f"note: the {'setting' if len(names) == 1 else 'settings'} {', '.join(names)} "
        f"{'has' if len(names) == 1 else 'have'} no effect: GRPOTrainer got others."
    )


def refuse_arguments(method: str, others: Iterable[str]) -> None:
    """Raises `UserError` for arguments that a method of `GRPOTrainer` does not have."""
    refuse_unknown(method, others, _METHOD_ADVICE)


def missing_attribute(name: str) -> MissingAttributeError:
    """Returns the error of an attribute that `GRPOTrainer` does not have."""
    instead = _ATTRIBUTE_ADVICE.get(name)
    return MissingAttributeError(
        f"'GRPOTrainer' object has no attribute {name!r}" + (f": {instead}" if instead else "")
    )


def refuse_assignment(name: str) -> None:
    """Raises the error of an attribute that only TRL's trainer has: it would not be read."""
    if name in _ATTRIBUTE_ADVICE:
        raise missing_attribute(name)


def refuse_overrides(subclass: type) -> None:
    """Raises `UserError` for a subclass of `GRPOTrainer` with methods that only TRL's calls."""
    for name in vars(subclass).keys() & _ATTRIBUTE_ADVICE.keys():
        raise UserError(
            f"{subclass.__name__} defines {name}, which TRL's trainer calls, and this one does "
            f"not: {_ATTRIBUTE_ADVICE[name]}."
        )


def as_config(cfg: Any, model: Any, train_data: Any = None, eval_data: Any = None) -> GRPOConfig:
    """Returns the config of a call, with the model and data that the call names, where it does.

    Raises `UserError` where either is of another library, or something else.
    """
    cfg = GRPOConfig() if cfg is None else cfg
    if isinstance(cfg, str | Path):
        raise UserError(
            f"the config is {str(cfg)!r}: it is the first argument, and a model is passed by name, "
            f"as in GRPOTrainer(model={str(cfg)!r})."
        )
    if isinstance(cfg, Mapping):
        raise UserError("the config is a dict: pass GRPOConfig(**that).")
    if callable(cfg):
        name = getattr(cfg, "__name__", type(cfg).__name__)
        raise UserError(f"the config is the function or class {name}: call it, as in {name}(...).")
    if not isinstance(cfg, GRPOConfig):
        kind = type(cfg)
        raise UserError(
            f"the config is a {kind.__module__}.{kind.__qualname__}: make it with "
            f"grpo_eqx.GRPOConfig(...)."
        )
    if type(model).__module__.startswith(("transformers.", "torch.", "peft.")):
        raise UserError(
            f"the model is a {type(model).__name__} of torch: pass the folder that its "
            f"save_pretrained writes, or its name on the hub."
        )
    given = {"model": model, "data": train_data, "eval_data": eval_data}
    names: dict[str, Any] = {name: str(x) for name, x in given.items() if isinstance(x, str | Path)}
    return dataclasses.replace(cfg, **names)
