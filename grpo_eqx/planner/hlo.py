"""Reads a compiled program's text: its instructions, loops, collectives and largest arrays.

The text is XLA's HLO after optimization, `compiled.as_text()`.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.$-]+) = (.*?) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.$-]+)")
_PARENTHESIS = re.compile(r"[()]")
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_CONSTANT = re.compile(r"constant\((-?\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
_COPIES = {"copy", "bitcast", "convert", "copy-done", "copy-start"}
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.$-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')

NO_BUFFER = {
    "bitcast", "constant", "get-tuple-element", "parameter", "tuple", "iota", "while", "after-all",
    "opt-barrier", "optimization-barrier", "partition-id",
}  # fmt: skip
"""Operations whose result aliases another's memory, or is not an array in main memory."""
_TILE = re.compile(r"T\((\d+),(\d+)\)")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")
"""Mark of a TPU's vector memory, as opposed to its HBM."""
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_REFERENCE = re.compile(r"(\w+)=(\d+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """An instruction by which devices exchange data."""

    kind: str
    """One of `COLLECTIVES`."""
    shapes: str
    """Its result on each device, such as `bf16[1,896,896]`."""
    num_bytes: int
    """Size of that result."""
    loops: int
    """Number of nested loops that contain it."""
    scope: str
    """JAX's `op_name` of the instruction, or of the loop that contains it."""


class Buffer(NamedTuple):
    """An array that a program allocates for itself."""

    num_bytes: int
    """Size on each device."""
    shape: str
    """Type and shape on each device, such as `bf16[36,8,2176,2048]`."""
    operation: str
    """JAX's name for the operation that makes it."""
    source: str
    """File and line that ask for it, `decoder.py:120`; empty where the compiler omits them."""


class Array(NamedTuple):
    """An array in a program's text."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str
    """Order of its dimensions, tiles and memory space, as in `1,0:T(8,128)S(1)`."""

    @classmethod
    def all_in(cls, text: str) -> "list[Array]":
        """Finds the arrays of a type, which may be a tuple of them."""
        return [cls(dtype, _sizes(sizes), layout) for dtype, sizes, layout in _ARRAY.findall(text)]

    @property
    def shape(self) -> str:
        """Type and shape, such as `bf16[36,8]`."""
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return self.size * _itemsize(self.dtype)

    @property
    def stored_bytes(self) -> int:
        """Size as stored: a TPU pads its two fastest dimensions to whole tiles."""
        sizes = list(self.sizes)
        order = [int(dim) for dim in self.layout.partition(":")[0].split(",") if dim.isdigit()]
        tile = _TILE.search(self.layout)
        if tile and len(order) >= 2:
            for dim, step in zip(order[1::-1], (int(tile[1]), int(tile[2])), strict=True):
                sizes[dim] = -(-sizes[dim] // step) * step
        return math.prod(sizes) * _itemsize(self.dtype)

    @property
    def on_chip(self) -> bool:
        """Whether it is in a TPU's vector memory, as opposed to its HBM."""
        return _ON_CHIP.search(self.layout) is not None


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    result: str
    """The text of its result's type: dtype, shape and layout."""
    operation: str
    operands: tuple[str, ...]
    """Names of its operands."""
    attributes: str
    """The text after its operands."""
    line: str
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """Its result, or the parts of one that is a tuple."""
        return Array.all_in(self.result)

    @property
    def kind(self) -> str:
        """The operation, without the mark of one that runs beside others until it is done."""
        return self.operation.removesuffix("-start")

    @property
    def op_name(self) -> str | None:
        """Origin in the traced function, in JAX's words."""
        match = _OP_NAME.search(self.line)
        return match[1] if match else None

    @property
    def named_scope(self) -> str:
        """The innermost `jax.named_scope` around it; without one, another part of its origin."""
        around = (self.op_name or "").rpartition("/")[0]
        # Transformations are written around a scope, as in transpose(jvp(scope)).
        return around.rpartition("/")[2].rpartition("(")[2].rstrip(")")

    def called(self) -> Iterator[tuple[str, str]]:
        """Yields the computations that it runs, each as (attribute that names it, name)."""
        for attribute, names in _CALLED.findall(self.line):
            for name in re.findall(r"[\w.$-]+", names):
                yield attribute, name


class Computation:
    """A computation's instructions: in order, by name, and by what they use."""

    def __init__(self) -> None:
        self.body: list[Instruction] = []

    @functools.cached_property
    def named(self) -> Mapping[str, Instruction]:
        return {each.name: each for each in self.body}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(each for each in self.body if each.is_root)

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        found = ((_PARAMETER.search(x.line), x) for x in self.body if x.operation == "parameter")
        return {int(match[1]): each for match, each in found if match}

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[tuple[Instruction, int]]]:
        """Instructions that use a value, and as which of their operands."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for each in self.body:
            for at, name in enumerate(each.operands):
                found.setdefault(name, []).append((each, at))
        return found

    def operands(self, each: Instruction) -> list[Instruction]:
        """Returns the instructions that compute an instruction's operands."""
        return [self.named[name] for name in each.operands if name in self.named]

    def origin(self, name: str) -> Instruction:
        """Returns the instruction that computes a value, before copies of it."""
        each = self.named[name]
        while each.operation in _COPIES and each.operands[0] in self.named:
            each = self.named[each.operands[0]]
        return each

    def constant(self, name: str) -> int | None:
        """Returns the value of a scalar constant; `None` for anything else."""
        match = _CONSTANT.search(self.origin(name).line)
        return int(match[1]) if match else None

    def element(self, name: str) -> int | None:
        """Returns the element of a tuple that a value is; `None` for anything else."""
        each = self.origin(name)
        match = _INDEX.search(each.attributes) if each.operation == "get-tuple-element" else None
        return int(match[1]) if match else None


