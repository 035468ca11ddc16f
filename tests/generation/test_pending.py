"""Completions that are sampled in a thread."""

import threading

import pytest

from grpo_eqx.generation.pending import Ahead
from grpo_eqx.generation.sampler import PendingSamples, Sampled


class Slow(PendingSamples):
    """Completions that end when they are told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.error = error
        self.calls = 0

    def result(self) -> Sampled:
        assert self.may_end.wait(60)
        self.calls += 1
        if self.error is not None:
            raise self.error
        return Sampled([])


def test_the_caller_goes_on_meanwhile() -> None:
    slow = Slow()
    ahead = Ahead(slow)
    slow.may_end.set()
    assert ahead.result() == ahead.result() == Sampled([])
    assert slow.calls == 1


def test_an_error_is_raised_where_the_result_is_taken() -> None:
    slow = Slow(ValueError("no slots"))
    ahead = Ahead(slow)
    slow.may_end.set()
    ahead.wait()
    with pytest.raises(ValueError, match="no slots"):
        ahead.result()
