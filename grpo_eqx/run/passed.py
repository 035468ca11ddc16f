"""Arguments of `GRPOTrainer`: objects that are passed in place of what settings name."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.data.load import Data
from grpo_eqx.data.tokenizer import ChatTokenizer, Tools
from grpo_eqx.loss_backends import LossBackend
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding import Mesh, RolloutSharding
from grpo_eqx.tracking.trackers import Tracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed:
    """Objects passed in place of what the config names; where `None`, the config decides."""

    model: CausalLM | None = None
    tokenizer: ChatTokenizer | Any | None = None
    train_data: Data | None = None
    eval_data: Data | None = None
    optimizer: optax.GradientTransformation | None = None
    mesh: Mesh | None = None
    rollout_sharding: RolloutSharding | None = None
    loss_backend: LossBackend | None = None
    tools: Tools = dataclasses.field(default_factory=dict)
    """Schemas of functions that the model can call, by the environment of a problem."""
    rollout_func: Callable[..., Any] | None = None
    """Function that makes completions."""
    harness: Callable[..., Any] | None = None
    """Function that has an agent make a completion."""
    changes_prompts: bool = False
    """Whether environments, or the function, change prompts, which may then have up to
    `max_prompt_length` tokens."""

    def __post_init__(self) -> None:
        """Raises `UserError` for a model, optimizer or strategy that no run could use.

        And for a model without its tokenizer. Tokenizers and data are checked as they are read.
        """
        check_object("model", self.model, CausalLM)
        check_object("optimizer", self.optimizer, optax.GradientTransformation)
        check_object("mesh", self.mesh, Mesh)
        check_object("rollout_sharding", self.rollout_sharding, RolloutSharding)
        check_object("loss_backend", self.loss_backend, LossBackend)
        check_method("mesh", self.mesh, Mesh, "shape")
        check_method("rollout sharding", self.rollout_sharding, RolloutSharding, "layout")
        check_method("loss backend", self.loss_backend, LossBackend, "token_stats")
        if self.model is not None and self.tokenizer is None:
            raise UserError("a model is passed without its tokenizer: pass both.")
        if self.rollout_func is not None and not callable(self.rollout_func):
            raise UserError(
                f"rollout_func is {brief(self.rollout_func)}: pass a function of the prompts and "
                f"the trainer."
            )
        if self.harness is not None and not callable(self.harness):
            raise UserError(
                f"harness is {brief(self.harness)}: pass a function of the endpoint and the row, "
                f"or the command line of a program."
            )

    def described(self) -> dict[str, str]:
        """Returns the kinds of the objects, by the settings that they replace."""
        objects = {
            "data" if field.name == "train_data" else field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name
            # no settings, or objects that have other names
            not in ("tokenizer", "tools", "rollout_func", "harness", "changes_prompts")
        }
        return {
            setting: type(x).__name__
            for setting, x in objects.items()
            if x is not None and not isinstance(x, str | Path)  # a name becomes the setting
        }


def one_of(**given: Any) -> Any:
    """Returns the value of arguments that mean the same, of which all but one are `None`.

    Raises `UserError` where more are given.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if len(values) > 1:
        raise UserError(f"{listed(list(values))} are the same argument: pass one of them.")
    return next(iter(values.values()), None)


def as_config(
    cfg: Any, model: Any, train_data: Any = None, eval_data: Any = None, harness: Any = None
) -> GRPOConfig:
    """Returns the config of a call, with the model, data and harness that the call names.

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
    given = {"model": model, "data": train_data, "eval_data": eval_data, "harness": harness}
    names: dict[str, Any] = {name: str(x) for name, x in given.items() if isinstance(x, str | Path)}
    return dataclasses.replace(cfg, **names)


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


def check_trackers(trackers: Any) -> None:
    """Raises `UserError` for trackers that no run could use."""
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


def check_method(kind: str, given: object, base: type, method: str) -> None:
    """Raises `UserError` where an object's method does not take, by position, what its base's does.

    **Arguments:**

    - `kind`: what the object is, in words.
    - `given`: the object, or `None`.
    - `base`: its base class.
    - `method`: the method.
    """
    if given is None:
        return
    _, *arguments = inspect.signature(getattr(base, method)).parameters  # the first is self
    try:
        inspect.signature(getattr(given, method)).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"the method {method} of {kind} {type(given).__name__} must take "
            f"{listed(arguments or ['no arguments'])}: {error}."
        ) from error


def check_object(name: str, value: Any, kind: type, setting: str | None = None) -> None:
    """Raises `UserError` where a value is neither `None` nor an object of `kind`.

    **Arguments:**

    - `name`: the argument.
    - `value`: its value.
    - `kind`: the class.
    - `setting`: the setting that would do instead; by default of the same name.
    """
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        raise UserError(f"{name}: {value.__name__} is a class: pass an object of it.")
    if inspect.isfunction(value):
        name_of = value.__name__
        raise UserError(f"{name} is the function {name_of}: call it, as in {name_of}(...).")
    if isinstance(value, optax.MultiSteps):
        raise UserError(f"{name} is an optax.MultiSteps: pass its gradient_transformation().")
    own = type(value)
    what = f"of type {own.__name__}, of {own.__module__.partition('.')[0]}"
    raise UserError(
        f"{name} is {repr(value) if isinstance(value, str) else what}: pass an object of "
        f"{_public_name(kind)}, or set GRPOConfig({setting or name}=...)."
    )


def _public_name(kind: type) -> str:
    """Returns the name that users import a class by, with an example of a mesh."""
    package = ".".join(kind.__module__.split(".")[: 2 if kind.__module__.startswith("grpo") else 1])
    example = ", such as ExplicitMesh(dp=1, fsdp=-1, tp=1)" if kind is Mesh else ""
    return f"{package}.{kind.__name__}{example}"
