"""The largest arrays of a compiled program, and which line of Python each comes from."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from grpo_eqx.sharding.collectives import itemsize

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.$-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (\w+)\[([\d,]*)\]\{?([^ ]*) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"\bcalls=%?([\w.$-]+)")
_NO_BUFFER = {
    "bitcast", "constant", "get-tuple-element", "parameter", "tuple", "iota", "while", "after-all",
    "opt-barrier", "optimization-barrier", "partition-id",
}  # fmt: skip
"""Instructions whose result is none of its own, or no array in main memory."""
_TILE = re.compile(r"T\((\d+),(\d+)\)")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")
"""A TPU's vector memory, not its HBM."""
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE = re.compile(r"^(\d+) (.*)$")
_REFERENCE = re.compile(r"(\w+)=(\d+)")


class Buffer(NamedTuple):
    """An array that a program makes for itself."""

    num_bytes: int
    """On each device."""
    shape: str
    """Such as `bf16[36,8,2176,2048]`, also on each device."""
    operation: str
    """What makes it, by JAX's name."""
    source: str
    """The file and line that ask for it, `qwen2.py:120`; empty where the compiler does not tell."""


def largest_buffers(text: str, count: int) -> list[Buffer]:
    """The largest results of a program's instructions; of those of one size and place, one.

    **Arguments:** XLA's HLO after optimisation; how many. They need not all be there at a time.
    """
    sources = _Sources(text)
    found: dict[tuple[int, str], Buffer] = {}
    for line in _instructions(text):
        match = _INSTRUCTION.match(line)
        if match is None or match[4] in _NO_BUFFER or _ON_CHIP.search(match[3]):
            continue
        size, source = _padded_bytes(match[1], match[2], match[3]), sources.of(line)
        said = _OP_NAME.search(line)
        operation = said[1].rpartition("/")[2] if said else match[4]
        shape = f"{match[1]}[{match[2]}]"
        found.setdefault((size, source or shape), Buffer(size, shape, operation, source))
    return sorted(found.values(), key=lambda buffer: -buffer.num_bytes)[:count]


def _instructions(text: str) -> Iterator[str]:
    """Those whose results are buffers: what is fused into one instruction makes none."""
    fused = set(_CALLED.findall(text))
    name = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
        elif line == "}":
            name = None
        elif name is not None and name not in fused:
            yield line


def _padded_bytes(dtype: str, shape: str, layout: str) -> int:
    """Of an array as it is stored: a TPU fills up the two fastest dimensions to whole tiles."""
    sizes = [int(size) for size in shape.split(",") if size]
    order = [int(dim) for dim in layout.partition(":")[0].rstrip("}").split(",") if dim.isdigit()]
    tile = _TILE.search(layout)
    if tile and len(order) >= 2:
        for dim, step in zip(order[1::-1], (int(tile[1]), int(tile[2])), strict=True):
            sizes[dim] = -(-sizes[dim] // step) * step
    return math.prod(sizes) * itemsize(dtype)


class _Sources:
    """The tables at the head of a program's text that its stack frames refer to."""

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[str, str]] = {}
        rows: dict[str, str] = {}
        for line in text[: text.find("\nENTRY")].splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                rows = tables.setdefault(line, {})
            elif match := _TABLE.match(line):
                rows[match[1]] = match[2]
            elif line.startswith("%"):
                break
        self._names: Mapping[str, str] = tables.get("FileNames", {})
        self._locations: Mapping[str, str] = tables.get("FileLocations", {})
        self._frames: Mapping[str, str] = tables.get("StackFrames", {})

    def of(self, line: str) -> str:
        """The innermost place in Python that an instruction comes from."""
        if match := _SOURCE.search(line):
            return f"{match[1].rpartition('/')[2]}:{match[2]}"
        frame = _FRAME.search(line)
        if frame is None or frame[1] not in self._frames:
            return ""
        location = dict(_REFERENCE.findall(self._frames[frame[1]])).get("file_location_id", "")
        place = dict(_REFERENCE.findall(self._locations.get(location, "")))
        file = self._names.get(place.get("file_name_id", ""), "").strip('"')
        return f"{file.rpartition('/')[2]}:{place['line']}" if file else ""
