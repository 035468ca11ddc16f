"""What recording a step costs: metrics, trackers, completions, diagnosis and display.

    python examples/gsm8k.py --steps 30 --output-dir runs/recorded
    python benchmarks/tracking_cost.py runs/recorded --report-to tensorboard wandb

Records the steps of a run again, with their tables of completions, and compares the seconds with
those of the run's steps. In a terminal the live display is on. Run it alone on the machine.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import pyarrow.parquet as pq
import tyro

from grpo_eqx import GRPOConfig
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking.recorded_completions import TOKEN_COLUMNS
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.run_record import RunRecord


@dataclasses.dataclass(frozen=True)
class TrackingCost:
    """What to record."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run with tables of completions."""
    report_to: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, or wandb, which is offline here."""


def main(cfg: TrackingCost) -> None:
    recorded = RecordedRun.read(cfg.run)
    tables = {step: pq.read_table(path) for step, path in recorded.completion_tables.items()}
    columns = {step: table.to_pydict() for step, table in tables.items()}
    layout = LayoutReport(**json.loads(recorded.folder.layout.read_text()))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {**recorded.settings, "output_dir": folder, "log_completions": False}
        offline = "offline" if "wandb" in cfg.report_to else None
        settings |= {"report_to": cfg.report_to, "wandb": offline, "wandb_project": None}
        settings |= {"num_completions_to_print": None}
        run = GRPOConfig(**settings).resolved()
        with RunRecord(run, layout) as record:
            for metrics in recorded.steps:
                step = int(metrics["step"])
                logged = {name: value for name, value in metrics.items() if name != "step"}
                table = columns.get(step, {})
                of_tokens = {name: table.pop(name) for name in TOKEN_COLUMNS if name in table}
                start = time.perf_counter()
                record.step(step, logged)
                if table:
                    record.completions(table, of_tokens)
                seconds.append(time.perf_counter() - start)
    own, whole = statistics.median(seconds), statistics.median(recorded.values("step_time"))
    print(
        f"recording a step: median {1e3 * own:.1f} ms, longest {1e3 * max(seconds):.1f} ms; the "
        f"run's steps: median {whole:.2f} s; share {own / whole:.2%}"
    )


if __name__ == "__main__":
    main(tyro.cli(TrackingCost, description=__doc__))
