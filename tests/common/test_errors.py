"""Texts from outside, as they are quoted in messages."""

import os
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import first_line, near, shown


class RaisingError(Exception):
    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class OwnText(str):
    def strip(self, *_: Any) -> str:
        raise RuntimeError("no text")


class OddTextError(Exception):
    def __str__(self) -> str:
        return OwnText(" odd ")


class HidingError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError(), "no reason given"),
        (ValueError("\n \t"), "no reason given"),
        (ValueError("x" * 501), "x" * 500 + "... (501 characters)"),
        (ValueError("\x1b[2J\u202e\ud800"), r"\x1b[2J\u202e\ud800"),
        (RaisingError(), "no reason given, as its __str__ raised SystemExit"),
        (OddTextError(), "odd"),
        (
            ExceptionGroup("g", [ExceptionGroup("h", [ValueError("v")])]),
            "g (1 sub-exception), the first of them ExceptionGroup: "
            "h (1 sub-exception), the first of them ValueError: v",
        ),
    ],
)
def test_an_error_is_quoted_by_its_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_an_error_is_quoted_whatever_its_class_hides() -> None:
    assert first_line(HidingError("hidden")) == "hidden"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\n", "'a\\n'"),
        (-(10**400), "an integer of 1,329 bits"),
        (list(range(10)), "[0, 1, 2, 3, 4, 5, ...]"),
        (RaisingError(), "an object of class RaisingError"),
    ],
)
def test_a_value_is_shown_on_a_short_line(value: Any, text: str) -> None:
    assert shown(value) == text
    assert len(shown("x" * 10**6)) < 100


def test_paths_below_the_working_directory_are_relative_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"resuming from {tmp_path}/run, not '{tmp_path}/other', /x{tmp_path}/y or {tmp_path}2/z"
    assert near(said) == f"resuming from run, not 'other', /x{tmp_path}/y or {tmp_path}2/z"
    monkeypatch.chdir("/")
    assert near(said) == said
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert near(said) == said
    os.chdir(tmp_path)
