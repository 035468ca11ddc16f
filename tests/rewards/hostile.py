"""What reward functions may do, in a module that worker processes can import."""
# ruff: noqa: E501

import asyncio
import atexit
import builtins
import ctypes
import faulthandler
import gc
import json
import locale
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

HERE, ASYNC, WORKERS = "here", "async", "workers"
EVERYWHERE = HERE, ASYNC, WORKERS
NOT_HERE = ASYNC, WORKERS
OK = 7.0
"""Reward of a completion for which a function only did what it should not."""


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class OwnBaseException(BaseException):
    pass


class NoTextError(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class NamelessMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=NamelessMeta):
    pass


class HidingError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class OwnTraceError(Exception):
    @property
    def __cause__(self) -> Any:
        raise RuntimeError("no cause")


class InterruptingError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class ExitingError(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class RaisingStream:
    @property
    def closed(self) -> bool:
        raise RuntimeError("no stream")

    def write(self, text: str) -> None:
        raise RuntimeError("no stream")

    flush = write


class Nine(float):
    def __repr__(self) -> str:
        return "9.0"


def raise_errors_of_the_package(name: str) -> Callable[..., Any]:
    def action(**arguments: Any) -> None:
        from grpo_eqx.common import errors

        raise getattr(errors, name)("mine")

    return action


def patch_modules(**arguments: Any) -> None:
    json.encoder.c_make_encoder = None  # type: ignore[attr-defined]
    json.encoder.float = Nine  # type: ignore[attr-defined]
    for module, name in (
        (json, "dumps"),
        (pickle, "loads"),
        (os, "write"),
        (os, "read"),
        (math, "isfinite"),
    ):
        setattr(module, name, lambda *_, **__: 9 / 0)


def guard(**arguments: Any) -> None:
    """Does what guards do that stand around the code of a model."""
    for module, names in (
        (builtins, ("exit", "quit", "ascii")),
        (os, ("kill", "system", "putenv", "remove", "replace", "getcwd", "chdir", "rename")),
        (shutil, ("rmtree", "move")),
        (subprocess, ("Popen",)),
    ):
        for name in names:
            setattr(module, name, None)


def patch_names(**arguments: Any) -> None:
    names = vars(builtins)
    mine = {name: lambda *_, **__: 9.0 for name in names if name.islower()}
    names.update(mine)


def raise_later(*_: Any) -> Any:
    raise RuntimeError("traced")


def least_recursion(**arguments: Any) -> None:
    for limit in range(10, 1000):
        try:
            sys.setrecursionlimit(limit)
        except RecursionError:
            continue
        return


def limit_memory(**arguments: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))


def limit_files(**arguments: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))


def exit_in_a_thread(**arguments: Any) -> None:
    thread = threading.Thread(target=os._exit, args=[3])
    thread.start()
    thread.join()


def remove_the_directory(**arguments: Any) -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def raises(error: BaseException) -> Callable[..., Any]:
    def action(**arguments: Any) -> Any:
        raise error

    return action


def recurse(**arguments: Any) -> Any:
    return recurse(**arguments)


def fork(child: Callable[[], Any]) -> Callable[..., Any]:
    def action(**arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if os.fork() == 0:
                child()

    return action


def sleep() -> None:
    time.sleep(3600)


def sleep_in_a_session() -> None:
    os.setsid()
    time.sleep(3600)


def fork_twice() -> None:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)


def start_24_sessions(**arguments: Any) -> None:
    for _ in range(24):
        command = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
        subprocess.Popen(
            command, start_new_session=True, env={"PATH": os.environ["PATH"]} | marks()
        )


def marks() -> dict[str, str]:
    return {x: value for x, value in os.environ.items() if x.startswith("GRPO_EQX_TEST")}


def leave_a_thread(**arguments: Any) -> None:
    threading.Thread(target=time.sleep, args=[3600], daemon=True).start()


