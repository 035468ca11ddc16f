"""A process alone; several are in tests/multihost."""

import jax
import pytest

from grpo_eqx.errors import UserError
from grpo_eqx.sharding.distributed import initialize


def test_a_process_alone_needs_nothing() -> None:
    initialize({})
    initialize({}, require_processes=1)
    assert jax.process_count() == 1


def test_fewer_processes_than_required_are_refused() -> None:
    with pytest.raises(UserError, match="1 process is started, and 4 are required"):
        initialize({}, require_processes=4)
