"""What a user reads when devices run out of memory."""

import dataclasses

import jax
import pytest

from grpo_eqx import UserError
from grpo_eqx.common.errors import OutOfMemoryError
from grpo_eqx.planner import Change, Plan
from grpo_eqx.planner.out_of_memory import explains_out_of_memory


class Run:
    """Does what is to be done, and has a plan."""

    def __init__(self, error: Exception, plan: Plan | Exception):
        self.error = error
        self.planned = plan

    def plan(self) -> Plan:
        if isinstance(self.planned, Exception):
            raise self.planned
        return self.planned

    @explains_out_of_memory
    def fit(self) -> None:
        raise self.error


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nMore.")


def test_with_the_plan_and_what_to_change(plan_of, with_memory) -> None:
    plan = plan_of({"update": 2**31}, with_memory(2**30))
    change = Change({"micro_batch_size_per_device": 2}, plan_of({"update": 1}, with_memory(2**30)))
    with pytest.raises(OutOfMemoryError) as error:
        Run(FULL, dataclasses.replace(plan, change=change)).fit()
    assert str(error.value) == (
        "the devices are out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes). "
        "The plan of the run: The run does not fit the local devices: update needs 2.00 GiB per "
        "device, but only 1.00 GiB is usable. It fits with --micro-batch-size-per-device 2, at "
        "0.00 MiB per device."
    )
    assert isinstance(error.value, UserError)


def test_where_by_the_plan_it_fits_something_else_takes_memory(plan_of, with_memory) -> None:
    advice = r"Stop other processes on these devices, or lower micro_batch_size_.* \(now 2\)"
    with pytest.raises(OutOfMemoryError, match=advice):
        Run(FULL, plan_of({"update": 1}, with_memory(2**30))).fit()


def test_without_a_plan() -> None:
    with pytest.raises(OutOfMemoryError, match="lower micro_batch_size_per_device"):
        Run(FULL, UserError("no memory is known")).fit()


def test_other_errors_stay(plan_of, with_memory) -> None:
    other = jax.errors.JaxRuntimeError("INTERNAL: something")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Run(other, plan_of({"update": 1}, with_memory(1))).fit()
