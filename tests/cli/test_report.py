"""The command `grpo-eqx report`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_eqx.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", "report", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"model": "tiny_qwen2", "steps": 1}))
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 2.0, "step_time": 1.0}\n')
    return run


def test_it_writes_a_page_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"
    assert run(monkeypatch, str(folder), "--output", str(page)) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page} (0.0")
    assert "No rule found anything wrong" in page.read_text()
    assert [path.name for path in (tmp_path / "page_plots").iterdir()] == ["reward.png"]


def test_without_a_run_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: RUN is missing: name the folder of a run")
    assert run(monkeypatch, str(tmp_path)) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_report_does_not_import_jax() -> None:
    code = "import sys, grpo_eqx.tracking.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
