"""Writes that survive a power cut, because contents reach the disk before names, and locks."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

_UNSUPPORTED = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EBADF


def write_durably(path: Path, content: str | bytes) -> None:
    """Writes a file that has its name only once all of its content is on the disk."""
    _write(path, content, replace_durably)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that has its name only once it is complete; does not wait for the disk."""
    _write(path, content, Path.replace)


def _write(path: Path, content: str | bytes, replace: Callable[[Path, Path], object]) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)  # the disk may be full
        raise


def replace_durably(source: Path, target: Path) -> None:
    """Gives a file or folder its final name, after all of its content is on the disk."""
    sync_tree(source)
    source.replace(target)
    sync(target.parent)


def sync_tree(path: Path) -> None:
    """Waits until a file, or a folder with all files in it, is on the disk; follows no links."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        return
    if path.is_dir():
        for entry in path.iterdir():
            sync_tree(entry)
    sync(path)


def sync(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk.

    Does nothing on file systems without support, such as some network file systems for folders.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def try_lock(file: IO[str]) -> bool:
    """Locks a file, if the file system has locks; returns `False` if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
