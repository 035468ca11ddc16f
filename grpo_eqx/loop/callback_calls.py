"""Calls of a run's callbacks, with one answer for all processes."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from grpo_eqx.common.errors import CallbackError, UserError, first_line
from grpo_eqx.common.logged_metrics import check_unused, metric_value
from grpo_eqx.common.process_state import StateGuard
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.loop.callbacks import Callback, Event, Response
from grpo_eqx.run.passed import check_method
from grpo_eqx.settings.unknown_names import names_of_others

EventName = Literal["on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
_LOGGING = "on_step_end", "on_evaluate"


class Heard(NamedTuple):
    """Responses of all callbacks to an event, as one."""

    metrics: Mapping[str, float]
    stop: str | None
    """Name of the first callback that ends the run, with its reason."""


class CallbackCalls:
    """Callbacks of a run, to be called in all of its processes."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = callbacks
        self._state = StateGuard()

    def wants(self, name: EventName) -> bool:
        """Returns whether a callback does something at an event."""
        own = inspect.getattr_static(Callback, name)
        return any(inspect.getattr_static(type(each), name) is not own for each in self.callbacks)

    def __call__(self, name: EventName, event: Event) -> Heard:
        """Tells all callbacks, in their order; returns what process 0 has heard.

        Raises `CallbackError` in all processes, with the callback's name, where one raises, and a
        `UserError` for a response that cannot be.
        """
        if not self.callbacks:
            return Heard({}, None)
        heard = raise_on_all_hosts(lambda: self._told(name, event))
        metrics, stop = from_main((dict(heard.metrics), heard.stop))
        return Heard(metrics, stop)

    def _told(self, name: EventName, event: Event) -> Heard:
        logged, stop = dict[str, float](), None
        for callback in self.callbacks:
            now = dataclasses.replace(event, metrics={**event.metrics, **logged})
            response = _response(callback, name, now, self._state)
            if response is None:
                continue
            called = _name(callback)
            if response.metrics and name not in _LOGGING:
                raise UserError(
                    f"callback {called}: {name} returned metrics, and there is no step to record "
                    f"them with: return them from {' or '.join(_LOGGING)}."
                )
            for metric, value in response.metrics.items():
                who, of_step = f"callback {called}", name == "on_step_end"
                logged[metric] = metric_value(who, metric, value)
                check_unused(who, metric, now.metrics, of_step=of_step)
            if response.stop is not None and stop is None:
                stop = f"{called}: {response.stop}"
        return Heard(logged, stop)


def check_callbacks(callbacks: Any) -> None:
    """Raises `UserError` for callbacks that no run could use.

    Methods for events that do not exist are refused too, as no run would call them.
    """
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
        nearest = names_of_others("events of callbacks").get(name, near[0] if near else None)
        if nearest is not None:
            raise UserError(
                f"callback {kind.__name__} has a method {name}, which no run calls: use "
                f"{nearest}, the nearest of the events {', '.join(EVENTS)}."
            )


def _response(
    callback: Callback, name: EventName, event: Event, state: StateGuard
) -> Response | None:
    called, method = _name(callback), getattr(callback, name)
    try:
        with state.around(f"callback {called}"):
            response = method(event)
    except UserError as error:
        raise UserError(f"callback {called}: {error}") from error
    except Exception as error:
        raise CallbackError(
            f"callback {called} raised {type(error).__name__} in {name} after step {event.step}: "
            f"{first_line(error)}; correct it, and the same command continues from the last "
            f"checkpoint, if there is one."
        ) from error
    if response is not None and not isinstance(response, Response):
        raise UserError(
            f"callback {called}: {name} returned a {type(response).__name__}: return a "
            f"grpo_eqx.Response, or nothing."
        )
    return response


def _name(callback: Callback) -> str:
    return type(callback).__name__
