r"""Memory and communication of a GRPO step beside Tunix's, compiled for the same described TPUs.

    JAX_PLATFORMS=cpu python benchmarks/peer_plan.py --peer-python PATH --markdown
    JAX_PLATFORMS=cpu python benchmarks/peer_plan.py --peer-python PATH --json plan.json \
        --rollout-shardings legacy replicated tensor:4

Nothing runs: both sides are compiled from shapes alone, Tunix in its own environment (its model,
learner, trainer and sampler, and a libtpu that its JAX accepts), and the same reader reads both
compiled programs. Compiling Tunix takes tens of minutes on two cores.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import optax
import tyro
from rich.console import Console
from rich.table import Table
from rollout_programs import (
    MODELS,
    Work,
    compile_generate,
    compile_update,
    make_sampler,
    make_updater,
)
from rollout_sharding import GENERATE_TOKENS, summary

from grpo_eqx import UserError
from grpo_eqx.planner.devices import described_devices, described_slice
from grpo_eqx.planner.hlo import Collective, collectives
from grpo_eqx.sharding import parse_mesh, parse_rollout_sharding

WORKER = Path(__file__).parent / "peer_plan_workers" / "tunix_worker.py"
PEER_SETTINGS: dict[str, dict[str, Any]] = {
    # Its recipe for Qwen2, examples/deepscaler/train_deepscaler_vanilla_nb.py.
    "recipe": {"dtype": "float32", "remat": "block", "flash_attention": False},
    # Closest to ours.
    "lean": {"dtype": "bfloat16", "remat": "decoder", "flash_attention": True},
}
FLASH_BLOCK = 256
"""Side of the tiles of its flash attention, as in examples/rl/grpo/gsm8k/configs/qwen3.yaml."""
PEER_FUNCTIONS = {"update": "_train_step", "prefill": "_prefill_fn", "decode": "_decode_fn"}
"""What its trainer and its sampler jit."""
MiB, GiB = 2**20, 2**30
_NEEDED = re.compile(r"Used (\d+(?:\.\d+)?)([KMG]) of \S+ hbm")
_TOTAL = re.compile(r"color=0\)\nTotal bytes: (\d+)")
"""Of the memory that is not on chip, in the compiler's report on memory."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What to compile, for what."""

    peer_python: Path | None = None
    """Interpreter of an environment with Tunix and libtpu. Without it, only this project's programs
    are compiled."""
    peer_settings: tuple[Literal["recipe", "lean"], ...] = ("recipe", "lean")
    """Tunix's settings: those of its recipe for Qwen2 (float32, blocks recomputed), or those
    closest to ours (bfloat16, whole layers recomputed, flash attention). Parameters
    are float32 in both, as ours are."""
    peer_programs: tuple[Literal["update", "prefill", "decode"], ...] = (
        "update",
        "prefill",
        "decode",
    )
    """Tunix's programs to compile. Without `prefill`, the compiler chooses the layout of the cache
    that `decode` starts from."""
    peer_tp: int = 1
    """Devices of Tunix's mesh axis tp; fsdp has the others."""
    peer_minutes: float = 60.0
    """Time to compile Tunix's programs in, for each of its settings."""
    peer_figures: Path | None = None
    """Folder for what Tunix's side writes. Programs found there are not compiled again."""
    rollout_shardings: tuple[str, ...] = ("legacy", "maxtext")
    """Ours to compile. With none, only Tunix's programs are."""
    mesh: str = "auto"
    """Our layout of the devices."""
    topology: str = "v6e-8"
    """TPU type, which need not be attached."""
    model: Literal["0.5B", "3B"] = "3B"
    """Sizes of Qwen2.5."""
    layers: int | None = None
    """Compile both with so few layers, to try the script. Default: all of the model's."""
    prompts: int = 64
    """Prompts of a step."""
    group: int = 8
    """Completions of each."""
    prompt_length: int = 256
    """Tokens of a prompt."""
    completion_length: int = 512
    """Tokens of a completion."""
    micro_batch: int = 8
    """Completions that a device processes at a time in an update."""
    markdown: bool = False
    """Print the table as Markdown."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        sizes = ("prompts", "group", "prompt_length", "completion_length", "micro_batch", "peer_tp")
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.layers is not None and self.layers < 1:
            raise UserError(f"layers is {self.layers}: it must be at least 1.")
        if self.peer_minutes <= 0:
            raise UserError(f"peer_minutes is {self.peer_minutes:g}: it must be above 0.")
        if self.peer_python is not None and shutil.which(self.peer_python) is None:
            raise UserError(
                f"peer_python {str(self.peer_python)!r} is no program: name its python."
            )
        if self.peer_python is None and not self.rollout_shardings:
            raise UserError("rollout_shardings and peer_python are empty: give one of them.")
        for name in self.rollout_shardings:
            try:
                parse_rollout_sharding(name)
            except KeyError:
                raise UserError(
                    f"rollout_shardings has {name!r}: name strategies that "
                    f"grpo-eqx train --rollout-sharding takes."
                ) from None
        chips = described_slice(self.topology).chips
        if chips % self.peer_tp:
            raise UserError(
                f"peer_tp is {self.peer_tp}, which does not divide the {chips} chips of "
                f"{self.topology}."
            )

    @property
    def work(self) -> Work:
        model = MODELS[self.model]
        model = dataclasses.replace(model, num_hidden_layers=self.layers or model.num_hidden_layers)
        return Work(model, self.prompts, self.group, self.prompt_length, self.completion_length)


def main(cfg: PeerPlan) -> None:
    devices = described_devices(cfg.topology)
    completions = len(devices) // cfg.peer_tp * cfg.micro_batch
    if cfg.peer_python is not None and completions % cfg.group:
        raise UserError(
            f"micro_batch is {cfg.micro_batch}, of {completions} completions over all devices: "
            f"Tunix takes whole groups of {cfg.group}."
        )
    rows = []
    if cfg.peer_python is not None:
        rows += [peer_row(cfg, settings, completions) for settings in cfg.peer_settings]
    if cfg.rollout_shardings:
        rows += our_rows(cfg, devices)
    figures = {
        "topology": cfg.topology,
        "model": cfg.model,
        "layers": cfg.work.model.num_hidden_layers,
        "prompts": cfg.prompts,
        "group": cfg.group,
        "prompt_length": cfg.prompt_length,
        "completion_length": cfg.completion_length,
        "micro_batch": cfg.micro_batch,
        "jax": jax.__version__,
        "rows": rows,
    }
    show(cfg, figures)
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def our_rows(cfg: PeerPlan, devices: Any) -> list[Row]:
    """Compiles our update, the same for all rollout shardings, and a `generate` of each."""
    work, mesh = cfg.work, parse_mesh(cfg.mesh).build(devices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
    updater = make_updater(mesh, optimizer)
    update_figures = compiled_figures(
        "update", lambda: compile_update(updater, work, cfg.micro_batch)
    )
    layers, rows = work.model.num_hidden_layers, []
    for style in cfg.rollout_shardings:
        texts: list[str] = []
        sampler = make_sampler(work, style, mesh)
        name = f"generate, {style}"
        generate = compiled_figures(
            name, lambda sampler=sampler: compile_generate(sampler, work), texts
        )
        row = {"side": f"ours, {style}", "update": update_figures, "generate": generate}
        if texts:
            found = summary(texts[0])
            _, each_token, each_layer = GENERATE_TOKENS
            in_tokens = [each for each in found if each["where"] in (each_token, each_layer)]
            times = {each_token: 1, each_layer: layers}
            row["token_bytes"] = sum(each["bytes"] * times[each["where"]] for each in in_tokens)
            row["token_bytes_are_least"] = any("ring" in each["kind"] for each in in_tokens)
        rows.append(row)
    return rows


def compiled_figures(name: str, compiles: Any, texts: list[str] | None = None) -> Row:
    start = time.monotonic()
    print(f"compiling our {name}", file=sys.stderr, flush=True)
    try:
        compiled = compiles()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "peak_bytes": needed_bytes(str(error))}
    if texts is not None:
        texts.append(compiled.as_text())
    memory = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
    return {"peak_bytes": peak, "seconds": time.monotonic() - start}


def needed_bytes(error: str) -> float | None:
    """Bytes that a program needs for which the compiler says that memory does not suffice."""
    needed = _NEEDED.search(error)
    return float(needed[1]) * _UNITS[needed[2]] if needed else None


def peer_row(cfg: PeerPlan, settings: str, completions: int) -> Row:
    """Has Tunix's programs compiled in its environment, and reads what that writes."""
    with tempfile.TemporaryDirectory() as temporary:
        kept = cfg.peer_figures
        folder = Path(temporary) if kept is None else kept / settings
        folder.mkdir(parents=True, exist_ok=True)
        known = described_slice(cfg.topology)
        generation = known.name.partition("-")[0].replace("litepod", "e")
        fsdp = known.chips // cfg.peer_tp
        work = {
            **PEER_SETTINGS[settings],
            "param_dtype": "float32",
            "flash_block": FLASH_BLOCK,
            "topology": f"{generation}:{known.topology}",
            "chips_per_host": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[known.chips_per_host],
            "mesh": (fsdp, cfg.peer_tp),
            "model": cfg.model,
            "layers": cfg.layers,
            "prompts": cfg.prompts,
            "group": cfg.group,
            "prompt_length": cfg.prompt_length,
            "completion_length": cfg.completion_length,
            "micro_batch": completions,
            "folder": str(folder),
        }
        remember(folder, {name: value for name, value in work.items() if name != "folder"})
        missing = [name for name in cfg.peer_programs if not peer_figures(folder, name)]
        if missing:
            run_worker(cfg, {**work, "programs": missing})
        row: Row = {"side": f"Tunix, {settings}", **read_json(folder / "facts.json")}
        for name in cfg.peer_programs:
            late = f"not compiled after {cfg.peer_minutes:g} minutes"
            row[name] = peer_figures(folder, name) or {"error": late, "peak_bytes": None}
        decode = peer_text(folder, "decode")
        if "decode" in cfg.peer_programs and decode is not None:
            row.update(token_figures(collectives(decode)))
        return row


