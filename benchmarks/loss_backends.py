"""Time and memory of the loss backends, forward and backward, for the heads of real models.

    python benchmarks/loss_backends.py                        # what is at hand
    python benchmarks/loss_backends.py --topology v6e-8       # memory on TPUs that are not there
    python benchmarks/loss_backends.py --torch-python PATH    # beside torch, in its own environment

Times are medians; the backends take turns. Memory is the compiler's own account, for each device:
of a TPU's main memory, without the tiles that it places in a core's vector memory.
Run it alone on the machine.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from ceilings import measure_ceilings
from rich.console import Console
from rich.table import Table

from grpo_eqx import UserError
from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss, LossBackend, PallasLoss, TokenStats
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import batch_sharding, num_batch_shards, parameter_sharding
from grpo_eqx.tracking.device_peaks import timed

BACKENDS: dict[str, LossBackend] = {
    "dense": DenseLoss(),
    "chunked": ChunkedLoss(),
    "pallas": PallasLoss(),
}
# Vocabulary and hidden size. `seed` is the odd vocabulary that the tokenizer itself has.
HEADS = {
    "small": (8_192, 896),
    "seed": (151_643, 2048),
    "0.5B": (151_936, 896),
    "3B": (151_936, 2048),
    "7B": (152_064, 3584),
}
TORCH_BASELINE = Path(__file__).with_name("loss_backends_torch.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossBackends:
    """What to measure."""

    backends: tuple[Literal["dense", "chunked", "pallas"], ...] | None = None
    """None: all of them, without pallas on a CPU."""
    heads: tuple[Literal["small", "seed", "0.5B", "3B", "7B"], ...] | None = None
    """None: small and 0.5B on a CPU, else all but small."""
    tokens: int | None = None
    """Tokens on each device. None: 1,024 on a CPU, else 4,096."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the hidden states and the products; the head is float32. auto: float32 on a CPU, else
    bfloat16."""
    topology: str | None = None
    """Compile for a TPU type that is not there (v6e-8): memory only."""
    mesh: str = "auto"
    """Layout of its devices, as for training; without a topology, one device is measured."""
    repeats: int = 5
    """Timed runs of each backend."""
    torch_python: Path | None = None
    """Interpreter with torch: its plain and its compiled loss are measured too."""
    json: Path | None = None
    """File for the figures."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One head and its tokens, on a mesh."""

    head: str
    mesh: jax.sharding.Mesh
    tokens: int
    dtype: jnp.dtype

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Hidden states, head, ids and cotangents of log-probs and entropies."""
        prompts = num_batch_shards(self.mesh)
        vocabulary, hidden_size = HEADS[self.head]
        tokens = batch_sharding(self.mesh, prompts, 1)
        head = parameter_sharding(self.mesh, ("vocab", "hidden"), HEADS[self.head])
        each = (prompts, 1, self.tokens)
        return (
            jax.ShapeDtypeStruct((*each, hidden_size), self.dtype, sharding=tokens),
            jax.ShapeDtypeStruct((vocabulary, hidden_size), jnp.float32, sharding=head),
            jax.ShapeDtypeStruct(each, jnp.int32, sharding=tokens),
            jax.ShapeDtypeStruct(each, jnp.float32, sharding=tokens),
            jax.ShapeDtypeStruct(each, jnp.float32, sharding=tokens),
        )

    def compile(self, backend: LossBackend) -> jax.stages.Compiled:
        """Statistics and both gradients."""

        def run(hidden: Any, head: Any, ids: Any, of_logps: Any, of_entropies: Any) -> Any:
            stats, pull = jax.vjp(lambda h, w: backend(h, w, ids, 1.0, self.mesh), hidden, head)
            return stats, pull(TokenStats(of_logps, of_entropies, jnp.zeros_like(of_logps)))

        shapes = self.shapes()
        tokens, head = shapes[0].sharding, shapes[1].sharding
        return jax.jit(run, out_shardings=(tokens, (tokens, head))).lower(*shapes).compile()

    def arrays(self) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        hidden, head, ids, *cotangents = self.shapes()
        size = HEADS[self.head][1]
        made = [
            rng.standard_normal(hidden.shape, np.float32),
            rng.standard_normal(head.shape, np.float32) / np.float32(size**0.5),
            rng.integers(head.shape[0], size=ids.shape),
            *(rng.standard_normal(x.shape, np.float32) for x in cotangents),
        ]
        return [jnp.asarray(x, shape.dtype) for x, shape in zip(made, self.shapes(), strict=True)]

    def flops(self, backend: str) -> float:
        """Of all matrix products: three, and where logits do not stay, one of them again."""
        vocabulary, hidden_size = HEADS[self.head]
        products = 4 if backend in ("chunked", "pallas") else 3
        return 2.0 * products * self.tokens * vocabulary * hidden_size

    @property
    def least_bytes(self) -> int:
        """The head read forward and backward, the hidden states too, and both gradients written."""
        vocabulary, hidden_size = HEADS[self.head]
        head, hidden = vocabulary * hidden_size, self.tokens * hidden_size
        return head * (2 + 1) * 4 + hidden * (2 + 1) * self.dtype.itemsize


def main(cfg: LossBackends) -> None:
    described = cfg.topology is not None
    devices = described_devices(cfg.topology) if cfg.topology else jax.devices()[:1]
    on_cpu = devices[0].platform == "cpu"
    if described and cfg.torch_python:
        raise UserError("torch_python measures, and topology only compiles: use one of them.")
    mesh = parse_mesh(cfg.mesh).build(devices)
    backends = cfg.backends or tuple(name for name in BACKENDS if not (on_cpu and name == "pallas"))
    heads = cfg.heads or (("small", "0.5B") if on_cpu else ("seed", "0.5B", "3B", "7B"))
    tokens = cfg.tokens or (1024 if on_cpu else 4096)
    name = cfg.dtype if cfg.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    dtype = jnp.dtype(name)

    ceilings = {} if described else measure_ceilings(dtype)
    rows = []
    for head in heads:
        work = Work(head, mesh, tokens, dtype)
        rows += (
            compiled_only(work, backends) if described else measured(work, backends, ceilings, cfg)
        )
    device = f"{len(devices)} x {devices[0].device_kind}" + (" (described)" if described else "")
    show(device, ceilings, rows)
    if cfg.json is not None:
        figures = {"device": device, "jax": jax.__version__, "ceilings": ceilings, "rows": rows}
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def account(work: Work, name: str, program: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiler says of a program's memory, in bytes for each device."""
    memory = program.memory_analysis()
    vocabulary, hidden_size = HEADS[work.head]
    return {
        "head": work.head,
        "backend": name,
        "tokens": work.tokens,
        "vocabulary": vocabulary,
        "hidden_size": hidden_size,
        "dtype": str(work.dtype),
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
    }


