"""Environments: their classes, as TRL's `environment_factory` takes them, and their instances."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import UserError, class_name, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.environments.calls import Call, Calls
from grpo_eqx.environments.tools import Tool, check_names, methods_as_tools

COLUMN = "environment"
"""Column of the data that names a row's environment, where there are several."""
_NOT_TOOLS = "reset", "get_reward", "close"

Factory = Callable[[], Any]


class EnvironmentKind:
    """A class of environments, and those of its instances that no completion uses."""

    def __init__(self, factory: Factory, tools: Sequence[Tool] = ()):
        """Makes a first instance, to read what it offers.

        **Arguments:**

        - `factory`: makes an instance, without arguments.
        - `tools`: tools that every environment has besides its own methods.

        Raises `UserError` for what cannot be an environment.
        """
        self._factory, self._shared = factory, list(tools)
        first = self._made()
        self._free = [first]
        self.cls = type(first)
        self.has_reward = callable(getattr(self.cls, "get_reward", None))
        reset = getattr(self.cls, "reset", None)
        if not callable(reset):
            raise UserError(
                f"environment {self.cls.__name__} has no method reset: define one, which takes the "
                f"columns of a row, as in def reset(self, **row)."
            )
        check_names(self.tools_of(first))

    def tools_of(self, environment: object) -> list[Tool]:
        """Returns the tools of an instance: those of all, and its own public methods."""
        return [*self._shared, *methods_as_tools(environment, _NOT_TOOLS)]

    def take(self) -> Any:
        """Returns an instance that no completion uses."""
        return self._free.pop() if self._free else self._made()

    def give_back(self, environment: Any) -> None:
        """Takes an instance back, to be reset and used again."""
        self._free.append(environment)

    def taken_back(self) -> list[Any]:
        """Takes the free instances out, to be closed."""
        free, self._free = self._free, []
        return free

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises `UserError` where `reset` needs an argument that rows of the data lack."""
        parameters = inspect.signature(self.cls.reset).parameters
        known = {*columns, "prompt"}
        missing = [
            name
            for name, parameter in list(parameters.items())[1:]
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in known
        ]
        if missing:
            raise UserError(
                f"environment {self.cls.__name__}: reset needs {listed(missing)}, and the data has "
                f"the columns {listed(sorted(known))}: add the column, or give the argument a "
                f"default."
            )

    def reset_call(self, environment: Any, row: Mapping[str, Any]) -> Call:
        """Returns the call that resets an instance, with those columns that it takes."""
        parameters = inspect.signature(self.cls.reset).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        own = {name: value for name, value in row.items() if takes_all or name in names}
        return Call(environment.reset, own)

    def _made(self) -> Any:
        try:
            environment = self._factory()
        except Exception as error:
            raise UserError(
                f"environment_factory {brief(self._factory)} raised {class_name(error)}: {error}: "
                f"pass a class, or a function, that needs no arguments."
            ) from error
        if environment is None or inspect.isclass(environment):
            raise UserError(
                f"environment_factory {brief(self._factory)} returned {brief(environment)}: return "
                f"an environment."
            )
        return environment


class Environments:
    """The environments of a run."""

    def __init__(self, factory: Any, tools: Sequence[Tool], calls: Calls):
        """**Arguments:**

        - `factory`: makes environments; or several factories by name, of which each row of the data
          names one in a column `environment`.
        - `tools`: tools that all environments have.
        - `calls`: calls their methods.

        Raises `UserError` for what cannot be an environment.
        """
        self._calls = calls
        self.is_named = isinstance(factory, Mapping)
        factories: Mapping[str | None, Any] = factory if self.is_named else {None: factory}
        for name, each in factories.items():
            if not callable(each):
                called = "environment_factory" if name is None else f"environment_factory[{name!r}]"
                raise UserError(
                    f"{called} is {brief(each)}: pass a class, not an instance of it, as in "
                    f"environment_factory=MyEnvironment."
                )
        if not factories:
            raise UserError("environment_factory is an empty dict: give at least one factory.")
        self.kinds = {name: EnvironmentKind(each, tools) for name, each in factories.items()}
        self._taken: list[tuple[EnvironmentKind, Any]] = []

    def kind_of(self, row: Mapping[str, Any]) -> EnvironmentKind:
        """Returns the kind of environment of a row; raises `UserError` for an unknown one."""
        name = row.get(COLUMN) if self.is_named else None
        if name not in self.kinds:
            known = listed([str(known) for known in self.kinds], "or")
            raise UserError(
                f"the column {COLUMN} of a row is {brief(name)}: use {known}, the names in "
                f"environment_factory."
            )
        return self.kinds[name]

    def take(self, kind: EnvironmentKind) -> Any:
        """Returns an instance for one completion, until `give_all_back`."""
        environment = kind.take()
        self._taken.append((kind, environment))
        return environment

    def give_all_back(self, lost: Iterable[int] = ()) -> None:
        """Takes all instances back, but for those in which a call may still run.

        **Arguments:**

        - `lost`: `id` of each instance to leave behind.
        """
        left = set(lost)
        for kind, environment in self._taken:
            if id(environment) not in left:
                kind.give_back(environment)
        self._taken = []

    def close(self) -> None:
        """Calls `close` of every instance that has it, and waits for it."""
        self.give_all_back()
        closing = [
            Call(environment.close, {})
            for kind in self.kinds.values()
            for environment in kind.taken_back()
            if callable(getattr(environment, "close", None))
        ]
        with contextlib.suppress(KeyboardInterrupt):
            for outcome in self._calls.together(closing).result() if closing else ():
                if outcome.error is not None:
                    warn(f"close of an environment raised {class_name(outcome.error)}")