def remember(folder: Path, work: Row) -> None:
    """Writes what a folder's figures are of, and refuses one that has figures of something else."""
    path, said = folder / "work.json", json.dumps(work, indent=2)
    if path.exists() and path.read_text() != said:
        raise UserError(
            f"peer_figures {str(folder)!r} holds figures of other settings: name another folder."
        )
    path.write_text(said)


def run_worker(cfg: PeerPlan, work: Row) -> None:
    """Runs Tunix's side until it ends or its time is over; what it wrote by then counts."""
    functions = "|".join(PEER_FUNCTIONS.values())
    dumps = f"--xla_dump_to={work['folder']}/xla --xla_dump_hlo_module_re=.*({functions}).*"
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dumps}",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": cfg.topology,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [str(cfg.peer_python), str(WORKER), json.dumps(work)]
    print(f"compiling Tunix's {', '.join(work['programs'])}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=60 * cfg.peer_minutes,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise UserError(
            f"{' '.join(command[:2])} failed, as above: are Tunix and libtpu installed there?"
        )


def peer_figures(folder: Path, name: str) -> Row:
    """Memory of a program; nothing if it has not been compiled.

    The compiler assigns buffers before it generates code, which takes far longer for programs that
    have all logits. Its report on them is used where the code was not finished in time.
    """
    said, report = read_json(folder / f"{name}.json"), dumped(folder, name, "memory-usage-report")
    if "error" in said:
        return {**said, "peak_bytes": needed_bytes(said["error"])}
    if said:
        return {**said, "peak_bytes": said["peak_bytes"] + said["generated_code_bytes"]}
    total = _TOTAL.search(report.read_text()) if report else None
    return {"peak_bytes": int(total[1]), "without_code": True} if total else {}


