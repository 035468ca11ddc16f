"""Compilation of a run's programs: counted, announced, and possible before the first call."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax


class Compiler:
    """Compiler of jitted programs: when they are called, or before that in a thread.

    Enter it as a context in which programs are compiled ahead. A later call of the same jitted
    function with the same shapes finds the compiled program. JAX's context managers apply to one
    thread: a call inside of one, such as `default_matmul_precision`, compiles a program of its own.
    """

    def __init__(self, on_compile: Callable[[str], None] = lambda name: None) -> None:
        """**Arguments:**

        - `on_compile`: called with the name of a program before it is compiled.
        """
        self._on_compile = on_compile
        self.num_shapes: Counter[str] = Counter()
        """Number of sets of shapes that each program has been compiled for, by name."""
        self._compiling: dict[Hashable, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def jit(self, name: str, program: Callable[..., Any], **options: Any) -> Any:
        """Returns `jax.jit(program, **options)`, whose compilations are counted and announced.

        Profiles and JAX's cache show it as `jit_NAME_program`.
        """

        @functools.wraps(program)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_shapes[name] += 1
            self._on_compile(name)
            return program(*args, **kwargs)

        counted.__name__ = counted.__qualname__ = f"{name}_program"
        return jax.jit(counted, **options)

    def start(self, lowerings: Iterable[tuple[Hashable, Callable[[], jax.stages.Lowered]]]) -> None:
        """Begins to compile programs, each given by a key and its lowering.

        Skips keys that it has begun before. Where the context is not entered, Python's exit waits
        for the program that is being compiled.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile_ahead")
        for key, lower in lowerings:
            if key not in self._compiling:
                self._compiling[key] = self._pool.submit(_compile, lower)

    def ensure(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Waits for a program, or compiles it here where it was not started.

        An update writes the shardings of its results in other words than those by which programs
        are lowered from shapes: a call alone would compile the same program again after training,
        unknown to JAX's cache of them.
        """
        if key in self._compiling:
            self.wait(key)
        else:
            done = self._compiling[key] = Future()
            try:
                _compile(lower)
            except BaseException:
                del self._compiling[key]
                raise
            done.set_result(None)

    def wait(self, key: Hashable) -> None:
        """Waits for a compilation that was started, and raises the error that it ended with.

        Otherwise, two threads that compile the same program would each do all of the work.
        """
        compiling = self._compiling.get(key)
        if compiling is None:
            return
        error = compiling.exception()
        if error is not None:
            del self._compiling[key]
            raise error

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the program that is being compiled, if any, and drops those not begun."""
        if self._pool is None:
            return
        # A compiler's thread that outlived the interpreter could end the process with a signal.
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._compiling = {
            key: x
            for key, x in self._compiling.items()
            if not x.cancelled() and x.exception() is None
        }


def _compile(lower: Callable[[], jax.stages.Lowered]) -> None:
    lower().compile()