def compiled_only(work: Work, backends: tuple[str, ...]) -> list[dict[str, Any]]:
    """Memory on a described TPU; programs that do not fit say so."""
    rows = []
    for name in backends:
        try:
            rows.append(account(work, name, work.compile(BACKENDS[name])))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            rows.append({"head": work.head, "backend": name, "does_not_fit": str(error)[:300]})
    return rows


def measured(
    work: Work, backends: tuple[str, ...], ceilings: dict[str, float], cfg: LossBackends
) -> list[dict[str, Any]]:
    """Time and memory here, the backends taking turns."""
    programs = {name: work.compile(BACKENDS[name]) for name in backends}
    arrays = work.arrays()
    times: dict[str, list[float]] = {name: [] for name in backends}
    for repeat in range(cfg.repeats + 1):
        for name, program in programs.items():
            seconds = timed(lambda program=program: program(*arrays))
            if repeat > 0:
                times[name].append(seconds)
    rows = [
        {**account(work, name, program), "seconds": statistics.median(times[name])}
        for name, program in programs.items()
    ]
    if cfg.torch_python is not None:
        del arrays
        rows += [torch_row(work, compiled, cfg) for compiled in (False, True)]
    for row in rows:
        flops_per_s = work.flops(row["backend"]) / row["seconds"]
        row["share_of_flops_per_s"] = flops_per_s / ceilings["flops_per_s"]
        bytes_per_s = work.least_bytes / row["seconds"]
        row["share_of_bytes_per_s"] = bytes_per_s / ceilings["bytes_per_s"]
    return rows


def torch_row(work: Work, compiled: bool, cfg: LossBackends) -> dict[str, Any]:
    """The same work in torch, in a process of its own."""
    vocabulary, hidden_size = HEADS[work.head]
    sizes = [work.tokens, vocabulary, hidden_size, work.dtype, int(compiled), cfg.repeats]
    command = [str(cfg.torch_python), str(TORCH_BASELINE), *map(str, sizes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    name = "torch.compile" if compiled else "torch"
    return {"head": work.head, "backend": name, "tokens": work.tokens, **figures}


def show(device: str, ceilings: dict[str, float], rows: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title=f"Loss backends, forward and backward: {device}")
    for column in ("head", "backend"):
        table.add_column(column)
    columns = {
        "tokens": ("tokens", "{:,}", 1),
        "ms": ("seconds", "{:,.1f}", 1e3),
        "matrix rate": ("share_of_flops_per_s", "{:.0%}", 1),
        "bandwidth": ("share_of_bytes_per_s", "{:.0%}", 1),
        "temporary MiB": ("temporary_bytes", "{:,.0f}", 2**-20),
        "peak MiB": ("peak_bytes", "{:,.0f}", 2**-20),
    }
    columns = {name: x for name, x in columns.items() if any(x[0] in row for row in rows)}
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            form.format(row[key] * scale) if key in row else "-"
            for key, form, scale in columns.values()
        ]
        name = row["backend"] + (": does not fit" if "does_not_fit" in row else "")
        table.add_row(row["head"], name, *cells)
    console.print(table)
    if ceilings:
        console.print(
            f"100% is what one product and one copy reach here: "
            f"{ceilings['flops_per_s'] / 1e12:,.2f} TFLOP/s, {ceilings['bytes_per_s'] / 1e9:,.0f} "
            f"GB/s. Matrix rate: of all products, those computed again too. Bandwidth: of the "
            f"least traffic, which is the head twice, its gradient, and hidden states.",
            highlight=False,
        )


if __name__ == "__main__":
    # The other programs of a comparison need their share of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        main(tyro.cli(LossBackends, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
