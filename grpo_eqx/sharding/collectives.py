"""What a compiled program sends between devices, read from its text.

The text is XLA's HLO after optimisation, `compiled.as_text()`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%[\w.$-]+ = (.*?) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%[\w.$-]+)"
)
_SCOPE = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
    """One instruction of a program by which devices exchange data."""

    kind: str
    """One of `KINDS`."""
    shapes: str
    """Of what each device has afterwards, such as `bf16[1,896,896]`."""
    num_bytes: int
    """Of the same."""
    loops: int
    """How many loops, one in the other, it stands in."""
    scope: str
    """Where in the traced function it comes from, by JAX's `op_name` of it or of its loop."""


def collectives(text: str) -> list[Collective]:
    """All of a program's, each once, however often loops repeat it."""
    computations = dict(_computations(text))
    (entry,) = (name for name, (is_entry, _) in computations.items() if is_entry)
    return list(_walk(computations, entry, 0, ""))


def _computations(text: str) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    """Each function of the program: its name, whether it is the first, and its instructions."""
    name, is_entry, lines = None, False, list[str]()
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            is_entry, name, lines = match[1] is not None, match[2], []
        elif line == "}" and name is not None:
            yield name, (is_entry, lines)
            name = None
        elif name is not None:
            lines.append(line)


def _walk(
    computations: Mapping[str, tuple[bool, list[str]]], name: str, loops: int, scope: str
) -> Iterator[Collective]:
    for line in computations[name][1]:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        result, operation = match[1], match[2]
        said = _SCOPE.search(line)
        here = said[1] if said else scope
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            yield _collective(kind, operation, result, loops, here)
        else:
            inner = loops + (operation == "while")
            for callee in re.findall(r"%([\w.$-]+)", " ".join(_CALLED.findall(line))):
                yield from _walk(computations, callee, inner, here)


def _collective(kind: str, operation: str, result: str, loops: int, scope: str) -> Collective:
    arrays = _ARRAY.findall(result)
    if operation.endswith("-start") and kind != "all-reduce":
        arrays = arrays[1:2]  # the operand, the result, and what keeps them apart
    shapes = ", ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
    sizes = [math.prod(map(int, re.findall(r"\d+", shape))) for _, shape in arrays]
    num_bytes = sum(n * itemsize(dtype) for n, (dtype, _) in zip(sizes, arrays, strict=True))
    return Collective(kind, shapes, num_bytes, loops, scope)


def itemsize(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(1, int(digits[0]) // 8)
