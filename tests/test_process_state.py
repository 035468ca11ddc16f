"""What code of the user's own changes in this process is put back, and said once."""

import locale
import os
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.process_state import _KINDS, KeptState, _read


def lower_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))


CHANGES: dict[str, Callable[[], Any]] = {
    "a timer": lambda: signal.setitimer(signal.ITIMER_REAL, 1000.0),
    "the handlers of signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "the descriptor of signals": lambda: signal.set_wakeup_fd(os.pipe2(os.O_NONBLOCK)[1]),
    "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
    "the standard streams": lambda: setattr(sys, "stdout", None),
    "the standard descriptors": lambda: os.close(1),
    "the working directory": lambda: os.chdir("/"),
    "the mode of new files": lambda: os.umask(0o777),
    "limits on resources": lower_limit,
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "the limit on recursion": lambda: sys.setrecursionlimit(777),
    "the filters of warnings": lambda: warnings.simplefilter("error", ImportWarning),
    "NumPy's answer to overflows": lambda: np.seterr(all="raise"),
    "settings of JAX": lambda: jax.config.update("jax_default_matmul_precision", "bfloat16"),
    "the global random numbers": lambda: np.random.seed(0),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_changed_is_put_back_and_said_once(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    state, before = KeptState(), {name: _read(name) for name in _KINDS}
    for _ in range(2):
        with state.around("reward function f"):
            CHANGES[kind]()
            os.chdir("/")
        assert {name: _read(name) for name in _KINDS} == before
    said = capfd.readouterr().err
    names = " and ".join(dict.fromkeys([kind, "the working directory"]))
    if kind not in ("a timer", "the handlers of signals"):
        names = " and ".join(sorted(names.split(" and "), key=list(CHANGES).index))
    assert said == f"warning: reward function f changed {names}: the run undid that\n"


def test_there_is_a_test_for_every_kind() -> None:
    assert set(CHANGES) == {*_KINDS, "the standard descriptors", "the global random numbers"}


def test_it_is_put_back_after_an_exception_too(capfd: pytest.CaptureFixture[str]) -> None:
    before = Path.cwd()

    def leave() -> None:
        os.chdir("/")
        sys.exit(3)

    with pytest.raises(SystemExit), KeptState().around("f"):
        leave()
    assert Path.cwd() == before


def test_a_folder_that_is_removed_cannot_be_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with KeptState().around("f"):
        os.chdir("/")
        folder.rmdir()
    os.chdir(tmp_path)
    said = capfd.readouterr().err
    assert said == "warning: f changed the working directory: the run could not undo that\n"


def test_streams_that_are_closed_are_opened_again() -> None:
    program = (
        "import os, sys\n"
        "from grpo_eqx.process_state import KeptState\n"
        "with KeptState().around('f'):\n"
        "    sys.stdout.close(); sys.stderr.close(); os.close(2); os.close(1)\n"
        "print('still here')\n"
        "with KeptState().around('f'):\n"
        "    child = os.fork()\n"
        "print('once', os.waitpid(child, 0)[1], flush=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "still here\nonce 0\n"
    assert ran.stderr == (
        "warning: f changed the standard descriptors and the standard streams: the run undid that\n"
    )


def test_each_caller_has_random_numbers_of_its_own() -> None:
    state, seen = KeptState(), dict[str, list[float]](seeds=[], draws=[])
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
