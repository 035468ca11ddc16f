"""Host memory that loading a model takes, beyond the arrays that it makes.

    python benchmarks/load_memory.py --json load_memory.json

Writes a random model as sharded safetensors, and loads it in processes that each have some of the
devices, as hosts do. On a CPU the arrays are in host memory too: the table counts their bytes
apart. File pages that the system caches are not counted. Run it alone on the machine.
"""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from grpo_eqx.distributed.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID

_STATUS = Path("/proc/self/status")
_EVERY_S = 0.002


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadMemory:
    """What to load, and where."""

    hidden_size: int = 1024
    """Of the model; its MLPs are four times as wide."""
    layers: int = 16
    """Of the model."""
    devices: int = 8
    """Devices over which its arrays are sharded."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of hosts to divide the devices among."""
    json: Path | None = None
    """File for the figures."""


def main(cfg: LoadMemory) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), cfg)
        for dtype in ("float32", "bfloat16"):
            for number in cfg.processes:
                rows.append(_largest(_load(folder, dtype, cfg.devices, number)))
    table = Table(title="Loading: host memory of the process that needed most")
    for column in ("dtype", "hosts", "its arrays", "largest array's part", "peak beyond arrays"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (f"{row[name] / 2**20:,.0f} MiB" for name in ("arrays", "largest", "beyond"))
        table.add_row(str(row["dtype"]), str(row["processes"]), *sizes)
    Console(highlight=False).print(table)
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(rows, indent=2) + "\n")


def _write_model(folder: Path, cfg: LoadMemory) -> None:
    from grpo_eqx.common.random_keys import make_key
    from grpo_eqx.models import Decoder, Qwen2Config, save_pretrained

    config = Qwen2Config(
        vocab_size=32768,
        hidden_size=cfg.hidden_size,
        intermediate_size=4 * cfg.hidden_size,
        num_hidden_layers=cfg.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    save_pretrained(Decoder.init(config, make_key(0)), folder, "bfloat16")


def _load(folder: str, dtype: str, devices: int, processes: int) -> list[dict[str, object]]:
    """Loads in so many processes; returns what each of them measured."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    per_process = f"--xla_force_host_platform_device_count={devices // processes}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", folder, dtype],
            env=os.environ
            | {
                COORDINATOR: address,
                NUM_PROCESSES: str(processes),
                PROCESS_ID: str(index),
                "XLA_FLAGS": per_process,
                "JAX_PLATFORMS": "cpu",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    return [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]


def _largest(measured: list[dict[str, object]]) -> dict[str, object]:
    return max(measured, key=lambda row: float(str(row["beyond"])))


def measure(folder: str, dtype: str) -> dict[str, object]:
    """Loads in this process, one of those of the environment."""
    import jax

    from grpo_eqx.distributed.startup import join_processes
    from grpo_eqx.models import from_pretrained
    from grpo_eqx.settings.config import GRPOConfig

    join_processes(GRPOConfig(start_timeout=120.0))
    jax.block_until_ready(jax.numpy.zeros(8))  # what the backend itself takes
    before = _resident()
    with _peak() as peak:
        model = from_pretrained(folder, dtype=dtype)
        jax.block_until_ready(model)
    own = [sum(part.data.nbytes for part in x.addressable_shards) for x in jax.tree.leaves(model)]
    return {
        "dtype": dtype,
        "processes": jax.process_count(),
        "arrays": sum(own),
        "largest": max(own),
        "beyond": max(peak) - before - sum(own),
    }


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Samples the bytes of this process while the context is entered."""
    sizes, over = [_resident()], threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY_S):
            sizes.append(_resident())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def _resident() -> int:
    """Returns the bytes of this process' own pages, without those of files."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main(tyro.cli(LoadMemory, description=__doc__))
