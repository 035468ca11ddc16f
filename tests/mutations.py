"""Damage to files, as Hypothesis draws it: to the values of JSON, or to the bytes of any file."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 10**9, 10**12, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "x", "3", "1e400", "\0", "\x1b[2J", "\x1b]0;t\x07", "\u202e",
    "[red]", "[/]", "../x", "/", "~", "a" * 5000, "\ud800", "{{", "{%", "none", "None", [], {},
    [[]], [None], [1], ["x"], {"": 0}, {"x": None}, {"step": {}}, [0] * 50,
]  # fmt: skip
"""Values in place of another."""
NAMES = ["", "\x1b[1m", "\ud800", "a\0", "step", "x" * 999]
"""Names in place of another."""
_DEEP = "[" * 2000 + "]" * 2000
_LONG = "9" * 5000
RAW: list[bytes] = [
    b"", b" ", b"\0", b"\n\n", b"null", b"[]", b"{}", b"1", b'"x"', b"{", b"\xff\xfe{\0}\0",
    b"\xef\xbb\xbf", b"\x80\x81", b"<html>", b"version https://git-lfs.github.com/spec/v1\n",
    _DEEP.encode(), b'{"a":' * 2000 + b"1" + b"}" * 2000, _LONG.encode(),
    b'{"a": ' + _LONG.encode() + b"}", b'{"a": "\\ud800"}', b"PAR1", b"\x1f\x8b\x08",
]  # fmt: skip
"""Contents in place of a file's."""


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the places of all values within one, its own first."""
    yield path
    names = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for name in names:
        yield from paths_of(value[name], (*path, name))


def changed(draw: Callable[..., Any], whole: Any) -> Any:
    """Returns a JSON value of which a part is removed, renamed, repeated or another value."""
    path = draw(st.sampled_from(list(paths_of(whole))))
    if not path:
        return draw(st.sampled_from(HOSTILE))
    owner = whole = json.loads(json.dumps(whole))
    for name in path[:-1]:
        owner = owner[name]
    how = draw(st.sampled_from(["value", "value", "value", "remove", "rename", "wrap"]))
    if how == "value":
        owner[path[-1]] = draw(st.sampled_from(HOSTILE))
    elif how == "wrap":
        owner[path[-1]] = [owner[path[-1]]]
    else:
        value = owner.pop(path[-1])
        if how == "rename" and isinstance(owner, dict):
            owner[draw(st.sampled_from(["", "\x1b[1m", "\ud800", "a\0", "step", "x" * 999]))] = (
                value
            )
    return whole


def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """Returns the content of a file after one or two faults."""
    how = draw(st.sampled_from(["json", "json", "json", "json", "cut", "flip", "raw", "splice"]))
    if how == "json":
        lines = content.split(b"\n")
        try:
            whole = json.loads(content)
            return json.dumps(changed(draw, whole)).encode()
        except ValueError:
            pass
        number = draw(st.integers(0, len(lines) - 1))
        try:
            lines[number] = json.dumps(changed(draw, json.loads(lines[number]))).encode()
            return b"\n".join(lines)
        except ValueError:
            how = "flip"
    if how == "raw" or not content:
        return draw(st.sampled_from(RAW))
    at = draw(st.integers(0, len(content) - 1))
    if how == "cut":
        return content[:at]
    if how == "splice":
        return content[:at] + draw(st.sampled_from(RAW)) + content[at:]
    flipped = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        flipped[at] ^= 1 << draw(st.integers(0, 7))
        at = draw(st.integers(0, len(content) - 1))
    return bytes(flipped)


def put(draw: Callable[..., Any], path: Path, content: bytes, *, pipe: bool) -> None:
    """Puts damage in place of a file: mostly another content, rarely something that is no file."""
    clear(path)
    others = ["nothing", "folder", "loop", "link", *["pipe"] * pipe]
    what = draw(st.sampled_from(["content"] * 20 + others))
    if what == "content":
        path.write_bytes(damaged(draw, content))
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path)
    elif what == "link":
        path.symlink_to("/nowhere")


def clear(path: Path) -> None:
    """Removes what is at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
