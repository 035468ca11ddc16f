"""Explains an out-of-memory error by the plan's numbers and the setting to change."""

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import OutOfMemoryError, first_line
from grpo_eqx.planner.plan import Plan


@runtime_checkable
class Planned(Protocol):
    """Object that can plan itself for the devices it runs on."""

    def plan(self) -> Plan:
        """Returns the plan."""


Self = TypeVar("Self", bound=Planned)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def explains_out_of_memory(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Wraps a method so that its out-of-memory errors become `OutOfMemoryError`."""

    def explained(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(_explanation(error, self.plan)) from error

    functools.update_wrapper(explained, method)
    return explained


def _explanation(error: Exception, make_plan: Callable[[], Plan]) -> str:
    said = first_line(error).rstrip(".")
    print_clean(f"out of memory ({said}): planning the run to find what fits", file=sys.stderr)
    try:
        plan = make_plan()
    except Exception:  # a failure here must not hide the first one
        return f"the devices are out of memory ({said}): lower micro_batch_size_per_device."
    if not plan.fits:
        return f"the devices are out of memory ({said}). The plan of the run: {plan.verdict}"
    return (
        f"the devices are out of memory ({said}), although the run should fit if no other process "
        f"uses their memory. The plan: {plan.verdict} Stop other processes on these devices, or "
        f"lower micro_batch_size_per_device (now {plan.micro_batch_size}) or max_num_seqs."
    )