def peer_text(folder: Path, name: str) -> str | None:
    """Text of a program after optimization; `None` if it was not optimized in time."""
    whole = folder / f"{name}.hlo"
    path = whole if whole.exists() else dumped(folder, name, "after_optimizations")
    return path.read_text() if path else None


def dumped(folder: Path, name: str, what: str) -> Path | None:
    """What the compiler wrote of a program while it compiled."""
    return next((folder / "xla").glob(f"*{PEER_FUNCTIONS[name]}.*{what}.txt"), None)


def read_json(path: Path) -> Row:
    return json.loads(path.read_text()) if path.exists() else {}


def token_figures(found: Iterable[Collective]) -> Row:
    """Bytes that its decoding exchanges for each token: its loop over tokens is the outermost one.

    Its layers are no loop. Loops inside are the compiler's own, for rings, of which a step counts.
    """
    inside = [each for each in found if each.loops]
    return {
        "token_bytes": sum(each.num_bytes for each in inside),
        "token_bytes_are_least": any(each.loops > 1 for each in inside),
    }


def show(cfg: PeerPlan, figures: Row) -> None:
    title = (
        f"Qwen2.5-{cfg.model} ({figures['layers']} layers) on {cfg.topology}, each device: "
        f"{cfg.prompts} x {cfg.group} completions of {cfg.completion_length} tokens after prompts "
        f"of {cfg.prompt_length}, updates of {cfg.micro_batch} completions at a time"
    )
    rows = [cells(row) for row in figures["rows"]]
    names = list(rows[0])
    if cfg.markdown:
        print(f"{title}\n\n| {' | '.join(names)} |")
        print("|---|" + "---:|" * (len(names) - 1))
        for row in rows:
            print(f"| {' | '.join(row.values())} |")
    else:
        table = Table(title=title)
        for name in names:
            table.add_column(name, justify="right" if table.columns else "left")
        for row in rows:
            table.add_row(*row.values())
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    for line in dict.fromkeys(notes(figures["rows"])):
        print(line)


