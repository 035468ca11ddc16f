"""What has its final name is on the disk, whatever happens to the machine then."""

import errno
import os
from pathlib import Path

import pytest

from grpo_eqx.common.durable import replace_durably, sync_tree, write_durably


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of what reaches the disk, and of what gets a name."""
    made, sync, rename = list[str](), os.fsync, os.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        made.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def replaced(source: Path, target: Path) -> None:
        rename(source, target)
        made.append(f"name {Path(target).name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return made


@pytest.mark.parametrize("content", ["text é", b"\x00\xff"])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_we_go_on(
    tmp_path: Path, calls: list[str], content: str | bytes
) -> None:
    path = tmp_path / "folder" / "file.json"
    path.parent.mkdir()
    path.write_text("before")
    write_durably(path, content)
    assert calls == ["sync file.json.tmp", "name file.json", "sync folder"]
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, calls: list[str]
) -> None:
    (tmp_path / "unfinished" / "part").mkdir(parents=True)
    (tmp_path / "unfinished" / "part" / "a").touch()
    (tmp_path / "unfinished" / "b").touch()
    replace_durably(tmp_path / "unfinished", tmp_path / "model")
    assert sorted(calls[:-2]) == ["sync a", "sync b", "sync part", "sync unfinished"]
    assert calls.index("sync a") < calls.index("sync part") < calls.index("sync unfinished")
    assert calls[-2:] == ["name model", f"sync {tmp_path.name}"]


def test_links_and_pipes_in_a_folder_are_passed_over(tmp_path: Path, calls: list[str]) -> None:
    """A pipe would block until something writes to it, and links may lead anywhere."""
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "all").symlink_to("/")
    os.mkfifo(tmp_path / "pipe")
    sync_tree(tmp_path)
    assert calls == [f"sync {tmp_path.name}"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_do_so_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    write_durably(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_what_is_at_the_name_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file.json"
    path.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
