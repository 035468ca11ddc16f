"""Programs are compiled in a thread before they are called, or where they are called first."""

import threading

import jax
import jax.numpy as jnp
import pytest

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.training.compilation import CompilationCounter

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_a_call_finds_the_program() -> None:
    double, x = jax.jit(lambda x: 2 * x), jnp.arange(3, dtype=jnp.float32)
    with Compiler() as ahead:
        ahead.start([("double", lambda: double.lower(SHAPE))])
        ahead.wait("double")
        counter = CompilationCounter()
        assert double(x).tolist() == [0, 2, 4]
    assert counter.metrics()["compile/num_programs"] == 0


def test_programs_are_compiled_in_order() -> None:
    order: list[str] = []

    def program(name: str) -> jax.stages.Lowered:
        order.append(name)
        return jax.jit(lambda x: x + len(name)).lower(SHAPE)

    with Compiler() as ahead:
        ahead.start([("a", lambda: program("a")), ("bb", lambda: program("bb"))])
        ahead.wait("bb")
        ahead.wait("a")
    assert order == ["a", "bb"]


def test_what_was_begun_before_is_not_begun_again() -> None:
    lowered: list[str] = []

    def program(name: str) -> jax.stages.Lowered:
        lowered.append(name)
        return jax.jit(lambda x: x * len(name)).lower(SHAPE)

    ahead = Compiler()
    ahead.start([("a", lambda: program("a"))])
    with ahead:
        ahead.start([("a", lambda: program("a")), ("bb", lambda: program("bb"))])
        ahead.wait("a")
        ahead.wait("bb")
    with ahead:
        ahead.start([("a", lambda: program("a")), ("bb", lambda: program("bb"))])
    assert lowered == ["a", "bb"]


def test_a_failure_is_raised_where_the_program_is_needed() -> None:
    def fails() -> jax.stages.Lowered:
        raise RuntimeError("out of memory")

    with Compiler() as ahead:
        ahead.start([("update", fails)])
        with pytest.raises(RuntimeError, match="out of memory"):
            ahead.wait("update")
        ahead.wait("update")  # the call that follows fails by itself, or does not


def test_what_failed_is_tried_again() -> None:
    tried: list[str] = []

    def fails() -> jax.stages.Lowered:
        tried.append("update")
        raise RuntimeError("out of memory")

    ahead = Compiler()
    for _ in range(2):
        with ahead:
            ahead.start([("update", fails)])
    assert len(tried) == 2
    ahead.wait("update")


def test_leaving_drops_what_has_not_begun() -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def first() -> jax.stages.Lowered:
        begun.set()
        assert go_on.wait(timeout=60)
        order.append("first")
        return jax.jit(lambda x: x - 1).lower(SHAPE)

    def second() -> jax.stages.Lowered:
        order.append("second")
        return jax.jit(lambda x: x - 2).lower(SHAPE)

    with Compiler() as ahead:
        ahead.start([("first", first), ("second", second)])
        begun.wait()
        ahead._compiling["second"].add_done_callback(lambda _: go_on.set())
    assert order == ["first"]
    ahead.wait("second")


def test_a_program_that_was_not_begun_is_compiled_where_it_is_needed() -> None:
    named: list[str] = []
    compiler = Compiler(named.append)
    triple = compiler.jit("triple", lambda x: 3 * x)
    for _ in range(2):
        compiler.ensure("triple", lambda: triple.lower(SHAPE))
    assert triple(jnp.ones(3)).tolist() == [3, 3, 3]
    assert named == ["triple"]
    assert compiler.num_shapes == {"triple": 1}


def test_what_failed_where_it_was_needed_is_tried_again() -> None:
    compiler, tries = Compiler(), list[int]()

    def fails() -> jax.stages.Lowered:
        tries.append(1)
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            compiler.ensure("large", fails)
    assert len(tries) == 2
