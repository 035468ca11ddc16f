"""A process alone; several are in tests/multihost."""

import jax
import pytest

from grpo_eqx.distributed.startup import initialize
from grpo_eqx.errors import UserError


def test_a_process_alone_needs_nothing() -> None:
    initialize({})
    initialize({}, require_processes=1)
    assert jax.process_count() == 1


def test_fewer_processes_than_required_are_refused() -> None:
    with pytest.raises(UserError, match="1 process was started, but 4 are required"):
        initialize({}, require_processes=4)


def test_the_launcher_can_say_how_many_there_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_EQX_REQUIRE_PROCESSES", "4")
    with pytest.raises(UserError, match="1 process was started, but 4 are required"):
        initialize()
    initialize(require_processes=1)
    monkeypatch.setenv("GRPO_EQX_REQUIRE_PROCESSES", "four")
    with pytest.raises(UserError, match="is 'four': it must be a number"):
        initialize()
