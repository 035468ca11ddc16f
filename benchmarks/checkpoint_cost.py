"""The time that saving checkpoints adds to a step, and the device memory that it takes.

    python benchmarks/checkpoint_cost.py --json checkpoint_cost.json

In one run with the default settings, the steps after each save are compared with as many later ones
that follow none, so that a machine which slows down slows both. The time of a step is that between
the ends of two steps: it includes the copy to host memory, and the writing in the background. The
first save, which compiles the program of the checksums, is not among them. Memory is that of the
buffers on devices while a checkpoint is being written, beyond those before it, and that of
temporaries while its checksums are computed, which only CPUs need. Run it alone on the machine.
"""

import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import tyro

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.checkpoint.checksums import checksum_arrays
from grpo_eqx.checkpoint.saved import named_arrays
from grpo_eqx.checkpoint.store import CheckpointStore
from grpo_eqx.tracking import Tracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """What to time."""

    save_steps: int = 10
    """Steps over which the cost of a save is spread. The run itself saves half as often."""
    saves: int = 12
    """Saves to time."""
    model: str = GRPOConfig.model
    """Model to train."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if self.saves < 2 or self.save_steps < 1:
            raise UserError("saves must be at least 2, and save_steps at least 1.")


class Times(Tracker):
    """Wall-clock time at which each step was done."""

    def __init__(self) -> None:
        self.done: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done.append(time.perf_counter())

    def finish(self) -> None:
        pass


def step_seconds(settings: CheckpointCost, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the mean time of the steps after each save, and of as many later ones."""
    times, each = Times(), settings.save_steps
    cfg = GRPOConfig(
        model=settings.model, steps=2 * each * (settings.saves + 2), save_steps=2 * each,
        save_minutes=None, output_dir=folder, resume="never", log_completions_steps=0,
    )  # fmt: skip
    GRPOTrainer(cfg, trackers=[times]).fit()
    ends = times.done[4 * each - 1 :: each]  # from the second save on
    blocks = [(end - start) / each for start, end in itertools.pairwise(ends)]
    return blocks[0::2], blocks[1::2]


def added_bytes(settings: CheckpointCost, folder: Path) -> tuple[int, int]:
    """Returns the device memory taken while a save is written, and during its checksums."""
    trainer = GRPOTrainer(GRPOConfig(model=settings.model, output_dir=folder / "run"))
    before = resident_bytes()
    with CheckpointStore(folder / "checkpoints") as store:
        store.save(trainer.state, {})
        during = resident_bytes()
    program = jax.jit(checksum_arrays).lower(named_arrays(trainer.state)).compile()
    return during - before, program.memory_analysis().temp_size_in_bytes


def resident_bytes() -> int:
    """Returns the bytes of the distinct buffers on devices: arrays may share one."""
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    buffers = {(x.device, x.data.unsafe_buffer_pointer()): x.data.nbytes for x in shards}
    return sum(buffers.values())


def main(settings: CheckpointCost) -> None:
    """Times the steps of a run, and prints what its checkpoints cost."""
    with tempfile.TemporaryDirectory() as scratch:
        saving, without = step_seconds(settings, Path(scratch) / "run")
        newest = max(Path(scratch).glob("run/checkpoints/*"), key=lambda path: path.stat().st_mtime)
        size = sum(path.stat().st_size for path in newest.rglob("*"))
        resident, temporary = added_bytes(settings, Path(scratch))
    costs = [one / other - 1 for one, other in zip(saving, without, strict=True)]
    low, middle, high = statistics.quantiles(costs, n=4)
    figures = {
        "cost": {"median": middle, "quartiles": [low, high]},
        "seconds_per_step": {"saving": saving, "without": without},
        "checkpoint_bytes": size,
        "added_device_bytes": resident,
        "checksum_temporary_bytes": temporary,
        "save_steps": settings.save_steps,
    }
    print(
        f"a checkpoint of {size / 1e6:.1f} MB every {settings.save_steps} steps costs {middle:+.1%}"
        f" (quartiles {low:+.1%} and {high:+.1%}) of a step's {statistics.median(without):.3f} s; "
        f"on devices it takes {resident / 1e6:.3f} MB while it is written, and "
        f"{temporary / 1e6:.3f} MB during its checksums"
    )
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(CheckpointCost))
    except UserError as error:
        sys.exit(f"error: {error}")
