"""Every tutorial is worked through as it is written, but for the first, of which CI runs parts."""

from pathlib import Path

import pytest

from ..fenced_blocks import Block, Command, commands
from .page import TUTORIALS, as_shown, blocks, run, work_through

FIRST_FILES = "own_reward.md"
"""The page whose files all others go on with."""
PAGES = sorted(path.name for path in TUTORIALS.glob("*.md") if path.name != "first_run.md")
MARKS = {None, "long", "topology", "long topology"}
"""Marks of blocks that a test runs. `topology` is for plans, which need the compiler for TPUs."""


def pages_with(mark: str) -> list[str]:
    return [page for page in PAGES if any(block.mark == mark for block in blocks(page))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the first of these pages leaves."""
    for block in blocks(FIRST_FILES):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    run(["python make_problems.py"], tmp_path)
    assert (tmp_path / "problems.jsonl").exists()
    return tmp_path


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_its_commands_print_what_it_shows(page: str, folder: Path) -> None:
    work_through(page, folder, {None})


@pytest.mark.long
@pytest.mark.parametrize("page", pages_with("long"))
def test_so_do_those_that_take_minutes(page: str, folder: Path) -> None:
    work_through(page, folder, {None, "long"})


@pytest.mark.topology
@pytest.mark.parametrize("page", pages_with("topology"))
def test_so_do_plans_for_described_tpus(page: str, folder: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    work_through(page, folder, {"topology"})


@pytest.mark.long
@pytest.mark.topology
@pytest.mark.parametrize("page", pages_with("long topology"))
def test_so_do_those_that_take_minutes_to_compile(page: str, folder: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    work_through(page, folder, {"long topology"})


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_a_file_or_is_run(page: str) -> None:
    """Or its mark says what it needs."""
    for block in blocks(page):
        known = block.file is not None or block.language == "console"
        assert known or block.mark is not None, block.text
        assert block.mark in MARKS or block.mark.startswith("needs "), block.mark


def test_the_pages_are_in_the_navigation() -> None:
    nav = (TUTORIALS.parents[1] / "mkdocs.yml").read_text()
    assert all(f"tutorials/{page}" in nav for page in PAGES)


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        (["reward 0.31 in 3 s"], "[  1 s] compiling\nreward 0.5  in\n12 s\n", True),
        (["a", "...", "z"], "a\nb\nc\nz\n", True),
        (["a", "...", "z"], "a\nz\n", True),
        (["error: seed is 3"], "error: steps is 3\n", False),
        (["a", "..."], "b\n", False),
        (["a"], "a\nand more\n", False),
    ],
)
def test_output_is_compared_but_for_its_numbers(shown: list[str], output: str, same: bool) -> None:
    assert as_shown(shown, output) == same


def test_a_command_may_have_several_lines() -> None:
    block = Block(None, "console", None, "$ for i in 0 2; do\n>     echo $i\n> done\n0\n2\n")
    assert commands(block) == [Command("for i in 0 2; do\n    echo $i\ndone", ["0", "2"])]
