"""The trained model at the end of a run: all of it, or said where it is."""

import os
import tempfile
from pathlib import Path

import pytest

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.tracking.final_model import write_final_model, write_model


class Disk:
    """Writes a file of a model, unless the folder is under one that is full."""

    def __init__(self, *full: Path):
        self.full = full

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        if any(folder.is_relative_to(each) for each in self.full):
            raise OSError(28, "No space left on device")
        (folder / "model.safetensors").write_text("weights")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_model_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / "stale").touch()
    write_final_model(Disk().save, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert list(folder.parent.iterdir()) == [folder]


def test_the_earlier_model_is_there_until_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, sync = tmp_path / "run" / "model", list[tuple[str, bool]](), os.fsync

    def recorded(descriptor: int) -> None:
        sync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, (folder / "stale").exists()))

    folder.mkdir(parents=True)
    (folder / "stale").touch()
    monkeypatch.setattr(os, "fsync", recorded)
    write_final_model(Disk().save, folder)
    assert {name for name, stale in synced if stale} == {
        "config.json", "model.safetensors", "model.tmp",
    }  # fmt: skip
    assert synced[-1] == ("run", False)


def test_a_model_that_finds_no_space_is_written_elsewhere(tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "run" / "model"
    with pytest.raises(RunError) as error:
        write_final_model(Disk(folder.parent).save, folder)
    (elsewhere,) = temporary.iterdir()
    assert str(error.value) == (
        f"the trained model could not be written to '{folder}' (No space left on device): it is in "
        f"'{elsewhere}' instead."
    )
    assert (elsewhere / "model.safetensors").exists()
    assert list(folder.parent.iterdir()) == []  # half a model would be taken for one


def test_where_nothing_takes_it_that_is_said_and_nothing_is_left(
    tmp_path: Path, temporary: Path
) -> None:
    folder = tmp_path / "run" / "model"
    said = f"'{folder}' .*nor to '{temporary}' .*still has the model, for save_pretrained"
    with pytest.raises(RunError, match=said):
        write_final_model(Disk(tmp_path).save, folder)
    assert list(temporary.iterdir()) == list(folder.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file' is a file: give the path of a folder\."):
        write_model(Disk().save, tmp_path / "file")
    with pytest.raises(UserError, match="needs a folder: give its path"):
        write_model(Disk().save, "")
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        write_model(Disk(tmp_path).save, tmp_path / "model")