class Program:
    """The computations of a program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.sources = _Sources(text)
        partitions = _PARTITIONS.search(text[: text.find("\n")])
        self.num_devices = int(partitions[1]) if partitions else 1
        name = None
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                name = match[2]
                self.computations[name] = Computation()
                self.entry = name if match[1] else self.entry
            elif line == "}":
                name = None
            elif name is not None and (match := _INSTRUCTION.match(line)):
                is_root, own, result, operation = match.groups()
                end = _end_of_operands(line, match.end())
                operands = tuple(_NAME.findall(line, match.end(), end))
                each = Instruction(
                    own, result, operation, operands, line[end:], line, is_root is not None
                )
                self.computations[name].body.append(each)

    def walk(self, name: str, loops: int, scope: str) -> Iterator[tuple[Instruction, int, str]]:
        """Yields instructions in call order, each with its number of loops and its scope."""
        for instruction in self.computations[name].body:
            here = instruction.op_name or scope
            yield instruction, loops, here
            inner = loops + (instruction.operation == "while")
            # A reduction's function is called for each element: it exchanges nothing.
            if instruction.kind not in COLLECTIVES:
                for _, callee in instruction.called():
                    yield from self.walk(callee, inner, here)

    def allocating(self) -> Iterator[Instruction]:
        """Yields instructions whose results are buffers: those inside a fusion have none."""
        every = [each for computation in self.computations.values() for each in computation.body]
        fused = {name for each in every for kind, name in each.called() if kind == "calls"}
        for name, computation in self.computations.items():
            if name not in fused:
                yield from computation.body


def _end_of_operands(line: str, start: int) -> int:
    """Returns where the parenthesis closes that opens before `start`."""
    depth = 1
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


def trip_count(
    loop: Instruction, around: Computation, condition: Computation, body: Computation
) -> int | None:
    """Returns the number of trips of a `while`; `None` where it depends on the arguments.

    Compilers for CPUs and GPUs state the number. The compiler for TPUs does not: there, the number
    is computed for a counter that starts at a constant, grows by a constant, and is compared with a
    constant. A ring that exchanges parts of an operand between products is such a loop, each trip
    of which makes two steps.

    **Arguments:**

    - `loop`: the instruction.
    - `around`: the computation that the instruction is in.
    - `condition`, `body`: the two computations that the loop runs.
    """
    if known := _KNOWN_TRIPS.search(loop.line):
        return int(known[1])
    test = condition.root
    if test.operation != "compare" or "direction=LT" not in test.attributes:
        return None
    counter = condition.element(test.operands[0])
    start = around.origin(loop.operands[0])
    if counter is None or start.operation != "tuple" or body.root.operation != "tuple":
        return None
    step = _step(body, counter)
    first = around.constant(start.operands[counter])
    bound = condition.constant(test.operands[1])
    if bound is None:
        at = condition.element(test.operands[1])
        if at is None or body.element(body.root.operands[at]) != at:
            return None
        bound = around.constant(start.operands[at])
    if first is None or bound is None or not step:
        return None
    return max(0, -(-(bound - first) // step))


def _step(body: Computation, counter: int) -> int | None:
    """Returns what a trip adds to the counter; `None` where it is not a constant."""
    each = body.origin(body.root.operands[counter])
    if each.operation != "add":
        return None
    left, right = each.operands
    return body.constant(right) if body.element(left) == counter else None


def collectives(text: str) -> list[Collective]:
    """Lists a program's collectives, each once, however often loops repeat it."""
    program = Program(text)
    return [
        _collective(instruction, loops, scope)
        for instruction, loops, scope in program.walk(program.entry, 0, "")
        if instruction.kind in COLLECTIVES
    ]


