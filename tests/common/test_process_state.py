"""What code of the user's own changes in this process is put back, and said once."""

import bdb
import builtins
import gc
import locale
import os
import resource
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.common.process_state import _DRAWS, _KINDS, StateGuard, _read


def lower_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))


CHANGES: dict[str, Callable[[], Any]] = {
    "names of Python's own": lambda: (
        setattr(builtins, "round", None),
        setattr(os, "getpid", None),
    ),
    "the standard descriptors": lambda: os.close(1),
    "what traces calls": lambda: sys.settrace(lambda *_: None),
    "a timer": lambda: signal.setitimer(signal.ITIMER_REAL, 1000.0),
    "the handlers of signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "the descriptor of signals": lambda: signal.set_wakeup_fd(os.pipe2(os.O_NONBLOCK)[1]),
    "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
    "the standard streams": lambda: setattr(sys, "stdout", None),
    "the working directory": lambda: os.chdir("/"),
    "the mode of new files": lambda: os.umask(0o777),
    "limits on resources": lower_limit,
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "the limit on recursion": lambda: sys.setrecursionlimit(777),
    "garbage collection": gc.disable,
    "the timeout of sockets": lambda: socket.setdefaulttimeout(3.0),
    "the filters of warnings": lambda: warnings.simplefilter("error", ImportWarning),
    "NumPy's answer to overflows": lambda: np.seterr(all="raise"),
    "settings of JAX": lambda: jax.config.update("jax_default_matmul_precision", "bfloat16"),
    "the global random numbers": lambda: np.random.seed(0),
    "the environment": lambda: (os.environ.pop("PATH", None), os.environ.update(HOME="/nowhere")),
    "the path of modules": sys.path.reverse,
}
"""Changes of each kind, in the order in which they are said."""


def states() -> dict[str, Any]:
    """Reads all kinds, but for random numbers, which the checks of types in tests draw too."""
    return {name: _read(name) for name in _KINDS if name != _DRAWS}


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, whose state it may leave as it likes."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_changed_is_put_back_and_said_once(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    state, before = StateGuard(), states()
    for _ in range(2):
        with state.around("reward function f"):
            CHANGES[kind]()
            os.chdir("/")
        assert states() == before
    said = capfd.readouterr().err
    kinds = {kind, "the working directory"} - {_DRAWS}  # there to be drawn
    names = " and ".join(sorted(kinds, key=list(CHANGES).index))
    assert said == f"warning: reward function f changed {names}: the run undid that\n"


def test_there_is_a_test_for_every_kind() -> None:
    assert set(CHANGES) == {*_KINDS, "names of Python's own", "the standard descriptors"}


def test_all_of_pythons_own_names_may_be_replaced() -> None:
    program = (
        "import builtins, os\n"
        "from grpo_eqx.common.process_state import StateGuard\n"
        "with StateGuard().around('f'):\n"
        "    os.chdir('/')\n"
        "    names = vars(builtins)\n"
        "    for name in [x for x in names if x.islower()]:\n"
        "        names.pop(name) if name < 'h' else names.update({name: None})\n"
        "print(len('still'), os.getcwd(), flush=True)\n"
    )
    ran = run_alone(program)
    assert ran.stdout == f"5 {Path.cwd()}\n"
    changed = "names of Python's own and the working directory"
    assert ran.stderr == f"warning: f changed {changed}: the run undid that\n"


def test_it_is_put_back_after_an_exception_too(capfd: pytest.CaptureFixture[str]) -> None:
    before = Path.cwd()

    def leave() -> None:
        os.chdir("/")
        sys.exit(3)

    with pytest.raises(SystemExit), StateGuard().around("f"):
        leave()
    assert Path.cwd() == before


def test_a_folder_that_is_removed_cannot_be_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with StateGuard().around("f"):
        os.chdir("/")
        folder.rmdir()
    os.chdir(tmp_path)
    said = capfd.readouterr().err
    assert said == "warning: f changed the working directory: the run could not undo that\n"


def test_streams_that_are_closed_are_opened_again() -> None:
    program = (
        "import os, sys\n"
        "from grpo_eqx.common.process_state import StateGuard\n"
        "with StateGuard().around('f'):\n"
        "    sys.stdout.close(); sys.stderr.close(); os.close(2); os.close(1)\n"
        "print('still here')\n"
        "with StateGuard().around('f'):\n"
        "    child = os.fork()\n"
        "print('once', os.waitpid(child, 0)[1], flush=True)\n"
    )
    ran = run_alone(program)
    assert ran.stdout == "still here\nonce 0\n"
    assert ran.stderr == (
        "warning: f changed the standard descriptors and the standard streams: the run undid that\n"
    )


def test_what_is_added_to_the_environment_and_the_path_stays_for_all(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "1")
    monkeypatch.setenv("ADDED", "")
    monkeypatch.delenv("ADDED")
    monkeypatch.setattr(sys, "path", path := list(sys.path))
    state, before = StateGuard(), list(path)
    with state.around("imports a library"):
        os.environ["ADDED"] = "1"
        sys.path.insert(0, "first")
        sys.path.append("last")
    monkeypatch.setenv("OF_THE_RUN", "2")
    with state.around("uses it"):
        assert os.environ["ADDED"] == "1"
        assert os.environ["OF_THE_RUN"] == "2"
        assert sys.path == ["first", *before, "last"]
    assert capfd.readouterr().err == ""


