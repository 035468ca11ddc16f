"""Errors on a broken connection say that another host is gone."""

import jax
import pytest

from grpo_eqx.common.errors import RunError
from grpo_eqx.distributed.lost_hosts import explains_lost_hosts

BROKEN = "INTERNAL: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [10.0.0.2]:29"


def fails(message: str) -> None:
    raise jax.errors.JaxRuntimeError(message)


def test_a_broken_connection_is_that_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RunError, match=r"another host of the run is gone \(INTERNAL: Gloo"):
        explains_lost_hosts(fails)(BROKEN)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        explains_lost_hosts(fails)("RESOURCE_EXHAUSTED: out of memory")


def test_there_is_no_other_host_of_one() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        explains_lost_hosts(fails)(BROKEN)
