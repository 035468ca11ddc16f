"""What seeing a run costs: metrics, trackers, completions, memory, diagnosis and display.

    python benchmarks/tracking_cost.py --report-to tensorboard wandb

Trains the embedded model as examples/gsm8k.py does, and times every call in which the trainer
records a step after the first. The next rollout is generated meanwhile: an accelerator does not
wait for these calls, and on a CPU they take from it the CPU time that is printed. The seconds
include their waiting for a core. In a terminal the live display is on. Run it alone on the machine.
"""

import collections
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tyro

import grpo_eqx.tracking.run_record
import grpo_eqx.trainer
from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.loop.training_events import TrainingEvents
from grpo_eqx.tracking.memory import MemoryGauge
from grpo_eqx.tracking.run_record import RunRecord

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
BESIDE = (grpo_eqx.tracking.run_record, "write_completions")
"""What a thread does meanwhile: its CPU time counts, and the loop does not wait for it."""


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
    if benchmark.steps < 2:
        raise SystemExit("error: steps must be at least 2: the first is not counted.")
    calls: dict[str, list[Call]] = collections.defaultdict(list)
    for owner, name in (*RECORDING, BESIDE):
        setattr(owner, name, timed(getattr(owner, name), calls[name_of(owner, name)]))
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
    step = statistics.median(metrics["step_time"] for metrics in result.history)
    first = sum(each.pop(0).cpu_seconds for each in calls.values())
    for name, each in calls.items():
        seconds = statistics.median(call.seconds for call in each)
        cpu_seconds = statistics.median(call.cpu_seconds for call in each)
        print(f"{name:50s} median {1e3 * seconds:6.2f} ms, CPU {1e3 * cpu_seconds:6.2f} ms")
    beside = calls.pop(name_of(*BESIDE))
    in_loop = [call for each in calls.values() for call in each]
    steps = benchmark.steps - 1
    seconds = sum(call.seconds for call in in_loop) / steps
    cpu_seconds = sum(call.cpu_seconds for call in (*in_loop, *beside)) / steps
    print(
        f"{steps} steps of {step:.3f} s (median): recording one takes on average "
        f"{1e3 * seconds:.1f} ms, {seconds / step:.2%}, and of the CPU {1e3 * cpu_seconds:.1f} ms, "
        f"{cpu_seconds / step:.2%}; the first, which imports libraries, {first:.2f} s of the CPU"
    )


def name_of(owner: Any, name: str) -> str:
    return f"{owner.__name__}.{name}"


class Call(NamedTuple):
    """What a call took."""

    seconds: float
    cpu_seconds: float


def timed(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
            calls.append(Call(seconds, cpu_seconds))

    return call


if __name__ == "__main__":
    main(tyro.cli(TrackingCost, description=__doc__))
