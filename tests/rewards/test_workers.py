"""Reward functions in processes of their own: whatever they do, the others' rewards are there."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_eqx.common.errors import RewardError, UserError
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Samples
from grpo_eqx.rewards.workers import WorkerPool

from ..processes import processes, with_variable

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="lists processes in /proc")

HERE = Path(__file__).parent
MARK = f"GRPO_EQX_TEST_OF_WORKERS_{os.getpid()}"
"""A variable that all processes of a test have inherited."""


def processes_below(parent: int) -> set[int]:
    """Processes that run a worker, or that one started, zombies included, for a process."""
    children = {process.pid for process in processes() if process.parent == parent}
    return children.union(*map(processes_below, children))


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sees to it that a test leaves no process, in whatever session, whoever is its parent."""
    before = processes_below(os.getpid())
    monkeypatch.setenv(MARK, "1")
    yield
    assert processes_below(os.getpid()) <= before
    assert not with_variable(MARK)


def samples(*texts: str) -> Samples:
    return Samples(["?"] * len(texts), list(texts), {"answer": [1] * len(texts)})


def run(func: Any, *texts: str, workers: int = 2, **limits: Any) -> list[Any]:
    """Scores texts, then one more, and sees to it that no process is left."""
    pool = WorkerPool({"func": func}, workers)
    try:
        outcomes = pool.run("func", samples(*texts), RewardLimits(**limits))
        assert pool.run("func", samples("again"), RewardLimits(**limits)) == [5.0]
    finally:
        pool.close()
    assert not with_variable(MARK)
    return [outcome.reason if isinstance(outcome, Failure) else outcome for outcome in outcomes]


def test_each_completion_gets_its_own_reward(reward_module: ModuleType) -> None:
    texts = ["x" * n for n in range(40)]
    assert run(reward_module.length, *texts, workers=3) == list(map(float, range(40)))


def test_what_is_no_reward_is_a_failure_of_that_completion_alone(reward_module: ModuleType) -> None:
    outcomes = run(reward_module.faulty, "a", "raise", "nan", "none", "inf", "bb")
    assert outcomes[0] == 1.0
    assert outcomes[1].startswith("raised ValueError: no such unit (reward_module.py, line ")
    assert outcomes[2:] == ["returned nan", None, "returned inf", 2.0]


def test_a_crash_costs_only_its_own_completion(reward_module: ModuleType) -> None:
    outcomes = run(reward_module.faulty, "a", "segfault", "bb", "exit", "ccc")
    assert outcomes == [1.0, "lost its process (SIGSEGV)", 2.0, "lost its process (exit code 3)", 3]


def test_a_process_that_a_function_forked_does_not_hide_its_crash(
    reward_module: ModuleType,
) -> None:
    outcomes = run(reward_module.faulty, "leave a fork that holds the pipe", "a")
    assert outcomes == ["lost its process (exit code 3)", 1.0]


@pytest.mark.grid
@pytest.mark.parametrize("what", ["sleep", "ignore SIGTERM", "keep the GIL", "start a session"])
def test_every_tenth_call_sleeps_for_ever_and_is_killed(
    reward_module: ModuleType, what: str
) -> None:
    texts = [what if i % 10 == 9 else "x" for i in range(30)]
    start = time.monotonic()
    outcomes = run(reward_module.faulty, *texts, timeout=0.5)
    assert time.monotonic() - start < 10
    late = "ran out of time (reward_timeout is 0.5 s)"
    assert outcomes == [late if text == what else 1.0 for text in texts]


def test_a_batch_that_takes_too_long_keeps_what_it_has(reward_module: ModuleType) -> None:
    outcomes = run(reward_module.faulty, "a", "sleep", "bb", "sleep", "ccc", batch_timeout=1.5)
    late = "ran out of time (reward_batch_timeout is 1.5 s)"
    assert outcomes == [1.0, late, 2.0, late, late]


