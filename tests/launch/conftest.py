"""The command line, in this process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from grpo_eqx.cli.main import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `grpo-eqx launch ...`."""

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "launch", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call


HOSTILE = (
    "two  words",
    "$HOME `id` $(id) ${x} $$",
    'it\'s "quoted" \\ back',
    "; exit 9 & | > < #",
    "two\nlines",
    "tab\tbell\a\r",
    "été ☃ 😀 \u2028 \ufeff \x85",
    "",
    "--help",
    "--",
    "a=b",
    "*",
    "@{name} %x !!",
)
"""Arguments that arrive only if every quoting on the way is right."""


@pytest.fixture
def hostile() -> tuple[str, ...]:
    return HOSTILE
