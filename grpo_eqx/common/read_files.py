"""Files from outside: a function for each format, which says whatever is wrong in one sentence.

What they return is plain data: it can be written as JSON and in UTF-8, and is nested at most 100
deep. `reading` does the same for the formats that libraries read.
"""

import codecs
import contextlib
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_eqx.common.errors import FileError, UserError, first_line, without_repetition
from grpo_eqx.common.plain_data import DEEPEST, brief, why_not_plain

_MOST_BYTES = 500_000_000
"""Most bytes of a file that is read as a whole, unless the user names the file."""
_MOST_YAML = 200_000
"""Most characters of a YAML file, because parsing thousands takes a second."""
_MOST_NODES = 100_000
"""Most values of a YAML file, aliases included."""
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character, or the start of a pair, in JSON."""


class _UnreadableError(ValueError):
    """A file that cannot be read. The message states the fault and the fix in one clause."""


@contextlib.contextmanager
def reading(called: str, again: str = "correct it, or copy it again") -> Iterator[None]:
    """Turns every error of reading a file into a `FileError`.

    **Arguments:**

    - `called`: what to call the file: its path, perhaps after the setting that names it.
    - `again`: the fix for a damaged file.
    """
    try:
        yield
    except FileError:
        raise
    except UserError as error:  # such as for a name that is set twice
        raise FileError(f"{called}: {error}") from error
    except Exception as error:
        raise FileError(f"{called} {what_is_wrong(error, again)}.") from error
    except BaseException as error:  # panics of libraries written in Rust
        if type(error).__name__ != "PanicException":
            raise
        raise FileError(f"{called} is damaged ({brief(str(error))}): {again}.") from error


def what_is_wrong(error: Exception, again: str) -> str:
    """Describes an error of reading a file, as a clause with the fix."""
    match error:
        case _UnreadableError():
            return str(error)
        case IsADirectoryError():
            return "is a folder: give a file"
        case OSError():
            return f"cannot be read: {error.strerror or first_line(error)}; check its path"
        case UnicodeDecodeError():
            return "is not encoded in UTF-8, perhaps in Latin-1: save it in UTF-8"
        case json.JSONDecodeError():
            return f"is not valid JSON ({_json_fault(error)}): {again}"
        case yaml.YAMLError():
            return f"is not valid YAML ({_yaml_fault(error)}): {again}"
        case RecursionError():
            return f"is nested too deeply: use at most {DEEPEST} levels"
        case MemoryError():
            return f"does not fit into memory, or is damaged: {again}"
        case ValueError() if "null byte" in str(error):
            return "has a null byte in its path: remove it"
        case ValueError() if "integer string conversion" in str(error):
            return "has a whole number of more than 4,300 digits: write it as a text"
    return f"cannot be read ({type(error).__name__}: {first_line(error)[:200]}): {again}"


def expanded(path: str | Path) -> Path:
    """Returns a path with the home folder in place of a leading `~`, as in a shell.

    Keeps the `~` of a user without a home folder, for which `Path.expanduser` would raise.
    """
    return Path(os.path.expanduser(path))


def read_bytes(path: Path, called: str = "", *, pipe: bool = False) -> bytes:
    """Reads the bytes of a file.

    **Arguments:**

    - `path`: the path.
    - `called`: what to call the file in messages, by default its path.
    - `pipe`: whether the user names the file, so that it may be a pipe, or large.

    Raises `FileError` for anything but a file, and for a file that is too large.
    """
    with reading(called or str(path)), opened(path, pipe=pipe) as file:
        content = file.read(-1 if pipe else _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES and not pipe:
            raise _UnreadableError(f"has more than {_MOST_BYTES:,} bytes: give a smaller file")
        return content


def opened(path: Path, *, pipe: bool = False) -> io.BufferedReader:
    """Opens a file; raises an error, for `reading`, for endless files such as /dev/zero.

    A pipe, which may wait forever, is opened only with `pipe`.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipe and stat.S_ISFIFO(mode))):
        raise _UnreadableError("is neither a file nor a folder: give a file")
    return path.open("rb")


def read_text(path: Path, called: str = "", *, pipe: bool = False) -> str:
    """Reads a text file like `read_bytes`; raises `FileError` for encodings other than UTF-8."""
    content = read_bytes(path, called, pipe=pipe)
    with reading(called or str(path)):
        return decoded(content)


def decoded(content: bytes) -> str:
    """Decodes UTF-8; call it within `reading`, which names the file."""
    if content.startswith(_UTF16):
        raise _UnreadableError("is encoded in UTF-16: save it in UTF-8")
    return content.removeprefix(codecs.BOM_UTF8).decode()


