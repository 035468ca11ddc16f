"""Limits on reward functions: their time, their processes, and the policy for failures."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from grpo_eqx.common.errors import UserError

_BUILT_IN = __name__.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class RewardLimits:
    """Limits on reward functions, from the settings `reward_*` and `max_failed_rewards`.

    Built-in functions, which take time linear in the text, have no limits.
    """

    timeout: float | None = None
    """Seconds for one completion."""
    batch_timeout: float | None = None
    """Seconds for all completions of a call."""
    workers: int = 0
    """Processes that call plain functions; 0: this process calls them."""
    failures: Literal["stop", "drop"] = "stop"
    max_failed: float = 0.1
    """With `drop`: share of completions that a function may fail on."""

    @property
    def shortest(self) -> float | None:
        """Seconds within which a call for all completions at once must end."""
        return min((x for x in (self.timeout, self.batch_timeout) if x is not None), default=None)

    def check_enforceable(self, funcs: Mapping[str, Callable[..., Any]]) -> None:
        """Raises `UserError` for timeouts of plain functions here, which nothing can stop."""
        plain = [name for name, func in funcs.items() if is_plain(func)]
        if self.shortest is None or self.workers or not plain:
            return
        name = "reward_timeout" if self.timeout is not None else "reward_batch_timeout"
        raise UserError(
            f"{name} is {self.shortest:g} and {plain[0]} is a plain function, which nothing can "
            f"stop in this process: set reward_workers, or write it as async def."
        )

    def check_used(self, funcs: Mapping[str, Callable[..., Any]]) -> None:
        """Raises `UserError` for limits that apply to none of the functions."""
        if self.workers and not any(is_plain(func) for func in funcs.values()):
            raise UserError(
                f"reward_workers is {self.workers} and there is no plain function of your own to "
                f"run in them: it would do nothing; leave it at 0."
            )
        for name, seconds in (
            ("reward_timeout", self.timeout),
            ("reward_batch_timeout", self.batch_timeout),
        ):
            if seconds is not None and all(map(is_built_in, funcs.values())):
                raise UserError(
                    f"{name} is {seconds:g} and all reward functions are built in, which need no "
                    f"timeout: it would do nothing; leave it unset (None)."
                )


def is_async(func: Callable[..., Any]) -> bool:
    """Returns whether calls of a function must be awaited."""
    call = getattr(type(func), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(call)


def is_built_in(func: Callable[..., Any]) -> bool:
    """Returns whether a function belongs to this package."""
    return (getattr(func, "__module__", None) or "").startswith(_BUILT_IN + ".")


def is_plain(func: Callable[..., Any]) -> bool:
    """Returns whether a function is a user's own and not `async`."""
    return not is_built_in(func) and not is_async(func)
