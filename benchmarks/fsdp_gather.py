r"""Memory of a large array on each device: sharded over fsdp, and gathered over it.

    python benchmarks/fsdp_gather.py --mesh-shape auto --mode gather      # on every host of a pod
    grpo-eqx launch local --processes 4 --devices-per-process 4 -- \
        python benchmarks/fsdp_gather.py --mesh-shape host_local --mode sharded \
        --target-bytes-gib 0.0625                                         # a simulated pod
    JAX_PLATFORMS=cpu python benchmarks/fsdp_gather.py --topology v6e-16  # TPUs that are not there

The array has about the size of a 3B model's weights in bfloat16. Sharded, each device holds the
total over the size of fsdp; gathered, all of it. Nothing runs with `--topology`: the bytes are
those of the compiled program's output. CPUs gather bfloat16 as float32, and the collective's bytes
show it.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from device_facts import largest_memory_stat
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx import UserError
from grpo_eqx.distributed import initialize, is_main
from grpo_eqx.distributed.exchange import gather_rows
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.planner.hlo import collectives
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import replicated

GiB = 2**30
TILE_ROWS = 32
"""A TPU stores rows in tiles of at most so many, and pads what does not fill them."""
PERIOD = 128
"""Rows have their index modulo this, which bfloat16 holds exactly, in every column."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpGather:
    """What to hold where."""

    mesh_shape: str = "auto"
    """Layout of the devices, as for training."""
    mode: Literal["sharded", "gather"] = "sharded"
    """Leave the array split over fsdp, as parameters are, or gather it on every device."""
    target_bytes_gib: float = 5.6
    """About the size of the whole array, in GiB; the exact size is printed."""
    cols: int = 2048
    """Columns of the array; a TPU pads them to a multiple of 128."""
    dtype: str = "bfloat16"
    """Of its numbers."""
    require_processes: int | None = None
    """Processes that must be there. None: as many as whatever started them says."""
    topology: str | None = None
    """Compile for a TPU type that is not there (v6e-16), and run nothing."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for name in ("target_bytes_gib", "cols"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0.")


def main(cfg: FsdpGather) -> None:
    if cfg.topology is None:
        told = {name: str(value) for name, value in dataclasses.asdict(cfg).items()}
        initialize(told, require_processes=cfg.require_processes, timeout=60.0)
    devices = jax.devices() if cfg.topology is None else described_devices(cfg.topology)
    array = wanted_array(cfg, parse_mesh(cfg.mesh_shape).build(devices))
    bytes_of = compiled_bytes if cfg.topology is not None else measured_bytes
    figures = {**description(cfg, array), **bytes_of(array, cfg.mode)}
    if is_main():
        show(figures)
        if cfg.json is not None:
            cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def wanted_array(cfg: FsdpGather, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """The array's shape, with whole tiles on every device, and its sharding before any gather."""
    dtype = jnp.dtype(cfg.dtype)
    rows = TILE_ROWS * mesh.size
    multiple = round(cfg.target_bytes_gib * GiB / (rows * cfg.cols * dtype.itemsize))
    shape = max(1, multiple) * rows, cfg.cols
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))


def description(cfg: FsdpGather, array: jax.ShapeDtypeStruct) -> dict[str, Any]:
    mesh = array.sharding.mesh
    return {
        "mode": cfg.mode,
        "mesh_shape": cfg.mesh_shape,
        **dict(mesh.shape),
        "device": mesh.devices.flat[0].device_kind,
        "hosts": len({device.process_index for device in mesh.devices.flat}),
        "devices": mesh.size,
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "total_bytes": array.size * array.dtype.itemsize,
        "how": "measured" if cfg.topology is None else f"compiled for {cfg.topology}",
    }


def make_program(array: jax.ShapeDtypeStruct) -> Any:
    """Makes the array, each device its own rows."""

    def make() -> jax.Array:
        rows = jax.lax.broadcasted_iota(jnp.int32, array.shape, 0) % PERIOD
        return rows.astype(array.dtype)

    return jax.jit(make, out_shardings=array.sharding)


def gather_program(array: jax.ShapeDtypeStruct) -> Any:
    """Gathers the array on every device."""
    return jax.jit(lambda x: x, out_shardings=replicated(array.sharding.mesh))


def measured_bytes(array: jax.ShapeDtypeStruct, mode: str) -> dict[str, Any]:
    """Bytes of the array's parts, on all hosts, once they are there."""
    made = make_program(array)()
    sent = {}
    if mode == "gather":
        program = gather_program(array).lower(made).compile()
        made, sent = program(made), collectives_of(program)
    parts = Counter[jax.Device]()
    for shard in jax.block_until_ready(made).addressable_shards:
        parts[shard.device] += shard.data.nbytes
        check_rows(shard)
    return {
        **sent,
        **bytes_figures(list(parts.values()), gather_rows(np.array([[*parts.values()]], np.int64))),
        "bytes_in_use_max": largest_memory_stat("bytes_in_use", jax.local_devices()),
        "peak_bytes_in_use_max": largest_memory_stat("peak_bytes_in_use", jax.local_devices()),
    }


def compiled_bytes(array: jax.ShapeDtypeStruct, mode: str) -> dict[str, Any]:
    """Bytes of the output, which the compiler states for each device."""
    if mode == "gather":
        program = gather_program(array).lower(array).compile()
    else:
        program = make_program(array).lower().compile()
    memory, mesh = program.memory_analysis(), array.sharding.mesh
    of_device = memory.output_size_in_bytes
    hosts = Counter(device.process_index for device in mesh.devices.flat)
    by_host = np.array([[of_device] * count for count in hosts.values()], np.int64)
    return {
        **collectives_of(program),
        **bytes_figures(by_host[0].tolist(), by_host),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def bytes_figures(local: list[int], by_host: np.ndarray) -> dict[str, int]:
    """**Arguments:** bytes on each device of this host; those of all, `[hosts, devices]`."""
    return {
        "per_device_array_bytes_local_max": max(local),
        "per_device_array_bytes_local_min": min(local),
        "per_device_array_bytes_max": int(by_host.max()),
        "host_array_bytes_max": int(by_host.sum(1).max()),
    }


def collectives_of(program: jax.stages.Compiled) -> dict[str, Any]:
    found = [(each.kind, each.shapes, each.num_bytes) for each in collectives(program.as_text())]
    return {"collectives": found}


def check_rows(shard: Any) -> None:
    """Ends the program unless a device's part has the rows that it should have."""
    whole = range(shard.index[0].stop or len(shard.data))
    expected = np.array(whole[shard.index[0]]) % PERIOD
    if not np.array_equal(np.asarray(shard.data[:, -1], np.int64), expected):
        sys.exit(f"error: {shard.device} has other rows than it should have.")


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['mode']}, mesh {figures['mesh_shape']} (dp={figures['dp']}, "
        f"fsdp={figures['fsdp']}, tp={figures['tp']}): {figures['devices']} x {figures['device']} "
        f"on {figures['hosts']} hosts, {figures['how']}"
    )
    print(f"array={figures['dtype']}{figures['shape']}")
    for name, value in figures.items():
        if "bytes" in name:
            print(f"{name}=" + ("unmeasured" if value is None else f"{value} ({gib(value)})"))
    for kind, shapes, num_bytes in figures.get("collectives", ()):
        print(f"collective={kind} {shapes} {num_bytes} bytes ({gib(num_bytes)})")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.4f} GiB"


if __name__ == "__main__":
    try:
        main(tyro.cli(FsdpGather, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
