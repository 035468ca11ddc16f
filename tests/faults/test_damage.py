"""Checkpoints whose files have changed are noticed, and never silently replaced by step 0."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx.errors import EXIT_USER_ERROR

from .conftest import Command

pytestmark = pytest.mark.slow


def arrays(checkpoint: Path) -> list[Path]:
    """The files that hold a checkpoint's parameters and moments."""
    return sorted(checkpoint.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def truncate(checkpoint: Path) -> None:
    file = arrays(checkpoint)[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(checkpoint: Path) -> None:
    file = arrays(checkpoint)[-1]
    content = bytearray(file.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    file.write_bytes(content)


@pytest.fixture
def copied(command: Command, unbroken: Command) -> Command:
    """A finished run, of which the last two steps are saved."""
    shutil.copytree(unbroken.folder, command.folder)
    return command


@pytest.mark.parametrize("spoil", [truncate, flip_a_bit])
def test_the_checkpoint_is_named_and_the_one_before_it_used(
    copied: Command, unbroken: Command, spoil: Callable[[Path], None]
) -> None:
    newest = copied.folder / "checkpoints" / "step_8"
    spoil(newest)
    shutil.rmtree(copied.folder / "model")
    output = copied.finish()
    assert f"warning: cannot read the checkpoint {newest}: " in output
    assert "step_7, after step 7 of 8" in output
    assert copied.rows() == unbroken.rows()
    assert copied.model() == unbroken.model()


def test_when_all_are_damaged_nothing_starts(copied: Command, unbroken: Command) -> None:
    for checkpoint in (copied.folder / "checkpoints").iterdir():
        truncate(checkpoint)
    shutil.rmtree(copied.folder / "model")
    last = copied.finish(EXIT_USER_ERROR).splitlines()[-1]
    assert last.startswith("error: none of the 2 checkpoints in ")
    assert last.endswith("restore one from a backup, or start anew with --resume never.")
    assert copied.rows() == unbroken.rows()