def parsed(text: str, *, unique: bool = False) -> Any:
    """Returns the plain data of a JSON text; call it within `reading`, which names the file.

    **Arguments:**

    - `text`: the text.
    - `unique`: whether to reject a name that occurs twice in an object. Otherwise the last one
      counts.
    """
    found = json.loads(text, object_pairs_hook=without_repetition if unique else None)
    # Only deep nesting and halves of characters are valid JSON and not plain data, so few texts
    # need the slow look at every value.
    if text.count("[") + text.count("{") > DEEPEST or _HALF.search(text):
        _check_plain(found)
    return found


def _check_plain(found: Any) -> None:
    """Raises an error, for `reading`, for contents that are not plain data."""
    if (fault := why_not_plain(found)) is not None:
        raise _UnreadableError(fault)


def read_json(path: Path, called: str = "") -> Any:
    """Reads a JSON file; raises `FileError` like `read_text`, and for invalid JSON."""
    text = read_text(path, called)
    with reading(called or str(path)):
        return parsed(text)


def read_object(path: Path, called: str = "", *, optional: bool = False) -> dict[str, Any]:
    """Reads a file with one JSON object; raises `FileError` like `read_json`.

    **Arguments:**

    - `path`, `called`: the path, and what to call the file.
    - `optional`: whether a missing file counts as an object without fields.
    """
    if optional and not os.path.lexists(path):
        return {}
    return as_object(read_json(path, called), called or str(path))


def object_of(line: str | bytes, called: str) -> dict[str, Any]:
    """Returns the object in a line of a JSONL file; raises `FileError` like `read_object`."""
    return as_object(value_of(line, called), called)


def value_of(
    line: str | bytes, called: str, again: str = "correct it", *, unique: bool = False
) -> Any:
    """Returns the data in a line of a JSONL file; raises `FileError` like `read_json`."""
    with reading(called, again):
        return parsed(line if isinstance(line, str) else decoded(line), unique=unique)


def as_object(found: Any, called: str) -> dict[str, Any]:
    """Returns the contents of a file; raises `FileError` unless they are an object."""
    if not isinstance(found, dict):
        raise FileError(f"{called} holds {brief(found)}: expected a JSON object.")
    return found


def read_yaml(path: Path | None, called: str) -> Any:
    """Reads a file of JSON or else YAML; raises `FileError`, also for a name that occurs twice.

    **Arguments:**

    - `path`: the path; `None` for standard input.
    - `called`: what to call the file in messages.
    """
    with reading(called):
        text = sys.stdin.read() if path is None else read_text(path, called, pipe=True)
        if not text.strip():
            raise _UnreadableError("is empty: write settings into it, as in `steps: 100`")
        try:
            return parsed(text, unique=True)
        except json.JSONDecodeError as error:  # JSON comes first: YAML lacks tabs and surrogates
            try:
                found = _from_yaml(text)
            except yaml.YAMLError as of_yaml:
                raise (error if text.lstrip().startswith("{") else of_yaml) from None
        _check_plain(found)
        return found


def _from_yaml(text: str) -> Any:
    if len(text) > _MOST_YAML:
        raise _UnreadableError(f"has more than {_MOST_YAML:,} characters: shorten it")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the values below a YAML node, where an alias counts at each of its places.

    A few aliases of aliases can stand for billions of values, and an alias that contains itself for
    endless ones.
    """
    if (size := known.get(id(node))) is not None:
        return size
    known[id(node)] = _MOST_NODES  # for a node that contains itself
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    size = 1
    for part in parts:
        size += sum(_size(x, known) for x in (part if isinstance(part, tuple) else (part,)))
    if size >= _MOST_NODES:
        raise _UnreadableError(
            "repeats or contains its own parts too often: write them out, no &names"
        )
    known[id(node)] = size
    return size


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, changed below to reject repeated names."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    without_repetition([(loader.construct_object(key, deep=True), None) for key in keys])
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _json_fault(error: json.JSONDecodeError) -> str:
    hint, line = "", f"line {error.lineno}, " if "\n" in error.doc else ""
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
        hint = ", as it ends too early"
    elif error.doc[error.pos] in "/#":
        hint = ", and JSON has no comments"
    return f"{error.msg} at {line}column {error.colno}{hint}"


def _yaml_fault(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = getattr(error, "problem", None) or "it cannot be parsed"
    return f"{problem} at line {mark.line + 1}, column {mark.column + 1}"


def open_tensors(path: Path, called: str = "") -> Any:
    """Opens a safetensors file, to be read in parts, in a `with`.

    Raises `FileError` for an unreadable file, and for a failed download in its place.
    """
    from safetensors import safe_open

    with reading(called or str(path)):
        opened(path).close()
        return safe_open(path, framework="numpy")
