"""Explains errors that the loss of another host during the run has caused."""

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from grpo_eqx.common.errors import RunError, first_line

_OF_A_LOST_HOST = re.compile(r"Gloo \S+ failed|Connection (closed|reset) by peer")
"""Errors of a collective whose other end is gone. On TPUs and GPUs, JAX usually ends the process
instead, once the lost host has missed its heartbeats."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def explains_lost_hosts(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Wraps a function so that its errors for a lost connection to another host are `RunError`s."""

    @functools.wraps(function)
    def explained(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1 or not _OF_A_LOST_HOST.search(str(error)):
                raise
            raise RunError(
                f"another host of the run is gone ({first_line(error)}): the same command on every "
                f"host continues from the last checkpoint, if there is one."
            ) from error

    return explained