def test_the_first_failure_can_end_the_batch(reward_module: ModuleType) -> None:
    pool = WorkerPool({"func": reward_module.faulty}, 2)
    try:
        outcomes = pool.run("func", samples("sleep", "nan"), RewardLimits(), stop_at_failure=True)
    finally:
        pool.close()
    assert outcomes == [None, Failure("returned nan")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_number", "func returned 2 values for 1 completion:"),
        ("no_list", r"func returned 3\.0 for 1 completion:"),
        ("faulty", "func returned 'yes' for completion 0"),
    ],
)
def test_a_broken_contract_is_an_error(reward_module: ModuleType, name: str, message: str) -> None:
    pool = WorkerPool({"func": getattr(reward_module, name)}, 1)
    try:
        with pytest.raises(RewardError, match=message):
            pool.run("func", samples("text"), RewardLimits())
    finally:
        pool.close()


def test_workers_are_replaced_after_a_number_of_calls(reward_module: ModuleType) -> None:
    pool = WorkerPool({"func": reward_module.process_id}, 1, calls_per_worker=3)
    try:
        ids = pool.run("func", samples(*"abcdefg"), RewardLimits())
    finally:
        pool.close()
    assert [ids.count(each) for each in dict.fromkeys(ids)] == [3, 3, 1]


def test_an_idle_worker_that_was_killed_is_replaced(reward_module: ModuleType) -> None:
    pool = WorkerPool({"func": reward_module.length}, 2)
    try:
        pool.run("func", samples("a"), RewardLimits())
        for worker in pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        assert pool.run("func", samples("a", "bb", "ccc"), RewardLimits()) == [1.0, 2.0, 3.0]
    finally:
        pool.close()


def test_workers_see_no_accelerator_and_load_no_jax(reward_module: ModuleType) -> None:
    pool = WorkerPool({"func": reward_module.sees_accelerators}, 1)
    try:
        assert pool.run("func", samples("a"), RewardLimits()) == [0.0]
    finally:
        pool.close()


def test_functions_must_be_importable(reward_module: ModuleType) -> None:
    def local(**columns: Any) -> list[float]:
        return [0.0]

    for func in (lambda **_: [0.0], local):
        with pytest.raises(UserError, match=r"cannot import the reward function mine .*rewards.py"):
            WorkerPool({"mine": func}, 1)
    WorkerPool({"mine": functools.partial(reward_module.length, factor=2)}, 1)
    program = (
        "from grpo_eqx.rewards.workers import WorkerPool\n"
        "def mine(**_): return [0.0]\n"
        "WorkerPool({'mine': mine}, 1)\n"
    )
    run = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "which is in the script that runs" in result.stderr


class OnlyHere:
    """A value that can be pickled, and not read where this module is not."""


class Unreadable:
    def __reduce__(self) -> Any:
        return exec, ("raise RuntimeError('not today')",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (threading.Lock(), "raised TypeError: cannot pickle '_thread.lock' object"),
        ((x for x in "ab"), "raised TypeError: cannot pickle 'generator' object"),
        (lambda: 0, "raised AttributeError: Can't pickle|raised PicklingError: Can't pickle"),
        (Unreadable(), "raised RuntimeError: not today"),
        (OnlyHere(), "raised ModuleNotFoundError: No module named"),
    ],
    ids=["lock", "generator", "lambda", "unreadable", "a class of another module"],
)
def test_a_column_that_cannot_be_sent_is_named(
    reward_module: ModuleType, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(HERE), *(x for x in sys.path if "rewards" not in x)])
    monkeypatch.setattr(OnlyHere, "__module__", "only_here")
    monkeypatch.setitem(sys.modules, "only_here", sys.modules[__name__])
    pool = WorkerPool({"func": reward_module.length}, 1)
    sent = Samples(["?"], ["a"], {"answer": [1], "odd": [value]})
    try:
        with pytest.raises(UserError, match=f"the column odd cannot be sent .*({reason})"):
            pool.run("func", sent, RewardLimits())
        assert pool.run("func", samples("abc"), RewardLimits()) == [3.0]
    finally:
        pool.close()


