"""Time of a step's programs at the devices' peak rates, always as a range.

A program reads and computes and receives; how much of that overlaps is not known before it runs.
The lower end lets all of it overlap, within each trip of each loop: the largest of the three times.
The upper end lets nothing overlap: their sum. Both are at peak rates, which real programs stay
below, and neither includes the host: rewards, logging, checkpoints.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpo_eqx.generation.sent_weights import SEND
from grpo_eqx.planner.routes import Route
from grpo_eqx.planner.trips import Expected, Range, Repeats, Trips, open_loops
from grpo_eqx.planner.work import Level, Loop, Work
from grpo_eqx.tracking.device_links import HOP_SECONDS, LinkRates
from grpo_eqx.tracking.device_peaks import DevicePeaks

Resource = Literal["arithmetic", "memory", "links"]
NOTHING = Range(0.0, 0.0)


class Rates(NamedTuple):
    """Peak rates of one device."""

    peaks: DevicePeaks
    links: LinkRates | None
    """`None` where they are unknown: a program that exchanges data then has no time."""

    def seconds(self, work: Work) -> "Seconds":
        """Returns the time that each kind of work takes alone."""
        received = NOTHING
        for route, num_bytes in work.received.items():
            received = received.plus(self._receiving(route, num_bytes))
        # At worst each exchange waits for all of its hops, which small ones take longest for.
        received = received.plus(Range(0.0, work.hops * HOP_SECONDS))
        arithmetic = work.flops / self.peaks.flops_per_second
        memory = work.num_bytes / self.peaks.bytes_per_second
        return Seconds(Range(arithmetic, arithmetic), Range(memory, memory), received)

    def knows(self, work: Work) -> bool:
        """Returns whether the rates of all links are known that the work needs."""
        return self.links is not None or all(route.kind == "memory" for route in work.received)

    def _receiving(self, route: Route, num_bytes: float) -> Range:
        """Returns the time to receive data.

        In a torus, the device with the fewest links along its group's axes decides: at best it
        receives over all of these links, at worst over one. Between nodes, at best almost nothing
        leaves a node, and the rate is that within a node; at worst everything crosses the network.
        Devices that are threads of one process copy in memory.
        """
        if route.kind == "memory":
            seconds = num_bytes / self.peaks.bytes_per_second
            return Range(seconds, seconds)
        assert self.links is not None
        seconds = num_bytes / self.links.link
        if route.kind == "network":
            return Range(seconds, num_bytes / (self.links.network or self.links.link))
        return Range(seconds / route.links, seconds)


class Seconds(NamedTuple):
    """Time of each kind of work, if it were the only one."""

    arithmetic: Range = NOTHING
    memory: Range = NOTHING
    links: Range = NOTHING

    def plus(self, other: "Seconds") -> "Seconds":
        """Returns the sums of each kind."""
        return Seconds(*(x.plus(y) for x, y in zip(self, other, strict=True)))

    def times(self, number: Range | float) -> "Seconds":
        """Returns the time of as many repetitions."""
        return Seconds(*(x.times(number) for x in self))

    @property
    def total(self) -> Range:
        """The time of all: at best they overlap, at worst they do not."""
        return Range(max(x.least for x in self), sum((x.most for x in self), 0.0))

    @property
    def bound_by(self) -> Resource:
        """The kind that takes longest, each at its best."""
        best: dict[Resource, float] = {
            "arithmetic": self.arithmetic.least,
            "memory": self.memory.least,
            "links": self.links.least,
        }
        return max(best, key=lambda name: best[name])


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of a program: what runs once, or in every trip of an open loop."""

    where: str
    """Words for it, such as `each token`."""
    repeats: Range
    """Number of times that it runs in a step."""
    work: Work
    """Work of one time."""
    seconds: Seconds
    """Time of each kind of work, over all times in a step."""
    total: Range
    """Time of all of it, in a step."""
    received_in: Mapping[str, float]
    """Bytes received in a step, at most, by the file and line of the loop in which they are: the
    outermost whose number of trips is known. What is in no such loop is left out."""

    def to_json(self) -> dict[str, Any]:
        """Returns its figures as plain JSON; ranges are `[least, most]`."""
        return {
            "where": self.where,
            "times": list(self.repeats),
            "flops": self.work.flops,
            "bytes": self.work.num_bytes,
            "received": [
                {**route._asdict(), "bytes": size} for route, size in self.work.received.items()
            ],
            "received_in": dict(self.received_in),
            "seconds": list(self.total),
            **{f"{name}_seconds": list(x) for name, x in self.seconds._asdict().items()},
        }


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """Time of a program in a step, over all the times that the step runs it."""

    parts: Sequence[Part]

    @property
    def seconds(self) -> Seconds:
        """Time of each kind of work."""
        total = Seconds()
        for part in self.parts:
            total = total.plus(part.seconds)
        return total

    @property
    def total(self) -> Range:
        """Time of all of it: of one part after the other."""
        return sum_of([part.total for part in self.parts])

    @property
    def bound_by(self) -> Resource:
        """The kind of work that takes longest."""
        return self.seconds.bound_by

    @property
    def received_most(self) -> tuple[str, float] | None:
        """File and line of the loop in which most is received, and its share of all; if any is."""
        received = sum((Counter(part.received_in) for part in self.parts), Counter())
        every = sum(x.repeats.most * sum(x.work.received.values()) for x in self.parts)
        for source, most in received.most_common(1):
            return source, most / every
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns its figures as plain JSON."""
        return {
            "seconds": list(self.total),
            "bound_by": self.bound_by,
            "parts": [part.to_json() for part in self.parts],
        }


def program_time(
    levels: Sequence[Level], trips: Trips, runs: int, expected: Expected, rates: Rates
) -> ProgramTime | None:
    """Computes the time of a program in a step; `None` where it needs links of unknown rates.

    **Arguments:**

    - `levels`: the work of the program, per loop.
    - `trips`: what is known of its open loops.
    - `runs`: the number of times that a step runs it.
    - `expected`: what completions are like, on average.
    - `rates`: the rates of a device.
    """
    if not all(rates.knows(level.work) for level in levels):
        return None
    repeats = trips.repeats(levels, expected)
    parts: dict[tuple[Loop, ...], Part] = {}
    for level in levels:
        path = open_loops(level.loops)
        part = _part(level, repeats[path], runs, rates)
        parts[path] = _merged(parts[path], part) if path in parts else part
    return ProgramTime([part for part in _by_name(parts.values()) if part.repeats.most > 0])


def _part(level: Level, repeats: Repeats, runs: int, rates: Rates) -> Part:
    work = level.work
    for loop in level.loops:
        work = work * float(1 if loop.trips is None else loop.trips)
    times = repeats.times.times(float(runs))
    seconds = rates.seconds(work).times(times)
    received = times.most * sum(work.received.values(), 0.0)
    # Loops within may be rings, as which XLA sends what a product needs.
    outermost = next((each for each in level.loops if each.trips is not None), None)
    source = "" if outermost is None else outermost.source
    received_in = {source: received} if source and received else {}
    return Part(repeats.where, times, work, seconds, seconds.total, received_in)


def _by_name(parts: Any) -> list[Part]:
    """Merges the same loop of several layers, which are not always a loop themselves."""
    named: dict[tuple[str, Range], Part] = {}
    for part in parts:
        key = part.where, part.repeats
        named[key] = _merged(named[key], part) if key in named else part
    return list(named.values())


def _merged(part: Part, other: Part) -> Part:
    return dataclasses.replace(
        part,
        work=part.work + other.work,
        seconds=part.seconds.plus(other.seconds),
        total=part.total.plus(other.total),
        received_in=Counter(part.received_in) + Counter(other.received_in),
    )


def sum_of(ranges: Sequence[Range]) -> Range:
    """Returns the bounds of a sum."""
    return Range(sum((x.least for x in ranges), 0.0), sum((x.most for x in ranges), 0.0))


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of a step on the devices, one program after the other."""

    programs: Mapping[str, ProgramTime]
    cost_per_second: float | None
    """Price of all devices; `None` where no price was given."""
    ahead: frozenset[str] = frozenset()
    """Programs that other devices run meanwhile, for the next step."""

    @property
    def total(self) -> Range:
        """Seconds of a step."""
        ahead, others = self.sampling, self.training
        return Range(max(ahead.least, others.least), max(ahead.most, others.most))

    @property
    def sampling(self) -> Range:
        """Seconds of the programs that run `ahead`, which wait for the weights."""
        ahead = {SEND, *self.ahead} if self.ahead else {}
        return sum_of([x.total for name, x in self.programs.items() if name in ahead])

    @property
    def training(self) -> Range:
        """Seconds of the other programs."""
        return sum_of([x.total for name, x in self.programs.items() if name not in self.ahead])

    def cost(self, steps: int) -> Range | None:
        """Returns the cost of `steps` steps."""
        if self.cost_per_second is None:
            return None
        return self.total.times(steps * self.cost_per_second)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain JSON."""
        cost = self.cost(1000)
        return {
            "seconds": list(self.total),
            "seconds_per_1000_steps": list(self.total.times(1000.0)),
            "cost_per_1000_steps": None if cost is None else list(cost),
            "programs": {name: each.to_json() for name, each in self.programs.items()},
        }
