"""Compiles one program and reads the memory it takes, its largest arrays, and its work."""

import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.program_facts import code_fingerprint
from grpo_eqx.planner.devices import Target
from grpo_eqx.planner.hlo import Buffer, collectives, largest_buffers
from grpo_eqx.planner.plan_cache import remembered
from grpo_eqx.planner.routes import route_finder
from grpo_eqx.planner.work import Level, work_levels
from grpo_eqx.sharding.device_memory import parse_size

_NUM_BUFFERS = 5
_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NEEDED = re.compile(r"HLO temporaries \((\S+)\)|memory space hbm. Used (\S+) of")


class Exchange(NamedTuple):
    """All collectives of one kind in a program."""

    kind: str
    instructions: int
    """Number of instructions, however often loops repeat them."""
    num_bytes: int
    """Bytes of their results on one device, each counted once."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Memory, largest arrays, collectives and work of a program; bytes are per device.

    Sizes are `None` where the compiler refused the program before it had them.
    """

    peak_bytes: int
    """Peak of arguments, results, temporaries and code together. For a program that the compiler
    refuses, the bytes that it says are needed."""
    argument_bytes: int | None
    output_bytes: int | None
    """Bytes of results that are not written over arguments."""
    temporary_bytes: int | None
    """Bytes of the peak besides arguments, results and code."""
    code_bytes: int | None
    accepted: bool
    """Whether the compiler, which knows of nothing else on the device, accepts the program."""
    seconds: float
    """Seconds that compiling took."""
    buffers: tuple[Buffer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    levels: tuple[Level, ...] = ()
    """Work of each loop; empty for a program that the compiler refuses."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "CompiledProgram":
        """Inverts `to_json`."""
        buffers = tuple(Buffer(**each) for each in fields["buffers"])
        exchanges = tuple(Exchange(**each) for each in fields["exchanges"])
        levels = tuple(Level.from_json(each) for each in fields["levels"])
        read = {"buffers": buffers, "exchanges": exchanges, "levels": levels}
        return cls(**{**fields, **read})

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "buffers": [buffer._asdict() for buffer in self.buffers],
            "exchanges": [exchange._asdict() for exchange in self.exchanges],
            "levels": [level.to_json() for level in self.levels],
        }


def compile_program(
    lowered: jax.stages.Lowered,
    target: Target,
    devices: Sequence[jax.Device],
    begin: Callable[[], None],
) -> CompiledProgram:
    """Compiles a program for the devices, or reads an earlier result from disk.

    **Arguments:**

    - `lowered`: the program.
    - `target`: the devices and the compiler that it is for.
    - `devices`: the devices in the program's order.
    - `begin`: called before the program is compiled, but not where an earlier result is read.

    Raises the compiler's errors, except for a lack of memory, which is a result.
    """

    def compiled() -> CompiledProgram:
        begin()
        return _compile(lowered, target, devices)

    if jax.process_count() > 1:  # all must compile the same, whatever each has on disk
        return compiled()
    question = {
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        "devices": [target.device_kind, target.name, *(device.id for device in devices)],
        "compiler": [jax.__version__, target.compiler, *map(os.environ.get, _COMPILER_FLAGS)],
        "code": code_fingerprint(),
    }
    answer = remembered(question, lambda: compiled().to_json())
    return CompiledProgram.from_json(answer)


def _compile(
    lowered: jax.stages.Lowered, target: Target, devices: Sequence[jax.Device]
) -> CompiledProgram:
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        said, needed = str(error), _NEEDED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in said or "memory space vmem" in said:
            raise
        # Where the compiler does not say how much, it is more than is available.
        peak = parse_size(needed[1] or needed[2]) if needed else target.usable_bytes + 1
        seconds = time.monotonic() - start
        return CompiledProgram(peak, None, None, None, None, accepted=False, seconds=seconds)
    seconds = time.monotonic() - start
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    if memory is None:
        raise UserError(
            f"the compiler for {target.device_kind} does not report how much memory programs "
            f"need: plan for another device, with --topology."
        )
    code = memory.generated_code_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    held = memory.argument_size_in_bytes + outputs
    if target.on_tpu:
        # The sum of a TPU program's temporaries counts some that are never live at the same time:
        # the compiler accepts programs whose sum exceeds the memory. It refuses by the peak.
        peak = memory.peak_memory_in_bytes + code
    else:
        peak = held + memory.temp_size_in_bytes + code
    return CompiledProgram(
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=outputs,
        temporary_bytes=peak - held - code,
        code_bytes=code,
        accepted=True,
        seconds=seconds,
        buffers=tuple(largest_buffers(text, _NUM_BUFFERS)),
        exchanges=_exchanges(text),
        levels=tuple(work_levels(text, route_finder(devices))),
    )


def _exchanges(text: str) -> tuple[Exchange, ...]:
    found: dict[str, tuple[int, int]] = {}
    for each in collectives(text):
        count, num_bytes = found.get(each.kind, (0, 0))
        found[each.kind] = count + 1, num_bytes + each.num_bytes
    return tuple(Exchange(kind, *of_kind) for kind, of_kind in sorted(found.items()))
