"""What Orbax reports of reads that it abandons stays out of a run's output; the rest stays in."""

import asyncio
import gc
import logging

import pytest

from grpo_eqx.checkpoint.orbax_reports import silence_orbax


def abandon_reads(file: str) -> None:
    """Lets several reads fail, by the code of a file, after the first error has been raised."""
    names: dict[str, object] = {}
    exec(compile("async def read(): raise ValueError('no such bytes')", file, "exec"), names)

    async def all_reads() -> None:
        asyncio.gather(names["read"](), names["read"]())  # type: ignore[operator]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(all_reads())
    gc.collect()


@pytest.mark.parametrize(
    ("file", "reports"), [("/site-packages/orbax/checkpoint/x.py", 0), ("/home/me/rewards.py", 1)]
)
def test_a_read_that_nobody_waits_for_is_not_reported(
    file: str, reports: int, caplog: pytest.LogCaptureFixture
) -> None:
    silence_orbax()
    abandon_reads(file)
    assert caplog.text.count("_GatheringFuture exception was never retrieved") == reports


def test_a_report_without_an_exception_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    silence_orbax()
    logging.getLogger("asyncio").error("a task was destroyed", exc_info=False)
    assert "a task was destroyed" in caplog.text
