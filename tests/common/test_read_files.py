"""Files from outside: whatever is wrong with one is one sentence, which names it."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_eqx.common.errors import FileError
from grpo_eqx.common.plain_data import field, why_not_plain
from grpo_eqx.common.read_files import (
    object_of,
    open_tensors,
    read_bytes,
    read_object,
    read_text,
    read_yaml,
)

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in itertools.pairwise("abcdefghi")
)
"""Nine levels of aliases, which name 9^9 values."""


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not valid JSON .Expecting value at column 1, as it ends too early"),
        (b'{"a": 1', "not valid JSON .*at column 8, as it ends too early"),
        (b"[1]", r"holds \[1\]: expected a JSON object"),
        (b"null", "holds None: expected a JSON object"),
        (b"\xff\xfe{\0}\0", "encoded in UTF-16: save it in UTF-8"),
        (b'{"a": "\xe9"}', "not encoded in UTF-8"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half of a character"),
        (b'{"\\ud800": 1}', "half of a character"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more than 4,300 digits"),
    ],
)
def test_an_object_is_read_or_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"(?s)^{path} .*{fault}"):
        read_object(path)
    with pytest.raises(FileError, match=f"(?s)^line 7 .*{fault}"):
        object_of(content, "line 7")


def test_pairs_of_halves_and_a_mark_of_utf_8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}')
    assert read_object(path) == {"a": "😀"}
    assert read_object(tmp_path / "none.json", optional=True) == {}


def made_folder(path: Path) -> None:
    path.mkdir()


def made_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: None, "No such file"),
        (made_folder, "is a folder: give a file"),
        (os.mkfifo, "neither a file nor a folder"),
        (made_loop, "symbolic link"),
    ],
)
@pytest.mark.parametrize("read", [read_object, read_text, open_tensors])
def test_what_is_no_file_is_said(
    tmp_path: Path, make: Callable[[Path], None], fault: str, read: Callable[..., object]
) -> None:
    make(path := tmp_path / "file")
    with pytest.raises(FileError, match=f"^{path} .*{fault}"):
        read(path)
    with pytest.raises(FileError, match="null byte in its path"):
        read(Path("a\0b"))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/random", "/dev/null"])
def test_devices_are_not_read_although_a_user_names_them(tmp_path: Path, device: str) -> None:
    (path := tmp_path / "file").symlink_to(device)
    for read in (Path(device), path):
        with pytest.raises(FileError, match="is neither a file nor a folder: give a file"):
            read_bytes(read, pipe=True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (BOMB, "repeats or contains its own parts too often"),
        ("a: &a [*a]", "repeats or contains its own parts too often"),
        ("a: &a {b: *a}", "repeats or contains its own parts too often"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "nested too deeply"),
        ("a: 0x" + "f" * 10_000, "more than 4,200 digits"),
        ("a: " + "9" * 10_000, "more than 4,300 digits"),
        ("a: 2024-99-99", "cannot be read .ValueError: month must be"),
        ("a: !!python/name:os.system x", "not valid YAML .* at line 1, column 4"),
        ("a: b\0", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
        ("a: 1\na: 2", "a is set twice"),
        ("- a\n" * 100_000, "more than 200,000 characters"),
    ],
)
def test_yaml_is_read_or_refused(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=f"^the file.*{fault}"):
        read_yaml(path, "the file")


def test_aliases_of_yaml_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}")
    assert read_yaml(path, "") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


def test_damaged_tensors_are_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": np.zeros(3)}, path)
    content = path.read_bytes()
    with open_tensors(path) as file:
        assert list(file.keys()) == ["a"]
    for damaged in (b"", content[:20], content[:-3], b"\xff" * 8 + content[8:], b"x" * 99):
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=f"^{path} "):
            open_tensors(path)


def test_values_that_json_cannot_hold_are_named() -> None:
    circle: list[object] = []
    circle.append(circle)
    shared: list[object] = [0] * 9
    for _ in range(30):
        shared = [shared] * 9
    for value, fault in [
        ({(1, 2): 3}, "the name (1, 2)"),
        ({"a": {np.int64(3): 3}}, "the name np.int64(3)"),
        ({"a": 1, 2: 3}, "the name 2"),
        (circle, "nested too deeply"),
        (shared, "nested too deeply"),
        ([10**5000], "whole number of more than"),
        ([-(10**5000)], "whole number of more than"),
        (["\udc80"], "half of a character"),
    ]:
        assert fault in str(why_not_plain(value))
    assert why_not_plain({"a": [1, 2.5, None, "é", (True, np.zeros(3))]}) is None


def test_fields_have_the_types_that_are_expected() -> None:
    fields = json.loads('{"n": 3, "x": 1, "t": "a", "b": true, "none": null, "big": 1e400}')
    assert field(fields, "n", int, "f") == 3
    assert isinstance(field(fields, "x", float, "f"), float)
    assert field(fields, "none", str, "f", "else") == "else"
    assert field(fields, "nowhere", str, "f", "else") == "else"
    for name, kind, fault in [
        ("b", int, "f: b is True: expected a whole number."),
        ("b", float, "f: b is True: expected a number."),
        ("n", bool, "f: n is 3: expected true or false."),
        ("t", list, "f: t is 'a': expected a list."),
        ("none", dict, "f: none is None: expected an object with names."),
        ("nowhere", str, "f has no nowhere: "),
    ]:
        with pytest.raises(FileError, match=fault):
            field(fields, name, kind, "f")
    with pytest.raises(FileError, match="expected a number"):
        field({"n": 10**400}, "n", float, "f")
