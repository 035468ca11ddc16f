"""Answers on disk."""

from pathlib import Path

import pytest

from grpo_eqx.planner.plan_cache import remembered


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "grpo_eqx" / "plans"


def test_a_question_is_answered_once(folder) -> None:
    asked = []

    def answer():
        asked.append(1)
        return {"answer": 42}

    for _ in range(2):
        assert remembered({"what": [1, 2]}, answer) == {"answer": 42}
    assert remembered({"what": [2, 1]}, answer) == {"answer": 42}
    assert len(asked) == 2
    assert len(list(folder.iterdir())) == 2


def test_what_is_damaged_is_asked_again(folder) -> None:
    remembered({"q": 1}, lambda: {"a": 1})
    (file,) = folder.iterdir()
    file.write_text('{"a": ')
    for again in (2, 3):
        assert remembered({"q": 1}, lambda again=again: {"a": again}) == {"a": 2}


def test_without_a_folder_nothing_is_kept(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for each in (1, 2):
        assert remembered({"q": 1}, lambda each=each: {"a": each}) == {"a": each}
