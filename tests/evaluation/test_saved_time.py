"""An evaluation that continues on another day has the time of the part that is done."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.evaluation.results_file import ResultsFile, saved_time

TIME = "2024-03-09T23:59:58"


def test_the_time_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert saved_time(path) is None
    with ResultsFile(path, {"time": TIME}):
        pass
    assert saved_time(path) == TIME


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"settings": []}', {"time": None}, {"time": 3}, {"time": "noon"}, {}],
)
def test_a_file_without_a_time_has_none(tmp_path: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps({"settings": content})
    (tmp_path / "results.json").write_text(text)
    assert saved_time(tmp_path / "results.json") is None
