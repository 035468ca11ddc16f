"""Compilation of programs in a thread, before they are called."""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import jax


class CompileAhead:
    """Compiles programs one after the other, in a thread, until its context is left.

    A later call of the same jitted function with the same shapes finds the compiled program. JAX's
    context managers apply to one thread: a call inside of one, such as `default_matmul_precision`,
    compiles a program of its own.
    """

    def __init__(self) -> None:
        self._compiling: dict[Hashable, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

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

    def wait(self, key: Hashable) -> None:
        """Waits for a program, if it is one of these; raises what its compiler raised.

        Two threads that compile the same program would each do all of the work.
        """
        compiling = self._compiling.get(key)
        if compiling is None:
            return
        error = compiling.exception()
        if error is not None:
            del self._compiling[key]
            raise error

    def __enter__(self) -> "CompileAhead":
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
