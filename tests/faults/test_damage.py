"""Checkpoints whose files have changed are noticed, and never silently replaced by step 0."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx.checkpoint.saved import complete_steps
from grpo_eqx.common.errors import EXIT_USER_ERROR

from .conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.grid("damage")]


def arrays(checkpoint: Path) -> list[Path]:
    """The files that hold a checkpoint's parameters and moments."""
    return sorted(checkpoint.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def truncate(checkpoint: Path) -> None:
    file = arrays(checkpoint)[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(checkpoint: Path) -> None:
    file = arrays(checkpoint)[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # The file ends with an index that nothing reads any more.
    file.write_bytes(content)


@pytest.fixture
def copied(command: Command, unbroken: Command) -> Command:
    """A finished run, of which the last two steps are saved."""
    shutil.copytree(unbroken.folder, command.folder)
    return command


@pytest.mark.grid
@pytest.mark.parametrize("spoil", [truncate, flip_a_bit])
def test_the_checkpoint_is_named_and_the_one_before_it_used(
    copied: Command, unbroken: Command, spoil: Callable[[Path], None]
) -> None:
    newest = copied.folder / "checkpoints" / "step_8"
    spoil(newest)
    shutil.rmtree(copied.folder / "model")
    output = copied.finish()
    assert complete_steps(copied.folder / "checkpoints") == [8, 7]
    assert f"warning: cannot read the checkpoint {newest}: " in output
    assert "step_7, after step 7 of 8" in output
    assert copied.rows() == unbroken.rows()
    assert copied.model() == unbroken.model()


def test_when_all_are_damaged_nothing_starts(copied: Command, unbroken: Command) -> None:
    for checkpoint in (copied.folder / "checkpoints").iterdir():
        truncate(checkpoint)
    shutil.rmtree(copied.folder / "model")
    output = copied.finish(EXIT_USER_ERROR)
    last = output.splitlines()[-1]
    assert last.startswith("error: none of the 2 checkpoints in "), output
    assert last.endswith("restore one from a backup, or set resume to never to start anew.")
    assert "TensorStore" not in output
    assert "Traceback" not in output
    assert copied.rows() == unbroken.rows()


def test_where_only_one_of_two_hosts_cannot_read_it_both_use_the_one_before(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    """On storage that both share, but of which each reads its own part."""
    flags = {"processes": 2, "steps": 3}
    command = Command(small_model, programs, tmp_path / "run", **flags)
    command.finish()
    checkpoint = command.folder / "checkpoints" / "step_3"
    written = [list((checkpoint / "state" / f"ocdbt.process_{i}" / "d").iterdir()) for i in (0, 1)]
    sizes = [sum(path.stat().st_size for path in paths) for paths in written]
    assert min(sizes) > 0.8 * max(sizes)  # each host has written its own half
    for path in written[1]:
        path.write_bytes(b"")
    shutil.rmtree(command.folder / "model")
    output = command.finish()
    assert "warning: cannot read the checkpoint" in output
    assert "step_2, after step 2 of 3" in output
    assert (command.folder / "previous-1" / "checkpoints" / "step_3").is_dir()
