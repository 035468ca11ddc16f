"""Counts the work of a compiled program: FLOPs, bytes of memory, and bytes over links.

The counts are those of one device. Loops whose number of trips the compiler does not know stay
open: work is listed per loop, so that the same counts serve any number of trips.

FLOPs are those of matrix products and convolutions. Elementwise arithmetic is not counted: its time
is that of reading and writing its arrays, or is hidden behind a product that it is fused with.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_eqx.planner.hlo import (
    COLLECTIVES,
    NO_BUFFER,
    Array,
    Instruction,
    Program,
    trip_count,
)
from grpo_eqx.planner.product_flops import PRODUCTS, is_attention, product_flops
from grpo_eqx.planner.routes import FindRoute, Groups, Route
from grpo_eqx.planner.traffic import Traffic

ATTENTION = "attention"
"""Scope of the loop that stands for an attention kernel: its trips are the share of all pairs of
blocks that it visits."""

_COUNTED_INSIDE = {*PRODUCTS, "fusion", "call"}
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

    **Arguments:**

    - `text`: the program, as XLA's HLO after optimization.
    - `find_route`: finds the links between devices.

    Of the branches of a conditional, each figure is that of the branch with the most.
    """
    counter = _Counter(Program(text), find_route)
    return [Level(loops, work) for loops, work in counter.levels(counter.program.entry).items()]


class _Counter:
    def __init__(self, program: Program, find_route: FindRoute) -> None:
        self.program = program
        self.find_route = find_route
        self.levels = functools.cache(self._levels)
        self.traffic = Traffic(program.computations)

    def _levels(self, computation: str) -> _Levels:
        """Counts a computation that runs as a sequence of instructions, per loop within it."""
        found: _Levels = {(): Work()}
        for each in self.program.computations[computation].body:
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
        moved = self.traffic.of(each, computation)
        if each.operation == "custom-call" and is_attention(each, self._arrays(each, computation)):
            loop = Loop(each.name, None, "", ATTENTION)
            return {(): Work(num_bytes=moved), (loop,): Work(work.flops)}
        return {(): dataclasses.replace(work, num_bytes=moved)}

    def _is_call(self, each: Instruction) -> bool:
        is_started = each.operation.endswith("-start") and each.kind not in COLLECTIVES
        return each.operation == "call" or is_started

    def _of_loop(self, each: Instruction, computation: str) -> _Levels:
        parts = dict(each.called())
        computations = self.program.computations
        condition, body = (computations[parts[name]] for name in ("condition", "body"))
        trips = trip_count(each, computations[computation], condition, body)
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
                for inner in self.program.computations[callee].body:
                    if inner.operation in _COUNTED_INSIDE or inner.kind in COLLECTIVES:
                        total += self._inside(inner, callee)
            return total
        if each.operation not in PRODUCTS:
            return Work()
        return Work(product_flops(each, self._arrays(each, computation)))

    def _exchange(self, each: Instruction, computation: str) -> Work:
        """Returns the fewest bytes that a device can receive, and the hops that it waits for.

        Over n devices, an all-gather with a result of R bytes receives R(n-1)/n, and an all-reduce
        twice as many. A reduce-scatter or all-to-all, whose operand has n parts, receives n-1
        parts.
        """
        groups = Groups.of(each.attributes, self.program.num_devices)
        operands = self._arrays(each, computation)
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

    def _arrays(self, each: Instruction, computation: str) -> list[Array]:
        """Returns the arrays of an instruction's operands."""
        operands = self.program.computations[computation].operands(each)
        return [array for operand in operands for array in operand.arrays]
