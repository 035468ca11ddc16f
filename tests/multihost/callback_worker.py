"""One process of a run whose callbacks respond otherwise in each; writes what came of it.

    python callback_worker.py MODEL OUT

Then all processes evaluate the run's checkpoint by the command.
"""

import json
import sys
from pathlib import Path

import jax

from grpo_eqx import Callback, Event, GRPOConfig, GRPOTrainer, Response
from grpo_eqx.cli.main import run

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class Differs(Callback):
    """Would stop after step 2 in process 0, and after step 1 in others."""

    def on_step_end(self, event: Event) -> Response:
        here = jax.process_index()
        stop = f"process {here}" if event.step == (1 if here else 2) else None
        return Response(metrics={"index": float(here)}, stop=stop)


def distinct_words(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Something that an untrained model is not always equally good at."""
    return [len(set(text.split())) / 10 for text in completions]


def train(model: str, out: Path) -> None:
    cfg = GRPOConfig(
        model=model, output_dir=out / "run", steps=4, prompts_per_step=8, num_generations=2,
        max_completion_length=5, learning_rate=1e-2, log_completions_steps=0, seed=6,
        start_timeout=120.0, eval_problems=20, eval_steps=2, num_generations_eval=2,
        data=str(PROBLEMS), resume="never",
    )  # fmt: skip
    trainer = GRPOTrainer(
        cfg, reward_funcs=[distinct_words], callbacks=[Differs()],
        eval_metrics={"words": distinct_words},
    )  # fmt: skip
    result = trainer.fit()
    made = {
        "steps": [row["step"] for row in result.history],
        "index": [row["index"] for row in result.history],
        "stopped": result.stopped,
        "evaluations": [
            {name: x for name, x in row.items() if not name.startswith("time/")}
            for row in result.evaluations
        ],
    }
    (out / f"{jax.process_index()}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    train(sys.argv[1], folder)
    checkpoint, output = folder / "run" / "checkpoints" / "step_2", folder / "results.json"
    run(["eval", "--model", str(checkpoint), "--num-samples", "2", "--output", str(output)])
