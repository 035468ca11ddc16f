"""A tutorial as its reader works through it: files are written, commands run, output compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

from ..fenced_blocks import Block, commands
from ..fenced_blocks import blocks as blocks_of

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
_NEXT = "==== next command ===="
_PROGRESS = re.compile(r"^(\[\w\] )?\[ *\d+ \w+\] ")
_TIMES = re.compile(r" \(compiling took \d+ \w+\)|  \d+ \w+ left")
_NUMBER = re.compile(r"-?\d[\d.,]*(e-?\d+)?")
_HEX = re.compile(r"\b[0-9a-f]{12}\b")


def blocks(name: str) -> list[Block]:
    """Returns the fenced blocks of a tutorial."""
    found = blocks_of(TUTORIALS / name)
    fences = re.findall("^```", (TUTORIALS / name).read_text(), re.MULTILINE)
    assert len(found) == len(fences) / 2, "a fence is not read"
    return found


def work_through(name: str, folder: Path, marks: set[str | None]) -> None:
    """Writes the files of a page, and runs its commands in one shell.

    **Arguments:** the page; an empty folder; the marks of the blocks that are run, `None` for those
    without.
    """
    chosen = [block for block in blocks(name) if block.mark in marks]
    for block in blocks(name):
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
    listed = [c for b in chosen if b.language == "console" for c in commands(b)]
    outputs = run([command.line for command in listed], folder)
    for command, output in zip(listed, outputs, strict=True):
        shown = "\n".join(command.shown)
        message = f"$ {command.line}\nprinted\n{output}\nwhere the page has\n{shown}"
        assert as_shown(command.shown, output), message


def run(lines: list[str], folder: Path) -> list[str]:
    """Returns what each command prints, one after the other in one shell."""
    # So that `echo $?` is the exit code of the command before, as in a terminal.
    script = [f"echo '{_NEXT}'\n(exit $code)\n{line}\ncode=$?" for line in lines]
    _, *outputs = shell(["code=0", *script], folder).stdout.split(f"{_NEXT}\n")
    return outputs


def shell(lines: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs lines in a shell, as a reader does: a CPU device, and programs compiled before."""
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in x]
    return subprocess.run(
        ["bash", "-c", "\n".join(["exec 2>&1", *lines])],
        cwd=folder, text=True, stdout=subprocess.PIPE, timeout=1500, check=False,
        env=os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XLA_FLAGS": " ".join(flags),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "XDG_CACHE_HOME": os.environ["JAX_COMPILATION_CACHE_DIR"],  # where plans are kept
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "100",
        },
    )  # fmt: skip


def as_shown(shown: list[str], output: str) -> bool:
    """Returns whether this is the output, but for its numbers, its folds and its progress.

    `...` in what is shown stands for anything, as in doctest.
    """
    printed = [line for line in output.splitlines() if not _PROGRESS.match(line)]
    pattern = re.escape(_plain(shown)).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern.replace(r".*?\ ", r".*? ?"), _plain(printed)) is not None


def _plain(lines: list[str]) -> str:
    """Joins lines to words between single spaces, with one number in place of all."""
    text = "\n".join(lines)
    for pattern, name in ((_TIMES, ""), (_HEX, "0"), (_NUMBER, "0")):
        text = pattern.sub(name, text)
    return " ".join(text.split())