def own_descriptors() -> list[int]:
    return [int(number) for number in os.listdir("/proc/self/fd") if int(number) >= 500]


def write_garbage(numbers: Callable[[], Any]) -> Callable[..., Any]:
    def action(**arguments: Any) -> None:
        for number in numbers():
            try:
                os.write(number, b'{"rewards": [9.0]}')
            except OSError:
                continue

    return action


def close_own(**arguments: Any) -> None:
    for number in own_descriptors():
        os.close(number)


def garbage_then_sleep(**arguments: Any) -> None:
    write_garbage(own_descriptors)()
    time.sleep(3600)


def limit_resources(**arguments: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def clear_arguments(**arguments: Any) -> None:
    for value in arguments.values():
        for each in value:
            if isinstance(each, list):
                each.clear()
        value.clear()


def ignore_and_sleep(**arguments: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


class Case(NamedTuple):
    """What a function does for a completion, and the answer."""

    group: str
    """Row of the table in the guide of rewards."""
    action: Callable[..., Any]
    answer: str | float
    """The reward, or a pattern of the reason of the failure."""
    places: tuple[str, ...] = EVERYWHERE
    answer_of_async: str | float | None = None
    said: str | None = None
    """Part of the warning where a function has changed the process of the run."""


WHERE = r"\(hostile\.py, line \d+\)"
CASES = {
    "raise": Case("raises", raises(ValueError("no unit\nmore")), rf"raised ValueError: no unit {WHERE}"),
    "raise nothing said": Case("raises", raises(KeyError()), "raised KeyError: no reason given"),
    "raise a long text": Case("raises", raises(ValueError("x" * 10**6)), r"raised ValueError: x{500}\.\.\. \(1,000,000 characters\)"),
    "raise what is not text": Case("raises", raises(NoTextError()), "raised NoTextError: no reason given, as its __str__ raised TypeError"),
    "raise the unsayable": Case("raises", raises(UnsayableError()), "raised UnsayableError: no reason given, as its __str__ raised RuntimeError"),
    "raise control characters": Case("raises", raises(ValueError("\x1b[2Jgone")), r"raised ValueError: \\x1b\[2Jgone"),
    "raise a surrogate": Case("raises", raises(ValueError("a\ud800")), r"raised ValueError: a\\ud800"),
    "raise a group": Case("raises", raises(ExceptionGroup("two", [KeyError("k"), OSError("o")])), r"raised ExceptionGroup: two \(2 sub-exceptions\), the first of them KeyError: 'k'"),
    "raise a BaseException": Case("raises", raises(OwnBaseException("mine")), "raised OwnBaseException: mine"),
    "raise GeneratorExit": Case("raises", raises(GeneratorExit()), "raised GeneratorExit"),
    "raise CancelledError": Case("raises", raises(asyncio.CancelledError()), "raised CancelledError"),
    "raise StopIteration": Case("raises", raises(StopIteration(1)), "raised (StopIteration|RuntimeError)"),
    "raise StopAsyncIteration": Case("raises", raises(StopAsyncIteration()), "raised (StopAsyncIteration|RuntimeError)"),
    "raise KeyboardInterrupt": Case("raises", raises(KeyboardInterrupt()), "raised KeyboardInterrupt", NOT_HERE),
    "raise MemoryError": Case("raises", raises(MemoryError()), "raised MemoryError: no reason given"),
    "raise TimeoutError": Case("raises", raises(TimeoutError("slow")), "raised TimeoutError: slow"),
    "raise BrokenPipeError": Case("raises", raises(BrokenPipeError("gone")), "raised BrokenPipeError: gone"),
    "raise EOFError": Case("raises", raises(EOFError("end")), "raised EOFError: end"),
    "raise the nameless": Case("raises", raises(NamelessError("mine")), "raised NamelessError: mine"),
    "raise what hides": Case("raises", raises(HidingError("mine")), "raised HidingError: mine"),
    "raise without cause": Case("raises", raises(OwnTraceError("mine")), "raised OwnTraceError: mine"),
    "raise a long surrogate": Case("raises", raises(ValueError("\ud800" * 10**6)), r"raised ValueError: (\\ud800){83}\\u\.\.\. \(1,000,000 characters\) \("),
    "raise what interrupts": Case("raises", raises(InterruptingError()), "raised InterruptingError: no reason given, as its __str__ raised KeyboardInterrupt"),
    "raise what exits": Case("raises", raises(ExitingError()), "raised ExitingError: no reason given, as its __str__ raised SystemExit"),
    "raise RewardError": Case("raises", raise_errors_of_the_package("RewardError"), "raised RewardError: mine"),
    "raise UserError": Case("raises", raise_errors_of_the_package("UserError"), "raised UserError: mine"),
    "recurse": Case("raises", recurse, "raised RecursionError: maximum recursion depth exceeded"),
    "sys.exit": Case("exits", raises(SystemExit()), "raised SystemExit"),
    "sys.exit with a number": Case("exits", lambda **_: sys.exit(3), "raised SystemExit: 3"),
    "sys.exit with a text": Case("exits", lambda **_: sys.exit("bye"), "raised SystemExit: bye"),
    "os._exit": Case("exits", lambda **_: os._exit(3), r"lost its process \(exit code 3\)", (WORKERS,)),
    "os._exit as if well": Case("exits", lambda **_: os._exit(0), r"lost its process \(exit code 0\)", (WORKERS,)),
    "kill itself": Case("exits", lambda **_: os.kill(os.getpid(), signal.SIGKILL), r"lost its process \(SIGKILL\)", (WORKERS,)),
    "terminate itself": Case("exits", lambda **_: os.kill(os.getpid(), signal.SIGTERM), r"lost its process \(SIGTERM\)", (WORKERS,)),
    "kill its group": Case("exits", lambda **_: os.killpg(0, signal.SIGKILL), r"lost its process \(SIGKILL\)", (WORKERS,)),
    "kill its parent": Case("exits", lambda **_: (os.kill(os.getppid(), signal.SIGKILL), sleep()), r"lost its process \(SIGKILL\)", (WORKERS,)),
    "terminate its parent": Case("exits", lambda **_: os.kill(os.getppid(), signal.SIGTERM), OK, (WORKERS,)),
    "segfault": Case("exits", lambda **_: ctypes.string_at(0), r"lost its process \(SIGSEGV\)", (WORKERS,)),
    "abort": Case("exits", lambda **_: os.abort(), r"lost its process \(SIGABRT\)", (WORKERS,)),
    "sleep at the exit": Case("exits", lambda **_: atexit.register(sleep) and None, OK, (WORKERS,)),
    "exit in a thread": Case("exits", exit_in_a_thread, r"lost its process \(exit code 3\)", (WORKERS,)),
    "exit later": Case("exits", lambda **_: faulthandler.dump_traceback_later(5, exit=True), OK, (WORKERS,)),
    "fork and come out": Case("forks", fork(lambda: None), OK),
    "fork and raise": Case("forks", fork(raises(ValueError())), OK),
    "fork and exit": Case("forks", fork(lambda: sys.exit(3)), OK),
    "leave a fork": Case("forks", fork(sleep), OK, (WORKERS,)),
    "leave a fork in a session": Case("forks", fork(sleep_in_a_session), OK, (WORKERS,)),
    "leave a daemon": Case("forks", fork(fork_twice), OK, (WORKERS,)),
    "leave 24 sessions": Case("forks", start_24_sessions, OK, (WORKERS,)),
    "leave a fork and crash": Case("forks", lambda **_: (fork(sleep)(), os._exit(3)), r"lost its process \(exit code 3\)", (WORKERS,)),
    "leave a process of multiprocessing": Case("forks", lambda **_: multiprocessing.get_context("fork").Process(target=sleep).start(), OK, (WORKERS,)),
    "leave a thread": Case("threads", leave_a_thread, OK),
    "leave a thread that waits": Case("threads", lambda **_: threading.Thread(target=sleep).start(), OK, (WORKERS,)),
    "close stdout": Case("streams", lambda **_: sys.stdout.close(), OK, said="the standard streams"),
    "close stderr's descriptor": Case("streams", lambda **_: os.close(2), OK, said="the standard descriptors"),
    "close stdin's descriptor": Case("streams", lambda **_: os.close(0), OK, said="the standard descriptors"),
    "replace stderr": Case("streams", lambda **_: setattr(sys, "stderr", None), OK, said="the standard streams"),
    "replace stdout by what raises": Case("streams", lambda **_: setattr(sys, "stdout", RaisingStream()), OK, said="the standard streams"),
    "close many descriptors": Case("streams", lambda **_: os.closerange(0, 100), OK, (WORKERS,)),
    "write on descriptors": Case("streams", write_garbage(lambda: range(3, 60)), OK, (WORKERS,)),
    "write on its worker's": Case("streams", write_garbage(own_descriptors), "wrote to the descriptor through which its worker replies", (WORKERS,)),
    "write on its worker's and sleep": Case("streams", garbage_then_sleep, "wrote to the descriptor through which its worker replies", (WORKERS,)),
    "close its worker's": Case("streams", close_own, "closed the descriptor through which its worker replies", (WORKERS,)),
    "close its worker's and sleep": Case("streams", lambda **_: (close_own(), sleep()), "closed the descriptor through which its worker replies", (WORKERS,)),
    "write without waiting": Case("streams", lambda **_: os.set_blocking(1, False), OK, said="the standard descriptors"),
    "print a flood": Case("floods", lambda **_: print("x" * 10**6), OK),
    "set a handler": Case("signals", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN), OK, (HERE, WORKERS), said="the handlers of signals"),
    "set a handler in a thread": Case("signals", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN), "raised ValueError: signal only works in main thread", (ASYNC,)),
    "leave an alarm": Case("signals", lambda **_: signal.alarm(1) and None, OK, said="a timer"),
    "leave timers of its time": Case("signals", lambda **_: (signal.setitimer(signal.ITIMER_PROF, 0.05), signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)), OK, (WORKERS,)),
    "leave a timer of its time": Case("signals", lambda **_: signal.setitimer(signal.ITIMER_PROF, 60) and None, OK, said="a timer"),
    "block signals": Case("signals", lambda **_: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) and None, OK, (HERE, WORKERS), said="the blocked signals"),
    "change the directory": Case("directory", lambda **_: os.chdir("/"), OK, said="the working directory"),
    "change the mode of files": Case("directory", lambda **_: os.umask(0o777) and None, OK, said="the mode of new files"),
    "remove the directory": Case("directory", remove_the_directory, OK, said="the working directory"),
    "set the environment": Case("environment", lambda **_: os.environ.update(HOME="/nowhere", JAX_PLATFORMS="none"), OK, said="the environment"),
    "clear the environment": Case("environment", lambda **_: os.environ.clear(), OK, said="the environment"),
    "change the path": Case("environment", lambda **_: sys.path.clear(), OK, said="the path of modules"),
    "draw": Case("seeds", lambda **_: random.random() and None, OK),
    "seed": Case("seeds", lambda **_: random.seed(0), OK),
    "change the locale": Case("locale", lambda **_: locale.setlocale(locale.LC_ALL, "C.UTF-8") and None, OK, said="the locale"),
    "make warnings errors": Case("settings", lambda **_: warnings.simplefilter("error", ImportWarning), OK, said="the filters of warnings"),
    "limit recursion": Case("settings", lambda **_: sys.setrecursionlimit(900), OK, said="the limit on recursion"),
    "limit resources": Case("settings", limit_resources, OK),
    "limit recursion to the least": Case("settings", least_recursion, OK, (WORKERS,)),
    "limit memory": Case("settings", limit_memory, OK, (WORKERS,)),
    "limit files": Case("settings", limit_files, OK, (WORKERS,)),
    "collect no garbage": Case("settings", lambda **_: gc.disable(), OK, said="garbage collection"),
    "limit sockets": Case("settings", lambda **_: socket.setdefaulttimeout(1e-3), OK, said="the timeout of sockets"),
    "trace": Case("settings", lambda **_: sys.settrace(lambda *_: None), OK, (HERE, WORKERS), said="what traces calls"),
    "trace and raise": Case("settings", lambda **_: sys.settrace(raise_later), OK, (WORKERS,)),
    "profile and raise": Case("settings", lambda **_: sys.setprofile(raise_later), "raised RuntimeError: traced", (WORKERS,)),
    "replace float": Case("names", lambda **_: setattr(builtins, "float", lambda _: 9.0), OK, said="names of Python's own"),
    "replace all names": Case("names", patch_names, OK, (WORKERS,)),
    "guard": Case("names", guard, OK, said="names of Python's own"),
    "delete modules": Case("names", lambda **_: sys.modules.clear(), OK, (WORKERS,)),
    "replace what modules have": Case("names", patch_modules, OK, (WORKERS,)),
    "clear the arguments": Case("mutation", clear_arguments, OK),
    "sleep": Case("hangs", lambda **_: sleep(), r"ran out of time \(reward_timeout is 3\.0 s\)", (WORKERS,)),
    "ignore SIGTERM": Case("hangs", ignore_and_sleep, r"ran out of time \(reward_timeout is 3\.0 s\)", (WORKERS,)),
    "keep the GIL": Case("hangs", lambda **_: ctypes.PyDLL(None).sleep(3600), r"ran out of time \(reward_timeout is 3\.0 s\)", (WORKERS,)),
    "stop itself": Case("hangs", lambda **_: os.kill(os.getpid(), signal.SIGSTOP), r"ran out of time \(reward_timeout is 3\.0 s\)", (WORKERS,)),
    "never end": Case("hangs", lambda **_: asyncio.Event().wait(), r"ran out of time \(reward_timeout is 3\.0 s\)", (ASYNC,)),
    "stop the loop": Case("loops", lambda **_: asyncio.get_running_loop().stop(), OK, (ASYNC,)),
    "close the loop": Case("loops", lambda **_: asyncio.get_running_loop().close(), "raised RuntimeError: Cannot close a running event loop", (ASYNC,)),
    "cancel itself": Case("loops", lambda **_: (asyncio.current_task().cancel(), asyncio.sleep(0))[1], "raised CancelledError", (ASYNC,)),  # type: ignore[union-attr]
    "leave a task": Case("loops", lambda **_: asyncio.get_running_loop().create_task(asyncio.sleep(3600)) and None, OK, (ASYNC,)),
    "exit in a task": Case("loops", lambda **_: asyncio.get_running_loop().call_soon(sys.exit, 3) and None, OK, (ASYNC,)),
}  # fmt: skip
"""Cases by what a completion says."""


def obey(*, completions: list[str], **columns: Any) -> list[float]:
    """Does what the completions say, and rewards their lengths."""
    texts = list(completions)
    return [_reward(text, {"completions": completions, **columns}) for text in texts]


def _reward(text: str, arguments: dict[str, Any]) -> Any:
    if text not in CASES:
        return 1.0 * len(text)
    CASES[text].action(**arguments)
    return OK


async def obey_async(*, completions: list[str], **columns: Any) -> list[float]:
    """Does the same, and awaits what there is to await."""
    texts, rewards = list(completions), []
    for text in texts:
        if text not in CASES:
            rewards.append(1.0 * len(text))
            continue
        done = CASES[text].action(completions=completions, **columns)
        if asyncio.iscoroutine(done):
            await done
        await asyncio.sleep(0.01)
        rewards.append(OK)
    return rewards
