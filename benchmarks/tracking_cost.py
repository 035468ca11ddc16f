"""What seeing a run costs: metrics, trackers, completions, memory, diagnosis and display.

    python benchmarks/tracking_cost.py --report-to tensorboard wandb

Trains the embedded model as examples/gsm8k.py does, and times every call in which the trainer
records a step. The next rollout is generated meanwhile, so the share of a step that it takes longer
for them is at most what is printed. In a terminal the live display is on. Run it alone on the
machine.
"""

import collections
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import tyro

import grpo_eqx.trainer
from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.tracking.memory import MemoryGauge
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.training_events import TrainingEvents

RECORDING = (
    (RunRecord, "step"),
    (RunRecord, "completions"),
    (grpo_eqx.trainer, "completion_columns"),
    (grpo_eqx.trainer, "token_columns"),
    (MemoryGauge, "meet"),
    (MemoryGauge, "metrics"),
    (TrainingEvents, "step_ended"),
)
"""Calls of the trainer's loop that a run which recorded nothing would not make."""


@dataclasses.dataclass(frozen=True)
class TrackingCost:
    """What to record."""

    report_to: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, or wandb, which is offline here."""
    steps: int = 60
    """Number of steps."""
    log_completions: bool = False
    """Whether to print completions too."""


def main(benchmark: TrackingCost) -> None:
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for owner, name in RECORDING:
        setattr(owner, name, timed(getattr(owner, name), seconds[f"{owner.__name__}.{name}"]))
    with tempfile.TemporaryDirectory() as folder:
        cfg = GRPOConfig(
            steps=benchmark.steps,
            output_dir=folder,
            report_to=benchmark.report_to,
            wandb="offline" if "wandb" in benchmark.report_to else None,
            log_completions=benchmark.log_completions,
        )
        result = GRPOTrainer(cfg).fit()
    # Programs are compiled in the first steps, which are longer.
    steps = [metrics["step_time"] for metrics in result.history]
    middle = statistics.median(steps)
    for name, each in seconds.items():
        print(f"{name:40s} median {1e3 * statistics.median(each):7.2f} ms")
    own, whole = sum(sum(each) for each in seconds.values()), sum(steps)
    print(
        f"{benchmark.steps} steps, median {middle:.3f} s: recording takes {own:.2f} s of "
        f"{whole:.1f} s, {own / whole:.2%}; per step {1e3 * own / len(steps):.1f} ms, "
        f"{own / len(steps) / middle:.2%} of the median one"
    )


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


if __name__ == "__main__":
    main(tyro.cli(TrackingCost, description=__doc__))
