"""One process of a run over several: makes one update and writes what came of it.

    python update_worker.py FOLDER all|adapters

The second argument says what is trained. Run by `test_update.py`, on eight CPU devices in all.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.startup import initialize
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.arrays import fetch, shard
from grpo_eqx.sharding.rules import num_batch_shards
from grpo_eqx.training import Forward, Packing, Rows, RowShape, UpdateOptions, Updater
from grpo_eqx.training.rows import pack, place_tokens, with_loss

P, G, TP, TC, V = 8, 4, 6, 10, 32


def random_groups(rng: np.random.Generator) -> list[list[Trajectory]]:
    """Ragged completions: the same in every process."""
    lengths = rng.integers(1, TC + 1, (P, G))
    return [
        [
            Trajectory(prompt, Address(0, p, g)).completed(
                rng.integers(4, V, n).astype(np.int32),
                rng.normal(-2, 0.5, n).astype(np.float32),
                finish_reason="stop" if n < TC else "length",
            )
            for g, n in enumerate(lengths[p])
        ]
        for p, prompt in enumerate(
            rng.integers(4, V, n).tolist() for n in rng.integers(1, TP + 1, P)
        )
    ]  # fmt: skip


def random_rows(mesh: jax.sharding.Mesh) -> Rows:
    rng = np.random.default_rng(0)
    groups = random_groups(rng)
    each = [x for group in groups for x in group]
    shape = RowShape.of(
        P, G, prompt_length=TP, completion_length=TC, num_shards=num_batch_shards(mesh), size=2,
        most_tokens=64,
    )  # fmt: skip
    prompt_lengths = np.array([len(group[0].prompt_ids) for group in groups])
    lengths = np.array([[len(x) for x in group] for group in groups])
    packing = Packing.plan(prompt_lengths, lengths, shape)
    assert packing.number > 1
    scores = {
        name: place_tokens(
            [rng.normal(mean, 0.5, len(x)).astype(np.float32) for x in each], packing, mesh
        )
        for name, mean in (("old_logps", -2), ("ref_logps", -2), ("entropies", 1))
    }
    return with_loss(
        pack(groups, packing, mesh), packing, mesh, [x.written & x.is_finished for x in each],
        rng.normal(size=P * G), **scores,
    )  # fmt: skip


def main(folder: Path, trained: str) -> None:
    objective = Objective(
        loss_type="dapo",
        importance_sampling_level="sequence",
        beta=0.1,
        importance_sampling_mode="sequence_truncate",
        importance_sampling_clip_max=3.0,
        entropy_coef=0.01,
        max_completion_length=TC,
    )
    mesh = parse_mesh("2,4,1").build()
    forward = Forward(
        backend=ChunkedLoss(), mesh=mesh, dtype=jnp.dtype("float32"), remat="none",
        attention=BlockedAttention(64),
    )  # fmt: skip
    options = UpdateOptions(temperature=1.0, objective=objective, top_entropy_quantile=0.5)
    updater = Updater(options, forward, optax.sgd(32.0))
    config = Qwen2Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2.init(config, jax.random.key(0), std=0.2)
    if trained == "adapters":
        model = with_adapters(model, Lora(rank=4, alpha=8.0), jax.random.key(1))
    model = jax.tree.map(shard, model, model.shardings(mesh))
    state, metrics = updater(updater.init(model), random_rows(mesh))
    out = folder / f"update-{jax.process_count()}-{jax.process_index()}.npz"
    leaves, metrics = jax.tree.leaves(fetch(state.model)), fetch(metrics)
    np.savez(out, *leaves, **{f"metric {name}": value for name, value in metrics.items()})


if __name__ == "__main__":
    initialize({"the work": "an update"})
    main(Path(sys.argv[1]), sys.argv[2])
