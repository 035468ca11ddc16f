"""One process of a run over several: samples completions of several turns and writes them.

    python session_worker.py FOLDER SLOTS

The second argument is the number of slots, or 0 for one each. Run by `test_session.py`, on four CPU
devices in all.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.sampler import Responder
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.arrays import shard

P, G, V, LONGEST = 8, 2, 29, 50


class Scripted(Responder):
    """Replies to one completion at a time, in an order of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(jax.process_count())
        self.turns = [0] * (P * G)
        self.asked: list[int] = []

    def take(self, number: int, trajectory: Trajectory) -> None:
        self.asked.append(number)

    def replies(self, wait: bool) -> Sequence[tuple[int, Sequence[int] | None]]:
        if not self.asked:
            return []
        number = self.asked.pop(self.rng.randrange(len(self.asked)))
        self.turns[number] += 1
        rng = random.Random(f"{number} {self.turns[number]}")
        ended = self.turns[number] > number % 3
        return [(number, None if ended else [rng.randrange(V) for _ in range(rng.choice([1, 9]))])]


def main(folder: Path, slots: int) -> None:
    mesh = parse_mesh("2,2,1").build()
    config = Qwen2Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2.init(config, jax.random.key(0), std=0.3)
    options = SamplerOptions(
        sampling=Sampling(), max_prompt_length=10, max_completion_length=LONGEST,
        stopping=Stopping.of_ids((3, 5, 6), V), pad_id=0, seed=0, dtype=jnp.dtype("float32"),
        attention=BlockedAttention(), max_num_seqs=slots or None,
    )  # fmt: skip
    sampler = LocalSampler(options, mesh)
    sampler.set_weights(jax.tree.map(shard, model, model.shardings(mesh)), 0)
    rng = np.random.default_rng(0)
    trajectories = [
        Trajectory(prompt, Address(0, p, g))
        for p, prompt in enumerate(rng.integers(7, V, n).tolist() for n in range(1, P + 1))
        for g in range(G)
    ]
    made = sampler.submit(trajectories, responder=Scripted()).result().trajectories
    out = folder / f"turns-{jax.process_count()}-{jax.process_index()}.npz"
    np.savez(
        out,
        **{
            f"{name} {i}": getattr(each, name)
            for i, each in enumerate(made)
            for name in ("ids", "written", "sampler_logps")
        },
    )


if __name__ == "__main__":
    initialize({"the work": "turns"})
    main(Path(sys.argv[1]), int(sys.argv[2]))