def started(instruction: Instruction) -> list[Array]:
    """Returns the results of an operation that is started: operands, results, then a context."""
    number = len(instruction.operands)
    return instruction.arrays[number : 2 * number]


def _collective(instruction: Instruction, loops: int, scope: str) -> Collective:
    arrays = instruction.arrays
    if instruction.operation.endswith("-start") and instruction.kind != "all-reduce":
        arrays = started(instruction)
    shapes = ", ".join(array.shape for array in arrays)
    num_bytes = sum(array.num_bytes for array in arrays)
    return Collective(instruction.kind, shapes, num_bytes, loops, scope)


def largest_buffers(text: str, count: int) -> list[Buffer]:
    """Lists the largest results of a program's instructions, largest first.

    Results of the same size and source line count once. They need not be live at the same time.
    """
    program = Program(text)
    found: dict[tuple[int, str], Buffer] = {}
    for instruction in program.allocating():
        if instruction.result.startswith("(") or instruction.operation in NO_BUFFER:
            continue
        for array in instruction.arrays:
            if array.on_chip:
                continue
            size, source = array.stored_bytes, program.sources.of(instruction)
            name = instruction.op_name
            operation = name.rpartition("/")[2] if name else instruction.operation
            buffer = Buffer(size, array.shape, operation, source)
            found.setdefault((size, source or array.shape), buffer)
    return sorted(found.values(), key=lambda buffer: -buffer.num_bytes)[:count]


def _sizes(shape: str) -> tuple[int, ...]:
    """Parses the sizes of an array; one that may be smaller counts in full."""
    return tuple(int(size.removeprefix("<=")) for size in shape.split(",") if size)


def _itemsize(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return 1 if digits is None else max(1, int(digits[0]) // 8)


class _Sources:
    """Tables at the head of a program's text that resolve its stack frames."""

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[str, str]] = {}
        rows: dict[str, str] = {}
        for line in text[: text.find("\nENTRY")].splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                rows = tables.setdefault(line, {})
            elif match := _TABLE_ROW.match(line):
                rows[match[1]] = match[2]
            elif line.startswith("%"):
                break
        self._names: Mapping[str, str] = tables.get("FileNames", {})
        self._locations: Mapping[str, str] = tables.get("FileLocations", {})
        self._frames: Mapping[str, str] = tables.get("StackFrames", {})

    def of(self, instruction: Instruction) -> str:
        """Returns the innermost line of Python that an instruction comes from; empty if unknown."""
        if match := _SOURCE.search(instruction.line):
            return f"{match[1].rpartition('/')[2]}:{match[2]}"
        frame = _FRAME.search(instruction.line)
        if frame is None or frame[1] not in self._frames:
            return ""
        location = dict(_REFERENCE.findall(self._frames[frame[1]])).get("file_location_id", "")
        line = dict(_REFERENCE.findall(self._locations.get(location, "")))
        file = self._names.get(line.get("file_name_id", ""), "").strip('"')
        return f"{file.rpartition('/')[2]}:{line['line']}" if file else ""
