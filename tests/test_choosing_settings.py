"""The code of the page on settings runs as it is written."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "choosing_settings.md"


@pytest.mark.slow
def test_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {"__name__": "script"})
    at_1, at_8 = re.findall(r"pass@\d (\d\.\d+)", capsys.readouterr().out)
    assert 0 < float(at_1) < float(at_8) <= 1
