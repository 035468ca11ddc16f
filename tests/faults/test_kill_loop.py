"""Processes that are killed at random moments, by the script that does it as often as you like."""

from pathlib import Path

import pytest

from ..scripts import load_script

pytestmark = [pytest.mark.slow, pytest.mark.grid("kill_loop")]


@pytest.mark.grid("kills")
def test_kills_of_one_process_of_all_and_of_the_launcher_lose_nothing_and_leave_nothing(
    small_model: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))
    kill_loop = load_script("kill_loop")
    kill_loop.main(kill_loop.Settings(kills=3, steps=12, processes=2, model=str(small_model)))
    *kills, summary = capsys.readouterr().out.splitlines()
    assert [line.partition(" killed")[0][8:] for line in kills] == kill_loop.OF_SEVERAL
    assert summary.startswith("3 kills, ")
    assert "ended with the same model to the last bit" in summary
