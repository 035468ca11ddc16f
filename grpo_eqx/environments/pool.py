"""Environments of a run: classes, as TRL's `environment_factory` takes them, and instances."""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from grpo_eqx.common.errors import RunError, UserError, listed
from grpo_eqx.common.plain_data import brief
from grpo_eqx.common.process_state import warn
from grpo_eqx.data.prompts import SEED
from grpo_eqx.data.tokenizer import ENVIRONMENT, Tools
from grpo_eqx.environments.calls import Call, Calls, Outcome, StillRunsError
from grpo_eqx.environments.environment import Environment
from grpo_eqx.environments.left_processes import LEFT
from grpo_eqx.environments.tool_workers import InWorker, ToolWorkers
from grpo_eqx.environments.tools import Schema, Tool, check_names, make_tools, methods_as_tools
from grpo_eqx.rewards import RewardFunc
from grpo_eqx.rewards.contract import reason_of

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
        self.made: list[Any] = []
        """All instances, but for lost ones."""
        self._lock = threading.Lock()
        with LEFT.recording():
            first = self.make()
        self._free = [first]
        self.cls = type(first)
        self.takes_turns = isinstance(first, Environment)
        """Whether its `step` takes whole turns; otherwise its methods are tools."""
        self.has_reward = callable(getattr(self.cls, "get_reward", None))
        reset = getattr(self.cls, "reset", None)
        if not callable(reset):
            raise UserError(
                f"environment {self.cls.__name__} has no method reset: define one, which takes the "
                f"columns of a row, as in def reset(self, **row)."
            )
        for name in ("get_reward", "close"):
            if missing := _needed(_parameters_of(getattr(first, name, None))):
                raise UserError(
                    f"environment {self.cls.__name__}: {name} needs {missing[0]}, and is called "
                    f"without arguments: take it off, or give it a default."
                )
        if self.takes_turns and not {"text", "ids"} & {*inspect.signature(first.step).parameters}:
            raise UserError(
                f"environment {self.cls.__name__}: step has no argument text, nor ids: name it "
                f"text to get a turn as text, or ids to get its tokens."
            )
        if self.takes_turns and tools:
            raise UserError(
                f"environment {self.cls.__name__} takes whole turns by step, and tools are passed: "
                f"pass no tools, or define a class whose methods are tools, which is no subclass "
                f"of Environment."
            )
        own = [] if self.takes_turns else methods_as_tools(first, _NOT_TOOLS)
        if not (self.takes_turns or own or tools):
            raise UserError(
                f"environment {self.cls.__name__} has no public method besides "
                f"{listed([x for x in _NOT_TOOLS if hasattr(first, x)])} that the model could call "
                f"as a tool: define one, or subclass grpo_eqx.environments.Environment, whose step "
                f"takes whole turns."
            )
        check_names([*self._shared, *own])
        self._methods = {tool.name: tool.schema for tool in own}

    @property
    def schemas(self) -> list[Schema]:
        """Schemas of its tools, which prompts describe."""
        return [*(tool.schema for tool in self._shared), *self._methods.values()]

    def tools_of(self, environment: object) -> dict[str, Tool]:
        """Returns the tools of an instance: those of all, and its own public methods."""
        own = [Tool(x, getattr(environment, x), schema) for x, schema in self._methods.items()]
        return {tool.name: tool for tool in [*self._shared, *own]}

    def take(self) -> Any | None:
        """Returns an instance that no completion uses, if there is one."""
        return self._free.pop() if self._free else None

    def make(self) -> Any:
        """Makes an instance, for one completion; raises `UserError` if that fails."""
        try:
            environment = self._factory()
        except Exception as error:
            fix = "fix it"
            if not _takes_nothing(self._factory):
                fix = "pass a class, or a function, that needs no arguments"
            if missing := getattr(self._factory, "__abstractmethods__", None):
                fix = f"define {listed(sorted(missing))}"
            raise UserError(
                f"environment_factory {brief(self._factory)} {reason_of(error)}: {fix}."
            ) from error
        if environment is None or inspect.isclass(environment):
            raise UserError(
                f"environment_factory {brief(self._factory)} returned {brief(environment)}: return "
                f"an environment, or pass the class itself."
            )
        with self._lock:
            if any(each is environment for each in self.made):
                raise UserError(
                    f"environment_factory {brief(self._factory)} returned the same environment "
                    f"twice: return a new one for each completion."
                )
            self.made.append(environment)
        return environment

    def give_back(self, environment: Any) -> None:
        """Takes an instance back, to be reset and used again."""
        self._free.append(environment)

    def remove(self, *environments: Any) -> None:
        """Takes instances out: they are not used again."""
        gone = set(map(id, environments))
        self.made, self._free = (
            [x for x in own if id(x) not in gone] for own in (self.made, self._free)
        )

    def check_columns(self, columns: Collection[str], fix: str | None = None) -> None:
        """Raises `UserError` where `reset` needs an argument that rows lack.

        **Arguments:**

        - `columns`: the columns of the rows.
        - `fix`: what to do about it; by default the data are meant.
        """
        parameters = list(inspect.signature(self.cls.reset).parameters.values())[1:]  # not self
        known = ["prompt", *(name for name in columns if name != "prompt")]
        missing = [name for name in _needed(parameters) if name not in known]
        if missing:
            if fix is None:
                fix = "add the column to the data, or give the argument a default"
                if [*columns] == [SEED]:
                    fix = "pass train_data with the column, or give the argument a default"
            raise UserError(
                f"environment {self.cls.__name__}: reset needs {listed(missing)}, and gets "
                f"{listed(known)}: {fix}."
            )

    def reset_call(self, environment: Any, row: Mapping[str, Any]) -> Call:
        """Returns the call that resets an instance, with those columns that it takes."""
        parameters = inspect.signature(self.cls.reset).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        own = {name: value for name, value in row.items() if takes_all or name in names}
        return Call(environment.reset, own)


