"""Storage that is full, or cannot be written."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_eqx.common.errors import EXIT_FAULT, EXIT_USER_ERROR

from .conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.grid("storage")]

DISK_BYTES = 16 * 2**20
CHECKPOINTS_BYTES = 2**20
"""Space left for a few checkpoints of the small model."""


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", f"size={DISK_BYTES}") as disk:
        yield disk


def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(
    small_model: Path, programs: Path, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(DISK_BYTES - CHECKPOINTS_BYTES))
    flags = {"steps": 12, "save_total_limit": None, "log_completions_steps": 0}
    command = Command(small_model, programs, small_disk / "run", **flags)
    last = command.finish(EXIT_FAULT).splitlines()[-1]
    assert last.startswith("error: the ")
    assert "could not be written to" in last
    assert "free space or make the folder writable, and the same command continues" in last
    filler.unlink()
    output = command.finish()
    assert "resuming from" in output
    steps = [row["step"] for row in command.rows() if "reward" in row]
    assert steps == list(range(1, 13))


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    command = Command(small_model, programs, tmp_path / "file" / "run")
    assert command.finish(EXIT_USER_ERROR).splitlines() == [
        f"error: output_dir '{tmp_path}/file/run' cannot be written ({tmp_path}/file is a file): "
        f"choose another."
    ]
    with mounted(tmp_path / "disk", "ro") as disk:
        command = Command(small_model, programs, disk / "run")
        assert command.finish(EXIT_USER_ERROR).splitlines() == [
            f"error: output_dir '{disk}/run' cannot be written ({disk} is read-only): choose "
            f"another."
        ]
