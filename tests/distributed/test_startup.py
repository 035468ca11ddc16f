"""A process alone; several are in tests/multihost."""

import jax
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.program_facts import check_xla_flags
from grpo_eqx.distributed.startup import initialize


def test_a_process_alone_needs_nothing() -> None:
    initialize({})
    initialize({}, require_processes=1)
    assert jax.process_count() == 1


def test_fewer_processes_than_required_are_refused() -> None:
    with pytest.raises(UserError, match="1 process was started, but 4 are required"):
        initialize({}, require_processes=4)


def test_the_launcher_can_say_how_many_there_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_EQX_REQUIRE_PROCESSES", "4")
    with pytest.raises(UserError, match="but 4 are required by GRPO_EQX_REQUIRE_PROCESSES: start"):
        initialize()
    initialize(require_processes=1)
    monkeypatch.setenv("GRPO_EQX_REQUIRE_PROCESSES", "four")
    with pytest.raises(UserError, match="is 'four': it must be a number"):
        initialize()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_unknown=yes", "Unknown flag in XLA_FLAGS: --xla_unknown=yes"),
        ("--xla_force_host_platform_device_count=x", "Couldn't interpret value x for flag xla_fo"),
    ],
)
def test_flags_that_would_abort_the_process_are_refused(
    monkeypatch: pytest.MonkeyPatch, flags: str, reason: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError, match=rf"XLA refuses XLA_FLAGS \({reason}.*\): correct it, or"):
        check_xla_flags.__wrapped__()


@pytest.mark.parametrize(
    "flags", ["", "--xla_force_host_platform_device_count=2", "--xla_gpu_autotune_level=2"]
)
def test_other_flags_pass(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    check_xla_flags.__wrapped__()
