"""The commands of the documentation can be parsed: their flags exist, and have such values."""

import re
import shlex
from pathlib import Path

import pytest

from grpo_eqx.cli.main import run
from grpo_eqx.launch.subcommand import Subcommand

from ..fenced_blocks import ROOT, blocks, commands

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def own_commands(page: Path) -> list[str]:
    """What follows `grpo-eqx` in the console blocks of a page.

    Without what belongs to the shell, settings' files, which do not exist here, and commands with
    variables and loops.
    """
    listed = [c.line for b in blocks(page) if b.language == "console" for c in commands(b)]
    joined = [re.sub(r"\\\n *", "", line) for line in listed]
    found = [re.fullmatch(r"(?:\w+=\S+ )*grpo-eqx (.*)", line) for line in joined]
    ours = [each[1] for each in found if each is not None and "$VM" not in each[1]]
    return [re.sub(r" --config \S+| > \S+| \| .*", "", each) for each in ours]


@pytest.mark.grid
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_they_are_parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in subclasses(Subcommand):
        monkeypatch.setattr(kind, "run", lambda self, command: 0)
    for command in own_commands(page):
        assert run(shlex.split(command, comments=True)) == 0, command


def subclasses(kind: type) -> list[type]:
    return [each for own in kind.__subclasses__() for each in (own, *subclasses(own))]


def test_there_are_many() -> None:
    assert sum(len(own_commands(page)) for page in PAGES) > 50