def _needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Returns the names of arguments that a function cannot be called without."""
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def _parameters_of(method: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a bound method; none of what is no method, or one in C."""
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_nothing(factory: Factory) -> bool:
    """Returns whether a class or a function can be called without arguments."""
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError):  # ValueError: in C
        return False
    return True


class Environments:
    """The tools and the environments of a run, and what calls them."""

    def __init__(
        self,
        tools: Any = None,
        factory: Any = None,
        timeout: float | None = None,
        num_workers: int = 0,
    ):
        """**Arguments:**

        - `tools`: functions that the model can call in every completion.
        - `factory`: makes environments; or several factories by name, of which each row of the data
          names one in a column `environment`.
        - `timeout`: limit of a call in seconds; by default none.
        - `num_workers`: number of processes that call plain tools; by default, threads do.

        Raises `UserError` for what cannot be a tool or an environment, and for workers without
        tools.
        """
        self.calls, self.tools = Calls(timeout, num_workers), make_tools(tools)
        plain = {x.name: x.func for x in self.tools if not inspect.iscoroutinefunction(x.func)}
        if num_workers and not plain:
            raise UserError(
                f"tool_workers is {num_workers} and no plain functions are passed as tools: it "
                f"would do nothing; leave it at 0. Methods of environments cannot run in workers."
            )
        self.workers = ToolWorkers(plain if num_workers else {}, num_workers, timeout)
        if num_workers:
            self.tools = [
                x._replace(func=InWorker(x.name, x.func, self.workers)) if x.name in plain else x
                for x in self.tools
            ]
        self.is_named = isinstance(factory, Mapping)
        factories: Mapping[str | None, Any] = factory if self.is_named else {None: factory}
        if factory is None:
            factories = {}
        elif not factories:
            raise UserError("environment_factory is an empty dict: give at least one factory.")
        for name, each in factories.items():
            if not callable(each):
                called = "environment_factory" if name is None else f"environment_factory[{name!r}]"
                fix = "pass a class, not an instance of it, as in environment_factory=MyEnvironment"
                if isinstance(each, list | tuple):
                    fix = (
                        "pass a dict of classes by name, of which each problem names one in a "
                        "column environment"
                    )
                raise UserError(f"{called} is {brief(each)}: {fix}.")
        self.kinds = {name: EnvironmentKind(each, self.tools) for name, each in factories.items()}
        self._closing: list[Future[list[Outcome]]] = []
        """Lost environments that are being closed."""
        for name, count in Counter(cls.__name__ for cls in self._rewarding).items():
            if count > 1:
                raise UserError(
                    f"{count} classes of environments have the name {name}, under which their "
                    f"rewards are logged: give each a name of its own."
                )

    def __bool__(self) -> bool:
        """Returns whether completions of the run act at all."""
        return bool(self.tools or self.kinds)

    @property
    def make_prompts(self) -> bool:
        """Whether environments can do without data, as there is a single kind."""
        return bool(self.kinds) and not self.is_named

    @property
    def schemas(self) -> Tools:
        """Schemas of the tools that prompts describe, by their `environment`; `None`: any."""
        if not self.kinds:
            return {None: [tool.schema for tool in self.tools]} if self.tools else {}
        return {name: kind.schemas for name, kind in self.kinds.items()}

    @property
    def code(self) -> dict[str, Callable[..., Any]]:
        """Functions and classes that users wrote, by their names."""
        functions = {tool.name: inspect.unwrap(tool.func) for tool in self.tools}
        return functions | {kind.cls.__name__: kind.cls for kind in self.kinds.values()}

    def described(self) -> dict[str, str]:
        """Returns the names of what was passed, by the argument of the trainer."""
        names = {
            "tools": [tool.name for tool in self.tools],
            "environment_factory": [kind.cls.__name__ for kind in self.kinds.values()],
        }
        return {argument: ", ".join(own) for argument, own in names.items() if own}

    @property
    def own_rewards(self) -> dict[str, RewardFunc]:
        """Reward functions that call `get_reward`, by the classes of environments that have it."""
        return {cls.__name__: _OwnReward(self, cls) for cls in self._rewarding}

    @property
    def game_rewards(self) -> dict[str, RewardFunc]:
        """Reward functions of the classes whose reward is the sum of those of their steps."""
        classes = {
            kind.cls.__name__
            for kind in self.kinds.values()
            if kind.takes_turns and kind.cls.get_reward is Environment.get_reward
        }
        return {name: func for name, func in self.own_rewards.items() if name in classes}

    @property
    def own_score(self) -> RewardFunc | None:
        """Function that calls `get_reward` of all environments that have it, if any has."""
        return _OwnReward(self, *self._rewarding) if self._rewarding else None

    def check_rewarded(self, reward_funcs: object) -> None:
        """Raises `UserError` where nothing rewards completions of prompts that `reset` makes."""
        if reward_funcs is None and not self._rewarding:
            (kind,) = self.kinds.values()
            raise UserError(
                f"environment {kind.cls.__name__} makes the prompts and has no get_reward: define "
                f"it, or pass reward_funcs."
            )

    @property
    def _rewarding(self) -> list[type]:
        return list(dict.fromkeys(kind.cls for kind in self.kinds.values() if kind.has_reward))

    def kind_of(self, columns: Mapping[str, Any]) -> EnvironmentKind | None:
        """Returns the kind of environment of a row, if there are any."""
        return self.kinds.get(columns[ENVIRONMENT] if self.is_named else None)

    def check_columns(self, columns: Collection[str], fix: str | None = None) -> None:
        """Raises `UserError` for an environment that cannot be reset with a problem's columns."""
        columns = [x for x in columns if not (self.is_named and x == ENVIRONMENT)]
        for kind in self.kinds.values():
            kind.check_columns(columns, fix)

    def take(self, kinds: Sequence[EnvironmentKind]) -> list[Outcome]:
        """Returns an environment for each completion, or why none could be made.

        **Arguments:**

        - `kinds`: the kind of each.
        """
        free = [kind.take() for kind in kinds]
        missing = [i for i, environment in enumerate(free) if environment is None]
        made = self.calls.result(self.calls.together([Call(kinds[i].make, {}) for i in missing]))
        outcomes = [Outcome(environment) for environment in free]
        for i, outcome in zip(missing, made, strict=True):
            outcomes[i] = outcome
        return outcomes

    def give_back(self, environment: Any) -> None:
        """Takes an instance back, to be used again, unless it is lost."""
        if (kind := self._kind_that_made(environment)) is not None:
            kind.give_back(environment)

    def lose(self, environment: Any) -> None:
        """Takes an instance out that has failed, and begins to close it."""
        if (kind := self._kind_that_made(environment)) is not None:
            kind.remove(environment)
            self._closing += self.calls.close_all([environment])

    def close(self) -> None:
        """Calls `close` of every instance that has it, and ends the event loop."""
        everything = [each for kind in self.kinds.values() for each in kind.made]
        for kind in self.kinds.values():
            kind.remove(*kind.made)
        closing = [*self._closing, *self.calls.close_all(everything)]
        self._closing = []
        try:
            for each in closing:
                self.calls.result(each)
        except RunError as error:  # the run may be about to say so
            warn(f"environments were not closed: {error}")
        self.calls.close()
        self.workers.close()

    def _kind_that_made(self, environment: Any) -> EnvironmentKind | None:
        kinds = self.kinds.values()
        return next((x for x in kinds if any(own is environment for own in x.made)), None)


class _OwnReward:
    """Reward function of classes of environments: what their `get_reward` returns."""

    def __init__(self, environments: Environments, *classes: type):
        self._environments, self._classes = environments, classes
        self.__name__ = "_".join(cls.__name__ for cls in classes)

    async def __call__(self, environments: Sequence[Any], **columns: Any) -> list[Any]:
        """Returns the rewards of environments of exactly these classes, and `None` for others.

        What `get_reward` raises is returned in place of its reward. An environment in which it runs
        out of time is lost.
        """
        own = [i for i, each in enumerate(environments) if type(each) in self._classes]
        calls = [Call(environments[i].get_reward, {}) for i in own]
        rewards: list[Any] = [None] * len(environments)
        for i, outcome in zip(own, await self._environments.calls.awaited(calls), strict=True):
            rewards[i] = outcome.result if outcome.error is None else outcome.error
            if isinstance(outcome.error, StillRunsError):
                rewards[i] = TimeoutError(f"it {outcome.error} (tool_timeout)")
                self._environments.lose(environments[i])
        return rewards
