"""Counts the work of a compiled program: FLOPs, bytes of memory, and bytes over links.

The counts are those of one device. Loops whose number of trips the compiler does not know stay
open: work is listed per loop, so that the same counts serve any number of trips.

FLOPs are those of matrix products and convolutions. Elementwise arithmetic is not counted: its time
is that of reading and writing its arrays, or is hidden behind a product that it is fused with.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.planner.hlo import (
    COLLECTIVES,
    NO_BUFFER,
    Array,
    Computation,
    Instruction,
    Program,
    started,
    trip_count,
)
from grpo_eqx.planner.product_flops import PRODUCTS, is_attention, product_flops
from grpo_eqx.planner.routes import FindRoute, Groups, Route

ATTENTION = "attention"
"""Scope of the loop that stands for an attention kernel: its trips are the share of all pairs of
blocks that it visits."""

_COUNTED_INSIDE = {*PRODUCTS, "fusion", "call"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_ALIASES = {"bitcast", "reshape", "get-tuple-element", "copy-done", "opt-barrier"}
_NO_TRAFFIC = NO_BUFFER | {"partition-id", "replica-id", "domain", "add-dependency", "after-all"}


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device."""

    flops: float = 0.0
    num_bytes: float = 0.0
    """Bytes read from main memory and written to it."""
    received: Mapping[Route, float] = dataclasses.field(default_factory=dict)
    """Bytes received from other devices."""
    hops: float = 0.0
    """Steps from a TPU to its neighbor that data take one after the other."""

    def __add__(self, other: "Work") -> "Work":
        return self._combined(other, lambda x, y: x + y)

    def __mul__(self, times: float) -> "Work":
        received = {route: times * size for route, size in self.received.items()}
        return Work(times * self.flops, times * self.num_bytes, received, times * self.hops)

    def most(self, other: "Work") -> "Work":
        """Returns the larger of each figure."""
        return self._combined(other, max)

    def _combined(self, other: "Work", combine: Callable[[float, float], float]) -> "Work":
        received = {
            route: combine(self.received.get(route, 0.0), other.received.get(route, 0.0))
            for route in {**self.received, **other.received}
        }
        return Work(
            combine(self.flops, other.flops),
            combine(self.num_bytes, other.num_bytes),
            received,
            combine(self.hops, other.hops),
        )


class Loop(NamedTuple):
    """A loop of a program."""

    name: str
    """Name of its instruction."""
    trips: int | None
    """Number of trips; `None` where it depends on the program's arguments."""
    source: str
    """File and line that ask for it, `engine.py:136`; empty where the compiler omits them."""
    scope: str = ""
    """The `jax.named_scope` that it is in."""


class Level(NamedTuple):
    """Work directly in a loop, without that of loops within it."""

    loops: tuple[Loop, ...]
    """The loop, after those that contain it; empty for work outside of all loops."""
    work: Work
    """Work of one trip."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Level":
        """Inverts `to_json`."""
        received = {Route(kind, links): size for kind, links, size in fields["received"]}
        work = Work(fields["flops"], fields["num_bytes"], received, fields["hops"])
        return cls(tuple(Loop(*loop) for loop in fields["loops"]), work)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain JSON."""
        return {
            "loops": [list(loop) for loop in self.loops],
            "flops": self.work.flops,
            "num_bytes": self.work.num_bytes,
            "received": [[*route, size] for route, size in self.work.received.items()],
            "hops": self.work.hops,
        }


_Levels = dict[tuple[Loop, ...], Work]


def work_levels(text: str, find_route: FindRoute) -> list[Level]:
    """Counts the work of a program, per loop.

    **Arguments:** the program's text, XLA's HLO after optimization; the links between devices.

    Of the branches of a conditional, each figure is that of the branch with the most.
    """
    counter = _Counter(Program(text), find_route)
    return [Level(loops, work) for loops, work in counter.levels(counter.program.entry).items()]


