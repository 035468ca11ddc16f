"""The time that saving checkpoints adds to a step, and the device memory that it takes.

    python benchmarks/checkpoint_cost.py --json checkpoint_cost.json

The default run is made in turns with a checkpoint every few steps and with none, so that a machine
that slows down slows both. The time of a step is that between the ends of two steps: it includes
the copy to host memory, and the writing in the background. Memory is that of arrays on the devices
when a save has begun, beyond those before it, and of temporaries of the program that computes the
checksums. Run it alone on the machine.
"""

import dataclasses
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

UNTIMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """What to time."""

    save_steps: int = 10
    """Steps between checkpoints."""
    steps: int = 45
    """Steps of a run, of which the first five are not timed."""
    repeats: int = 3
    """Runs of each kind."""
    model: str = GRPOConfig.model
    """Model to train."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if self.steps < UNTIMED + 2 * self.save_steps:
            raise UserError(f"steps is {self.steps}: at least two checkpoints must be timed.")


class Times(Tracker):
    """Wall-clock time at which each step was done."""

    def __init__(self) -> None:
        self.done: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done.append(time.perf_counter())

    def finish(self) -> None:
        pass


def step_seconds(settings: CheckpointCost, folder: Path, save_steps: int | None) -> float:
    """Returns the mean time of a step of a run, after the first ones."""
    times = Times()
    cfg = GRPOConfig(
        model=settings.model, steps=settings.steps, save_steps=save_steps, save_minutes=None,
        output_dir=folder, resume="never", log_completions_steps=0,
    )  # fmt: skip
    GRPOTrainer(cfg, trackers=[times]).fit()
    # The save at the end is in both, and after the last step.
    return (times.done[-1] - times.done[UNTIMED - 1]) / (settings.steps - UNTIMED)


def added_bytes(settings: CheckpointCost, folder: Path) -> int:
    """Returns the device memory that a save takes while it is being written."""
    trainer = GRPOTrainer(GRPOConfig(model=settings.model, output_dir=folder / "run"))
    before = resident_bytes()
    with CheckpointStore(folder / "checkpoints") as store:
        store.save(trainer.state, {})
        during = resident_bytes()
    program = jax.jit(checksum_arrays).lower(named_arrays(trainer.state)).compile()
    return during - before + program.memory_analysis().temp_size_in_bytes


def resident_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def main(settings: CheckpointCost) -> None:
    """Times runs with and without checkpoints, in turns, and prints what the checkpoints cost."""
    seconds: dict[str, list[float]] = {"saving": [], "not saving": []}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(settings.repeats):
            for kind, save_steps in (("not saving", None), ("saving", settings.save_steps)):
                folder = Path(scratch) / f"{kind}-{repeat}"
                seconds[kind].append(step_seconds(settings, folder, save_steps))
        memory = added_bytes(settings, Path(scratch))
        size = sum(x.stat().st_size for x in folder.glob(f"checkpoints/step_{settings.steps}/**/*"))
    saving, without = (statistics.median(seconds[kind]) for kind in ("saving", "not saving"))
    figures = {
        "seconds_per_step": seconds,
        "cost": saving / without - 1,
        "checkpoint_bytes": size,
        "added_device_bytes": memory,
        "save_steps": settings.save_steps,
    }
    print(
        f"a checkpoint of {size / 1e6:.1f} MB every {settings.save_steps} steps costs "
        f"{figures['cost']:+.1%} of a step's {without:.3f} s, and {memory / 1e6:.3f} MB on devices"
    )
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(CheckpointCost))
    except UserError as error:
        sys.exit(f"error: {error}")
