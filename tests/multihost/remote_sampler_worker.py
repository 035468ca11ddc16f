"""One process of a run over several: samples on a server and writes what it gets.

    python remote_sampler_worker.py FOLDER ADDRESS

Run by `test_remote_sampler.py`, on four CPU devices in all.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from session_worker import G, P, Scripted, V

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.generation.remote import RemoteOptions, RemoteSampler
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.arrays import shard


def main(folder: Path, address: str) -> None:
    mesh = parse_mesh("2,2,1").build()
    config = Qwen2Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2.init(config, jax.random.key(0))
    options = RemoteOptions(
        sampling=Sampling(), max_completion_length=50, stopping=Stopping.of_ids([3], V),
        end_ids=[3], seed=0,
    )  # fmt: skip
    sampler = RemoteSampler([address], folder / f"weights-{jax.process_count()}", options)
    sampler.set_weights(jax.tree.map(shard, model, model.shardings(mesh)), 0)
    trajectories = [Trajectory([7, 8 + p], Address(0, p, g)) for p in range(P) for g in range(G)]
    turns = sampler.submit(trajectories, responder=Scripted()).result().trajectories
    made = [*turns, *sampler.submit(trajectories).result().trajectories]
    sampler.close()
    np.savez(
        folder / f"remote-{jax.process_count()}-{jax.process_index()}.npz",
        **{
            f"{name} {i}": getattr(each, name)
            for i, each in enumerate(made)
            for name in ("ids", "written", "sampler_logps")
        },
    )


if __name__ == "__main__":
    initialize({"the work": "remote"})
    main(Path(sys.argv[1]), sys.argv[2])
