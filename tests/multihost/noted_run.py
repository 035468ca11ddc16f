"""Notes of a run that workers of this folder make, for their tests to compare."""

import json
from pathlib import Path

import jax

from grpo_eqx import GRPOTrainer
from grpo_eqx.tracking import run_record


def fit_and_note(trainer: GRPOTrainer, out: Path) -> None:
    """Trains in `out/run`; writes the steps and the evaluations to a file of this process."""
    run_record.plot_learning_curve = lambda *_: None  # type: ignore[attr-defined]  # for speed
    trainer.save_pretrained = lambda path: Path(path).mkdir(exist_ok=True)  # type: ignore[method-assign]
    result = trainer.fit()
    history = [dict(metrics) for metrics in result.history]
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if "eval/num_problems" in line]
    made = json.dumps({"history": history, "evaluations": evaluations})
    (out / f"{jax.process_index()}.json").write_text(made)
