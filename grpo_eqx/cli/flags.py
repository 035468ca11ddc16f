"""Command lines for scripts: flags in, one-line errors out."""

import argparse
import dataclasses
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import tyro

from grpo_eqx.cli.flag_values import (
    AS_SETTINGS,
    check_complete,
    is_of_setting,
    refuse_assignments,
    refuse_dashes,
)
from grpo_eqx.cli.help import asks_for_help, placeholder, show_help
from grpo_eqx.cli.streams import standard_output
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    CallbackError,
    RewardError,
    RunError,
    UserError,
    exit_code,
    near,
    refuse_all,
)
from grpo_eqx.common.tracebacks import frames_of_cause
from grpo_eqx.distributed.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.files import read_settings, to_yaml
from grpo_eqx.settings.hints import HINTS
from grpo_eqx.settings.recipes import RECIPES, RecipeName
from grpo_eqx.settings.types import converted, values_of
from grpo_eqx.settings.unknown_names import advice_on_call, refuse_unknown

Flags = TypeVar("Flags", bound="ConfigFlags")
Config = TypeVar("Config", bound=GRPOConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags(GRPOConfig):
    """Flags for every field of a config."""

    recipe: RecipeName | None = None
    """Start from the settings of a published recipe; a file and other flags override them."""
    config: Path | None = None
    """YAML or JSON file with settings. Other flags override them. A run's config.json is one; -
    stands for standard input."""
    print_config: bool = False
    """Print all settings as YAML; --config reads them. Then exit."""

    config_class = GRPOConfig

    def __post_init__(self) -> None:
        pass  # tyro would print a `UserError` of the config's own checks in a box

    def settings(self) -> GRPOConfig:
        """Returns the config, and converts the other flags to their types.

        Raises `UserError` for invalid values.
        """
        settings = [field.name for field in dataclasses.fields(self.config_class)]
        cfg = self.config_class(**{name: getattr(self, name) for name in settings})
        for field in dataclasses.fields(self):
            if field.name not in settings:
                value = converted(type(self), field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, value)
        return cfg

    @classmethod
    def check(cls, arguments: Sequence[str]) -> None:
        """Raises `UserError` for an unknown flag, or a flag without its value."""
        refuse_dashes(arguments)
        flags = [each[2:].partition("=")[0] for each in arguments if each.startswith("--")]
        names = [flag.replace("-", "_") for flag in flags]
        for name in ("config", "recipe"):
            if names.count(name) > 1:
                raise UserError(f"--{name} is given twice: give one.")
        values = {field.name: placeholder(cls, field.name) for field in dataclasses.fields(cls)}
        switched_off = {f"no_{name}" for name, value in values.items() if not value}
        flag_names = [name for name in names if name not in switched_off]
        placeholders = {name.replace("_", "-"): x for name, x in values.items()}

        def wanted(flag: str) -> str:
            name = flag.replace("-", "_")
            return values_of(cls, name, HINTS.get(name))

        refuse_assignments(arguments, placeholders.keys())
        refuse_all(
            lambda: refuse_unknown(flag_names, {"help", *values}),
            lambda: check_complete(arguments, placeholders, wanted),
        )

    @classmethod
    def defaults_for(cls: type[Flags], arguments: Sequence[str]) -> Flags:
        """Returns flags with defaults from the recipe and the file in the arguments.

        Raises `UserError` for an unreadable file, or invalid settings in it.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--recipe", nargs="?")
        parser.add_argument("--config", nargs="?")
        given = parser.parse_known_args(arguments)[0]
        path = None if given.config is None else Path(given.config)
        of_file = {} if path is None else read_settings(path, ["recipe"], cls.config_class)
        recipe = of_file.pop("recipe", None)
        if recipe is not None and recipe not in RECIPES:
            raise UserError(f"recipe is {recipe!r} in {path}: use one of {', '.join(RECIPES)}.")
        named = None if given.recipe == "None" else given.recipe
        recipe = converted(cls, "recipe", named) or recipe
        if recipe is None:
            return cls(**of_file, config=path)
        of_recipe = dataclasses.asdict(RECIPES[recipe]())
        return cls(**{**of_recipe, **of_file}, recipe=recipe, config=path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags(ConfigFlags):
    """Flags of a run, which can have several processes."""

    coordinator_address: str | None = None
    """Address at which the first of several processes listens for the others, host:port. None:
    detected, like the next two, from TPU VMs, GKE, Slurm or the launcher."""
    num_processes: int | None = None
    """Number of processes, one per host."""
    process_id: int | None = None
    """Index of this process, from 0."""

    def export(self) -> None:
        """Sets the environment variables in which launchers number the processes of a run."""
        given = {
            COORDINATOR: self.coordinator_address,
            NUM_PROCESSES: self.num_processes,
            PROCESS_ID: self.process_id,
        }
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})


def run(main: Callable[[Config], None]) -> None:
    """Calls `main` with the config that the command line describes, every field a flag.

    The config is a `GRPOConfig`, or a subclass of it that annotates the parameter of `main`.
    `--recipe` names a recipe and `--config` a file, whose settings become the flags' defaults. A
    `UserError` ends the process with one line and `EXIT_USER_ERROR`, and a `RunError` with one line
    and `EXIT_FAULT`.
    """
    with ends_with_a_line(), standard_output():
        config = _config_of(main)
        kind = _flags_for(config)
        if asks_for_help(sys.argv[1:]):
            about = inspect.getdoc(main) or ""
            own = [field.name for field in _own_fields(config)]
            show_help(kind, f"python {sys.argv[0]}", about, sys.argv[1:], own)
        kind.check(sys.argv[1:])
        default = kind.defaults_for(sys.argv[1:])
    with AS_SETTINGS:
        flags = tyro.cli(kind, description=main.__doc__, default=default)
    start(flags, main)


def _config_of(main: Callable[..., None]) -> type[GRPOConfig]:
    """Returns the config class in the annotation of a function's first parameter."""
    try:
        kind = get_type_hints(main)[next(iter(inspect.signature(main).parameters))]
    except (KeyError, NameError, StopIteration, TypeError, ValueError):  # no annotation
        return GRPOConfig
    return kind if inspect.isclass(kind) and issubclass(kind, GRPOConfig) else GRPOConfig


def _own_fields(config: type[GRPOConfig]) -> list[dataclasses.Field[Any]]:
    """Returns the fields that a subclass of the config adds or changes.

    Raises `UserError` for a subclass that is not a dataclass.
    """
    if inspect.get_annotations(config) and "__dataclass_params__" not in vars(config):
        raise UserError(
            f"{config.__name__} has fields, but is not a dataclass: put "
            f"@dataclasses.dataclass(frozen=True, kw_only=True) above it."
        )
    inherited = GRPOConfig.__dataclass_fields__
    return [each for each in dataclasses.fields(config) if each is not inherited.get(each.name)]


def _flags_for(config: type[GRPOConfig]) -> type[RunFlags]:
    """Returns the flags of a config; raises `UserError` for a field that cannot be a flag."""
    own, types = _own_fields(config), get_type_hints(config, include_extras=True)
    for field in own:
        name = f"{config.__name__}.{field.name}"
        if not is_of_setting(types[field.name]):
            raise UserError(
                f"{name} is of a type that no flag has: make it int, float, str, bool, Path, "
                f"Literal or a tuple of one of these, or None besides."
            )
        if field.default is dataclasses.MISSING:
            raise UserError(f"{name} has no default, which a flag needs: give it one.")
    return dataclasses.make_dataclass(
        "Flags",
        # Repeated, because the fields of `RunFlags` would hide changed defaults.
        [(each.name, types[each.name], dataclasses.field(default=each.default)) for each in own],
        bases=(RunFlags, config) if own else (RunFlags,),
        namespace={"config_class": config},
        frozen=True,
        kw_only=True,
    )


def start(flags: RunFlags, main: Callable[[Any], None]) -> None:
    """Joins the processes of a run and calls `main` with its config."""
    with ends_with_a_line(), standard_output():
        cfg = flags.settings()
        flags.export()
        if flags.print_config:
            print_clean(to_yaml(cfg), end="")
            return
        from grpo_eqx.distributed.startup import join_processes

        join_processes(cfg)
        main(cfg)


@contextmanager
def ends_with_a_line() -> Iterator[None]:
    """Ends the process with one line and an exit code for an error that a user can fix."""
    # Until the run sets a handler: Python's handler raises anywhere, also where JAX ignores errors.
    earlier = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except (UserError, RunError) as error:
        if isinstance(error, RewardError | CallbackError) and error.__cause__ is not None:
            print_clean(frames_of_cause(error.__cause__), end="", file=sys.stderr)
        print_clean(f"error: {near(str(error))}", file=sys.stderr)
        _end(exit_code(error))
    except TypeError as error:
        if (text := advice_on_call(error)) is None:
            raise
        print_clean(f"error: {text}", file=sys.stderr)
        _end(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        _end(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, earlier)


def _end(code: int) -> NoReturn:
    """Ends the process soon, also if it has joined others, for which JAX would wait."""
    if "jax" in sys.modules:
        from grpo_eqx.distributed.startup import leave_soon

        leave_soon(code)
    sys.exit(code)