def test_a_large_argument_does_not_wait_for_a_worker_beyond_the_timeout(
    reward_module: ModuleType,
) -> None:
    pool = WorkerPool({"func": reward_module.length}, 1)
    try:
        assert pool.run("func", samples("a"), RewardLimits()) == [1.0]
        (worker,) = pool._workers
        (process,) = processes_below(worker.process.pid)
        os.kill(process, signal.SIGSTOP)
        (outcome,) = pool.run("func", samples("x" * 10**7), RewardLimits(timeout=1.0))
        assert isinstance(outcome, Failure)
        assert outcome.reason == "ran out of time (reward_timeout is 1.0 s)"
    finally:
        pool.close()


def test_a_module_that_fails_in_the_worker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "needs_its_parent.py"
    module.write_text("import os\nos.environ['ONLY_HERE']\ndef f(**_): return [0.0]\n")
    monkeypatch.setenv("ONLY_HERE", "1")
    monkeypatch.syspath_prepend(tmp_path)
    import needs_its_parent  # type: ignore[import-not-found]

    monkeypatch.delenv("ONLY_HERE")
    pool = WorkerPool({"func": needs_its_parent.f}, 2)
    with pytest.raises(UserError, match=r"functions, as that raised KeyError: 'ONLY_HE"):
        pool.run("func", samples("a"), RewardLimits())
    pool.close()


def test_limits_that_a_module_sets_as_it_is_imported_hold(
    reward_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limits_itself.py").write_text(
        "import os, resource\n"
        "def limit(number):\n"
        "    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))\n"
        "if 'IN_A_WORKER' in os.environ: limit(200)\n"
        "def f(**_):\n"
        "    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "    limit(100)\n"
        "    return [float(before)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import limits_itself  # type: ignore[import-not-found]

    monkeypatch.setenv("IN_A_WORKER", "1")
    pool = WorkerPool({"other": reward_module.length, "func": limits_itself.f}, 1)
    try:
        assert pool.run("func", samples("a", "b"), RewardLimits()) == [200.0, 200.0]
    finally:
        pool.close()


@pytest.mark.parametrize("in_a_file", [False, True])
def test_the_output_of_the_run_waits_whatever_a_worker_sets_on_its_own(
    in_a_file: bool, tmp_path: Path
) -> None:
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import reward_module\n"
        "from grpo_eqx.data.prompts import Prompt\n"
        "from grpo_eqx.rewards import RewardRunner\n"
        "from grpo_eqx.rewards.limits import RewardLimits\n"
        "limits = RewardLimits(workers=1)\n"
        "with RewardRunner({'f': reward_module.faulty}, limits=limits) as runner:\n"
        "    runner([Prompt('?', {})], [['write without waiting', 'a']], [[[1], [2]]])\n"
        "print(os.get_blocking(1))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(HERE)]
    with (tmp_path / "output").open("w+") as file:
        ran = subprocess.run(
            command,
            stdout=file if in_a_file else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        file.seek(0)
        assert (file.read() if in_a_file else ran.stdout) == "True\n"
    assert ran.stderr == ""  # the worker has undone it


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("what", ["sleep", "keep the GIL", "start a process", "start a session"])
def test_workers_end_with_a_parent_that_is_killed(what: str) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import reward_module\n"
        "from grpo_eqx.rewards.limits import RewardLimits\n"
        "from grpo_eqx.rewards.outcomes import Samples\n"
        "from grpo_eqx.rewards.workers import WorkerPool\n"
        "pool = WorkerPool({'func': reward_module.faulty}, 2)\n"
        "pool.run('func', Samples(['?'], ['a'], {}), RewardLimits())\n"
        "print('ready', flush=True)\n"
        "pool.run('func', Samples(['?'] * 2, ['a', sys.argv[2]], {}), RewardLimits())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(HERE), what]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    expected = 5 + what.startswith("start")  # with a guardian for each worker
    deadline = time.monotonic() + 60
    while len(with_variable(MARK)) < expected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.communicate()
    while with_variable(MARK):
        assert time.monotonic() < deadline
        time.sleep(0.01)
