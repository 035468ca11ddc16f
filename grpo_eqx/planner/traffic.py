"""Counts the bytes of main memory that the instructions of a program read and write.

What a fusion reads of an operand may be slices of it, and what it writes may be a part of its
result, which then shares the memory of an operand.
"""

import math
from collections.abc import Mapping, Sequence

from grpo_eqx.planner.hlo import Array, Computation, Instruction, started

_SLICES = {"dynamic-slice", "slice", "gather"}
_ALIASES = {"bitcast", "reshape", "get-tuple-element", "copy-done", "opt-barrier"}


class Traffic:
    """Traffic between a device and its main memory, in a program of these computations."""

    def __init__(self, computations: Mapping[str, Computation]) -> None:
        self._computations = computations

    def of(self, each: Instruction, computation: str) -> float:
        """Returns the bytes that an instruction outside of fusions reads and writes."""
        operands = self._computations[computation].operands(each)
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
        for user, at in self._computations[computation].users.get(value.name, []):
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
        return self._computations[computation].parameters[number]

    def _is_result(self, computation: str, each: Instruction) -> bool:
        """Returns whether an instruction is a fusion's result, or a part of it."""
        if each.is_root:
            return True
        users = [user for user, _ in self._computations[computation].users.get(each.name, [])]
        passes_on = all(x.operation in {*_ALIASES, "tuple"} for x in users)
        return bool(users) and passes_on and all(self._is_result(computation, x) for x in users)

    def _written(self, computation: str, arrays: Sequence[Array]) -> float:
        """Returns the bytes of a fusion's results, `arrays`, that it writes."""
        root = self._computations[computation].root
        named, parts = self._computations[computation].named, [root]
        if root.operation == "tuple":
            parts = [named[name] for name in root.operands]
        if len(parts) != len(arrays):
            return float(sum(map(_in_memory_array, arrays)))
        return sum(
            min(_in_memory_array(array), self._written_part(computation, part))
            for array, part in zip(arrays, parts, strict=True)
        )

    def _written_part(self, computation: str, part: Instruction) -> float:
        named = self._computations[computation].named
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