def test_what_is_changed_in_them_is_put_back_beside_what_is_added(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("CHANGED", "DELETED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ADDED", "")
    monkeypatch.delenv("ADDED")
    monkeypatch.setattr(sys, "path", path := list(sys.path))
    before = list(path)
    with StateGuard().around("f"):
        os.environ.update(CHANGED="2", ADDED="2")
        del os.environ["DELETED"]
        sys.path[:2] = ["added"]
    assert [os.environ[x] for x in ("CHANGED", "DELETED", "ADDED")] == ["1", "1", "2"]
    assert sys.path == [*before, "added"]
    named = "the environment and the path of modules"
    assert capfd.readouterr().err == f"warning: f changed {named}: the run undid that\n"


def test_an_option_that_a_library_adds_to_jax_is_no_change(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {**jax.config.values, "of_a_library": 1}
    with StateGuard().around("f"):
        monkeypatch.setattr(type(jax.config), "values", values)
    assert capfd.readouterr().err == ""


def test_a_stream_that_is_deleted_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with StateGuard().around("f"):
        del sys.stdout
    assert sys.stdout is before
    said = capfd.readouterr().err
    assert said == "warning: f changed the standard streams: the run undid that\n"


class Debugger(bdb.Bdb):
    def trace_dispatch(self, *_: Any) -> None:
        """Traces as those do that have their own way."""


def trace_of_an_ide(*_: Any) -> None: ...


trace_of_an_ide.__module__ = "_pydevd_bundle.pydevd_trace_dispatch"


@pytest.mark.parametrize("trace", [Debugger().trace_dispatch, trace_of_an_ide])
def test_a_debugger_goes_on(trace: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.gettrace()
    try:
        with StateGuard().around("f"):
            sys.settrace(trace)
        assert sys.gettrace() == trace
        with StateGuard().around("f"):
            pass
        assert sys.gettrace() == trace
    finally:
        sys.settrace(before)
    assert capfd.readouterr().err == ""


def test_a_breakpoint_can_be_left_by_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from grpo_eqx.common.process_state import StateGuard\n"
        "def f():\n"
        "    breakpoint()\n"
        "    return 1\n"
        "with StateGuard().around('f'):\n"
        "    f()\n"
        "after = 'here'\n"
        "end = 0\n"
    )
    steps = "next\n" * 20 + "quit\n"
    command = [sys.executable, "-W", "ignore", str(script)]
    ran = subprocess.run(command, input=steps, capture_output=True, text=True)
    assert "-> after = 'here'" in ran.stdout
    assert "warning" not in ran.stderr


def test_an_inner_block_leaves_what_others_change_for_a_while_to_the_outer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "1")
    state, before = StateGuard(), subprocess.Popen
    with state.around("a or b"):
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.setenv("OF_THE_RUN", "2")
        gc.disable()
        with state.around("b"):
            subprocess.Popen = before  # type: ignore[misc]
            os.environ["OF_THE_RUN"] = "1"
            gc.enable()
            os.chdir("/")
        assert subprocess.Popen is before
        assert os.environ["OF_THE_RUN"] == "1"
        assert gc.isenabled()
    with state.around("b"):
        gc.disable()
    assert gc.isenabled()
    said = capfd.readouterr().err.splitlines()
    assert said == [
        f"warning: b changed {what}: the run undid that"
        for what in ("the working directory", "garbage collection")
    ]


def test_around_calls_in_other_processes_the_settings_of_this_one_are_the_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "1")
    drawn = np.random.get_state()
    with StateGuard().around("f", elsewhere=True):
        os.environ["OF_THE_RUN"] = "2"
        np.random.random()
        os.set_blocking(1, False)
    assert os.environ["OF_THE_RUN"] == "2"
    assert np.random.get_state()[2] != drawn[2]
    assert os.get_blocking(1)
    said = capfd.readouterr().err
    assert said == "warning: f changed the standard descriptors: the run undid that\n"


def test_names_of_modules_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = states()
    with StateGuard().around("f"):
        os.chdir("/")
        for module in (signal, locale, resource, socket):
            for name in ("getsignal", "signal", "setlocale", "getrlimit", "getdefaulttimeout"):
                monkeypatch.setattr(module, name, None, raising=False)
    monkeypatch.undo()
    assert states() == before


def test_each_caller_has_random_numbers_of_its_own() -> None:
    state, seen = StateGuard(), dict[str, list[float]](seeds=[], draws=[])
    alone = np.random.RandomState()
    alone.set_state(np.random.get_state())
    for _ in range(3):
        with state.around("seeds"):
            np.random.seed(0)
            seen["seeds"].append(np.random.random())
        with state.around("draws"):
            seen["draws"].append(np.random.random())
    assert len(set(seen["seeds"])) == 1
    assert seen["draws"] == [alone.random() for _ in range(3)]
