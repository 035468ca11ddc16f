"""What Orbax reports of reads that it abandons stays out of a run's output; the rest stays in."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from grpo_eqx.checkpoint.orbax_reports import silence_orbax

OF_ORBAX = str(Path(ocp.__file__).parent / "serialization.py")
OF_A_USER = "/home/me/orbax/checkpoint/rewards.py"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is reported, once the reports of Orbax are silenced."""
    gc.collect()  # what earlier tests abandoned
    silence_orbax()
    return caplog


def read_of(file: str) -> Callable[[], Awaitable[Any]]:
    """Returns a coroutine function whose code is a file's, and that fails."""
    names: dict[str, Any] = {}
    exec(compile("async def read(): raise ValueError('no such bytes')", file, "exec"), names)
    return names["read"]


def abandon(start: Callable[[], object]) -> None:
    """Starts tasks that fail, and collects them unawaited."""

    async def run() -> None:
        start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()


@pytest.mark.parametrize(("file", "reports"), [(OF_ORBAX, 0), (OF_A_USER, 1)])
def test_of_several_reads_those_of_orbax_are_dropped(
    file: str, reports: int, log: pytest.LogCaptureFixture
) -> None:
    read = read_of(file)
    abandon(lambda: asyncio.gather(read(), read()))
    assert log.text.count("_GatheringFuture exception was never retrieved") == reports


@pytest.mark.parametrize(("file", "reports"), [(OF_ORBAX, 0), (OF_A_USER, 1)])
def test_of_single_reads_those_of_orbax_are_dropped(
    file: str, reports: int, log: pytest.LogCaptureFixture
) -> None:
    read = read_of(file)
    abandon(lambda: asyncio.ensure_future(read()))
    assert log.text.count("Task exception was never retrieved") == reports


def test_a_users_task_that_orbax_failed_is_reported(log: pytest.LogCaptureFixture) -> None:
    async def export() -> None:
        await read_of(OF_ORBAX)()

    abandon(lambda: asyncio.ensure_future(export()))
    assert log.text.count("Task exception was never retrieved") == 1


@pytest.mark.parametrize(("file", "reports"), [(OF_ORBAX, 0), (OF_A_USER, 1)])
def test_of_notes_those_of_orbax_are_dropped(
    file: str, reports: int, log: pytest.LogCaptureFixture
) -> None:
    absl = logging.getLogger("absl")
    absl.handle(absl.makeRecord("absl", logging.WARNING, file, 1, "a note", (), None))
    assert log.text.count("a note") == reports


def test_a_report_without_an_exception_is_kept(log: pytest.LogCaptureFixture) -> None:
    logging.getLogger("asyncio").error("a task was destroyed", exc_info=False)
    assert "a task was destroyed" in log.text