def cells(row: Row) -> dict[str, str]:
    tokens = row.get("token_bytes")
    least = "at least " if row.get("token_bytes_are_least") else ""
    return {
        "programs": row["side"],
        "update, peak GiB": peak_cell(row.get("update")),
        "generate or prefill, peak GiB": peak_cell(row.get("generate", row.get("prefill"))),
        "decode, peak GiB": peak_cell(row.get("decode")),
        "received per token, MiB": "-" if tokens is None else f"{least}{tokens / MiB:,.1f}",
    }


def peak_cell(program: Row | None) -> str:
    if program is None:
        return "-"
    if program["peak_bytes"] is None:
        return "not compiled"
    refused = " (does not fit)" if "error" in program else ""
    refused = " (before code)" if "without_code" in program else refused
    return f"{program['peak_bytes'] / GiB:,.2f}{refused}"


def notes(rows: list[Row]) -> Iterable[str]:
    """Says why programs have no figures."""
    for row in rows:
        for name in ("update", "generate", "prefill", "decode"):
            program = row.get(name) or {}
            if "without_code" in program:
                yield (
                    f"{row['side']}, {name}: from the compiler's assignment of buffers; "
                    f"its code was not generated in time."
                )
            if "error" in program and program["peak_bytes"] is None:
                yield f"{row['side']}, {name}: {program['error'].splitlines()[0]}"


if __name__ == "__main__":
    try:
        main(tyro.cli(PeerPlan, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
