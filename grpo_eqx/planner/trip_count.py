"""Finds the number of trips of a loop, where it is a constant of the program."""

import re

from grpo_eqx.planner.hlo import Computation, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def trip_count(
    loop: Instruction, around: Computation, condition: Computation, body: Computation
) -> int | None:
    """Returns the number of trips of a `while`; `None` where it depends on the arguments.

    Compilers for CPUs and GPUs state it. That for TPUs does not: it is then found for a counter
    that starts at a constant, grows by a constant, and is compared with a constant. The steps of a
    ring that exchanges parts of an operand between products are such a loop, of two steps a trip.

    **Arguments:** the loop, the computation that it is in, and its own two.
    """
    if known := _KNOWN.search(loop.line):
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
    """Returns what a trip adds to the counter; `None` where it is no constant."""
    each = body.origin(body.root.operands[counter])
    if each.operation != "add":
        return None
    left, right = each.operands
    return body.constant(right) if body.element(left) == counter else None