class _Counter:
    def __init__(self, program: Program, find_route: FindRoute) -> None:
        self.program = program
        self.find_route = find_route
        self.levels = functools.cache(self._levels)
        self._indexed = {name: Computation(body) for name, body in program.computations.items()}

    def _levels(self, computation: str) -> _Levels:
        """Counts a computation that runs as a sequence of instructions, per loop within it."""
        found: _Levels = {(): Work()}
        for each in self.program.computations[computation]:
            for loops, work in self._of_instruction(each, computation).items():
                found[loops] = found.get(loops, Work()) + work
        return found

    def _of_instruction(self, each: Instruction, computation: str) -> _Levels:
        if each.operation == "while":
            return self._of_loop(each, computation)
        if each.operation == "conditional":
            merged: _Levels = {}
            for branch in (self.levels(name) for _, name in each.called()):
                merged = {
                    loops: merged.get(loops, Work()).most(branch.get(loops, Work()))
                    for loops in {**merged, **branch}
                }
            return merged
        if self._is_call(each):
            for _, name in each.called():
                return self.levels(name)
        if each.operation.endswith(("-done", "-update")) or each.operation in _NO_TRAFFIC:
            return {}
        work = self._inside(each, computation)
        moved = self._bytes_moved(each, computation)
        if each.operation == "custom-call" and is_attention(
            each, self._operand_arrays(each, computation)
        ):
            loop = Loop(each.name, None, "", ATTENTION)
            return {(): Work(num_bytes=moved), (loop,): Work(work.flops)}
        return {(): dataclasses.replace(work, num_bytes=moved)}

    def _is_call(self, each: Instruction) -> bool:
        is_started = each.operation.endswith("-start") and each.kind not in COLLECTIVES
        return each.operation == "call" or is_started

    def _of_loop(self, each: Instruction, computation: str) -> _Levels:
        parts = dict(each.called())
        condition, body = (self._indexed[parts[name]] for name in ("condition", "body"))
        trips = trip_count(each, self._indexed[computation], condition, body)
        loop = Loop(each.name, trips, self.program.sources.of(each), each.named_scope)
        found: _Levels = {}
        for part in parts.values():
            for inner, work in self.levels(part).items():
                found[loop, *inner] = found.get((loop, *inner), Work()) + work
        return found

    def _inside(self, each: Instruction, computation: str) -> Work:
        """Counts products and collectives, also those within a fusion."""
        if each.kind in COLLECTIVES:
            return self._exchange(each, computation)
        if each.operation in ("fusion", "call"):
            total = Work()
            for _, callee in each.called():
                for inner in self.program.computations[callee]:
                    if inner.operation in _COUNTED_INSIDE or inner.kind in COLLECTIVES:
                        total += self._inside(inner, callee)
            return total
        if each.operation not in PRODUCTS:
            return Work()
        return Work(product_flops(each, self._operand_arrays(each, computation)))

    def _exchange(self, each: Instruction, computation: str) -> Work:
        """Returns the bytes that a device receives at least, and the hops that it waits for.

        Of an all-gather with result R over n devices R(n-1)/n, of an all-reduce twice that, of a
        reduce-scatter or an all-to-all of an operand of n parts n-1 parts.
        """
        groups = Groups.of(each.attributes, self.program.num_devices)
        operands = self._operand_arrays(each, computation)
        size, n = float(sum(array.num_bytes for array in operands)), groups.size
        shares = {
            "all-gather": n - 1,
            "all-reduce": 2 * (n - 1) / n,
            "collective-permute": min(1, n - 1),
        }
        received = size * shares.get(each.kind, (n - 1) / n)
        if not received:
            return Work()
        route, hops = self.find_route(groups.first)
        if each.kind == "collective-permute":  # a step of a ring: neighbors exchange
            hops = min(1, hops)
        elif each.kind == "all-reduce":
            hops *= 2
        return Work(received={route: received}, hops=float(hops))

    def _operand_arrays(self, each: Instruction, computation: str) -> list[Array]:
        named = self._indexed[computation].named
        return [array for x in each.operands if x in named for array in named[x].arrays]

    def _bytes_moved(self, each: Instruction, computation: str) -> float:
        """Returns the bytes that an instruction outside of fusions reads and writes."""
        named = self._indexed[computation].named
        operands = [named[name] for name in each.operands if name in named]
        if each.operation == "fusion":
            (callee,) = (name for kind, name in each.called() if kind == "calls")
            read = sum(
                min(_in_memory(x), self._read_of_parameter(callee, i))
                for i, x in enumerate(operands)
            )
            return read + self._written(callee, each.arrays)
        written = sum(map(_in_memory_array, _results(each)))
        if each.kind in _SLICES:
            indices = sum(_in_memory(x) for x in operands[1:])
            sliced = float(sum(array.stored_bytes for array in _results(each)))
            return min(_in_memory(operands[0]), sliced) + indices + written
        updates = _updates(each)
        if updates:
            return 2.0 * sum(_in_memory(operands[i]) for i in updates)
        distinct = {x.name: x for x in operands}.values()
        return sum(map(_in_memory, distinct)) + written

    def _read_of_parameter(self, computation: str, number: int) -> float:
        """Returns the bytes of a fusion's parameter that it reads: slices of it, if only those."""
        parameter = self._parameter(computation, number)
        read, passed_on = self._read_of(computation, parameter)
        return _size(parameter) if passed_on else min(_size(parameter), read)

    def _read_of(
        self, computation: str, value: Instruction, copied: bool = False
    ) -> tuple[float, bool]:
        """Returns the bytes that are read of a value, and whether it is passed on as a result.

        A fusion computes a copy only where it is read, so a slice of one reads no more than a slice
        of the value. But what updates a copy reads all of it.
        """
        total, passed_on = 0.0, value.is_root
        for user, at in self._indexed[computation].users.get(value.name, []):
            is_copy = user.operation == "copy"
            if user.operation in _ALIASES or is_copy:
                follows = True
            elif user.operation == "fusion":
                ((_, callee),) = user.called()
                read, follows = self._read_of(callee, self._parameter(callee, at), copied)
                total += read
            else:
                read = self._read_by(computation, user, at, copied)
                total, follows = total + read, False
            if follows:
                read, further = self._read_of(computation, user, copied or is_copy)
                total, passed_on = total + read, passed_on or further
        return total, passed_on

    def _read_by(self, computation: str, user: Instruction, at: int, copied: bool) -> float:
        """Returns the bytes of operand number `at` that an instruction reads; infinite for all."""
        if at == 0 and user.operation in _SLICES:
            return _size(user)
        in_place = at == 0 and _updates(user) and self._is_result(computation, user)
        return 0.0 if in_place and not copied else math.inf

    def _parameter(self, computation: str, number: int) -> Instruction:
        return self._indexed[computation].parameters[number]

    def _is_result(self, computation: str, each: Instruction) -> bool:
        """Returns whether an instruction is a fusion's result, or a part of it."""
        if each.is_root:
            return True
        users = [user for user, _ in self._indexed[computation].users.get(each.name, [])]
        passes_on = all(x.operation in {*_ALIASES, "tuple"} for x in users)
        return bool(users) and passes_on and all(self._is_result(computation, x) for x in users)

    def _written(self, computation: str, arrays: Sequence[Array]) -> float:
        """Returns the bytes of a fusion's results, `arrays`, that it writes."""
        root = self._indexed[computation].root
        named, parts = self._indexed[computation].named, [root]
        if root.operation == "tuple":
            parts = [named[name] for name in root.operands]
        if len(parts) != len(arrays):
            return float(sum(map(_in_memory_array, arrays)))
        return sum(
            min(_in_memory_array(array), self._written_part(computation, part))
            for array, part in zip(arrays, parts, strict=True)
        )

    def _written_part(self, computation: str, part: Instruction) -> float:
        named = self._indexed[computation].named
        part = _origin(part, named)
        if updates := _updates(part):
            updated = _origin(named[part.operands[0]], named)
            if updated.operation != "parameter" and not _updates(updated):
                return _size(part)
            return sum(_size(named[part.operands[i]]) for i in updates)
        if part.operation == "fusion" and len(part.arrays) == 1:
            ((_, callee),) = part.called()
            return self._written(callee, part.arrays)
        return _size(part)


def _origin(each: Instruction, named: Mapping[str, Instruction]) -> Instruction:
    """Returns the instruction that a value is only another name or shape of."""
    while each.operation in _ALIASES and each.operands[0] in named:
        each = named[each.operands[0]]
    return each


def _updates(each: Instruction) -> Sequence[int]:
    """Returns which operands an operation writes into its first one; none where it does not."""
    if each.operation == "dynamic-update-slice":
        return [1]
    if each.operation == "scatter":
        number = (len(each.operands) - 1) // 2
        return range(number + 1, 2 * number + 1)
    return []


def _results(each: Instruction) -> list[Array]:
    """Returns the arrays that an instruction makes, also where others wait for it to be done."""
    if not each.operation.endswith("-start") or each.kind == "all-reduce":
        return each.arrays
    return each.arrays[:1] if each.kind == "copy" else started(each)


def _size(each: Instruction) -> float:
    return float(sum(array.stored_bytes for array in each.arrays))


def _in_memory(each: Instruction) -> float:
    return sum(map(_in_memory_array, each.arrays), 0.0)


def _in_memory_array(array: Array) -> float:
    return 0.0 if array.on_chip else float(array.stored_bytes)
