"""One process of short runs; writes what came of each.

    python train_worker.py MODEL OUT SETTINGS "MESH[ of NUMBER_OF_DEVICES]/ROLLOUT_SHARDING" ...

SETTINGS are fields of the config, in JSON. A run on fewer devices than there are takes the first
ones.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.rollout.rollout import Rollout
from grpo_eqx.sharding import Mesh, parse_mesh
from grpo_eqx.tracking import run_record

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class FirstDevices(Mesh):
    """Another mesh over the first devices."""

    mesh: Mesh
    number: int

    def shape(self, devices: Sequence[jax.Device]) -> tuple[int, int, int]:
        return self.mesh.shape(devices)

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        return self.mesh.build(jax.devices()[: self.number])


def distinct_words(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Something that an untrained model is not always equally good at."""
    return [len(set(text.split())) / 10 for text in completions]


def run(
    model: str, out: Path, settings: dict[str, Any], described_mesh: str, rollout_sharding: str
) -> None:
    mesh, _, devices = described_mesh.partition(" of ")
    defaults: dict[str, Any] = {
        "model": model, "output_dir": out / "run", "rollout_sharding": rollout_sharding, "steps": 3,
        "prompts_per_step": 16, "num_generations": 4, "max_completion_length": 5,
        "learning_rate": 1e-3, "micro_batch_size_per_device": 4, "log_completions_steps": 0,
        "seed": 6, "start_timeout": 120.0, "eval_problems": 8, "mesh": mesh, "data": str(PROBLEMS),
        "resume": "never",
    }  # fmt: skip
    cfg = GRPOConfig(**{**defaults, **settings})
    chosen = FirstDevices(parse_mesh(mesh), int(devices)) if devices else None
    trainer = GRPOTrainer(cfg, mesh=chosen, reward_funcs=[distinct_words])
    tokens = []
    collect = trainer.rollouts.next

    def listen(*args: object) -> tuple[Rollout, Rollout]:
        kept, made = collect(*args)  # type: ignore[arg-type]
        tokens.append(kept.ids)
        return kept, made

    trainer.rollouts.next = listen  # type: ignore[method-assign]
    if jax.process_count() != 2:  # saving is compilation for every tensor: once is enough
        trainer.save_pretrained = lambda path: Path(path).mkdir(exist_ok=True)  # type: ignore[method-assign]
    history = [dict(metrics) for metrics in trainer.fit().history]
    name = f"{described_mesh}-{rollout_sharding}-{jax.process_index()}.json"
    (out / name).write_text(json.dumps({"tokens": tokens, "history": history}))


if __name__ == "__main__":
    run_record.plot_learning_curve = lambda *_: None  # type: ignore[attr-defined]  # for speed
    for described in sys.argv[4:]:
        run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), *described.split("/"))
