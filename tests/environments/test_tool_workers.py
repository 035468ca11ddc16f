"""Tools in workers answer as in threads do, and end in time whatever they do."""

import importlib
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.environments.calls import Call, Outcome
from grpo_eqx.environments.pool import Environments
from grpo_eqx.environments.tool_workers import ToolWorkerError

TOOLS = textwrap.dedent('''\
    import ctypes, json, os, subprocess

    def act(what: str, number: int = 1):
        """Acts.

        Args:
            what: What to do.
            number: A number.
        """
        if what == "raise":
            raise ValueError("no such unit")
        if what == "hang in C":
            ctypes.PyDLL(None).pause()  # keeps the GIL
        if what == "crash":
            os._exit(3)
        if what == "leak":
            return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
        if what == "call itself":
            return act("call itself")
        return {
            "text": "a" * number, "bytes": b"abc", "number": 0.5, "nothing": None,
            "lists": [[1], [[2]]], "blocks": [{"type": "text", "text": x} for x in "ab"],
            "wide": "\\u4f60" * number, "process": str(os.getpid()),
        }[what]

    async def wait(what: str):
        """Waits.

        Args:
            what: What to say then.
        """
        return what
''')


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "worker_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("worker_tools")
    del sys.modules["worker_tools"]


def called(environments: Environments, *arguments: dict[str, Any]) -> list[Outcome]:
    (tool,) = environments.tools
    calls = environments.calls
    return calls.result(calls.together([Call(tool.func, each) for each in arguments]))


def test_answers_are_those_of_threads(module: ModuleType) -> None:
    kinds = "text", "bytes", "number", "nothing", "lists", "blocks"
    arguments = [{"what": kind} for kind in kinds]
    workers = Environments([module.act], num_workers=2)
    try:
        answers = [outcome.result for outcome in called(workers, *arguments)]
        assert answers == ["a", "b'abc'", "0.5", "None", "[[1], [[2]]]", "ab"]
        (failed,) = called(workers, {"what": "raise"})
        assert isinstance(failed.error, ToolWorkerError)
        assert str(failed.error) == "no such unit"
        assert failed.error.reason.startswith("raised ValueError: no such unit (worker_tools.py")
        (long,) = called(workers, {"what": "wide", "number": 300_000})
        assert long.result == "\u4f60" * 300_000
    finally:
        workers.close()


def test_whatever_a_call_does_it_ends_in_time(module: ModuleType) -> None:
    actions = ["hang in C", "crash", "leak", "call itself", *["text"] * 8]
    workers = Environments([module.act], timeout=2.0, num_workers=2)
    try:
        workers.workers.start()
        start = time.monotonic()
        hung, crashed, leaked, deep, *rest = called(workers, *({"what": x} for x in actions))
        assert time.monotonic() - start < 10
    finally:
        workers.close()
    assert str(hung.error) == "took more than 2 s"
    assert str(crashed.error) == "lost its process (exit code 3)"
    assert str(deep.error).startswith("maximum recursion depth exceeded")
    assert [outcome.result for outcome in rest] == ["a"] * 8
    with pytest.raises(ProcessLookupError):
        os.kill(int(leaked.result), 0)


def test_workers_are_kept_between_calls_until_the_end(module: ModuleType) -> None:
    workers = Environments([module.act], num_workers=1)
    try:
        first, second = called(workers, {"what": "process"}, {"what": "process"})
        assert first.result == second.result != str(os.getpid())
        workers.close()
        (third,) = called(workers, {"what": "process"})
        assert third.result != first.result
    finally:
        workers.close()


def test_tools_that_cannot_be_in_workers_are_refused(module: ModuleType) -> None:
    def here(what: str) -> str:
        """Acts.

        Args:
            what: What to do.
        """
        return what

    with pytest.raises(UserError, match=r"cannot import the tool here .* such as tools\.py beside"):
        Environments([here], num_workers=1)
    with pytest.raises(UserError, match="no plain functions are passed as tools: it"):
        Environments([module.wait], num_workers=1)
