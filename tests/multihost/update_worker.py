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

from grpo_eqx.distributed.startup import initialize
from grpo_eqx.generation import Prompts, Rollout, Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.arrays import fetch, shard
from grpo_eqx.training.batch import Batch
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.programs import Programs

P, G, TP, TC, V = 8, 4, 6, 10, 32


def random_batch() -> Batch:
    """Ragged completions, as arrays on the host: the same in every process."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, TC + 1, (P, G))
    mask = np.arange(TC) < lengths[..., None]
    prompt_mask = np.arange(TP) < rng.integers(1, TP + 1, P)[:, None]
    logps = rng.normal(-2, 0.5, (3, P, G, TC)).astype(np.float32)
    rollout = Rollout(
        Prompts(rng.integers(4, V, (P, TP)).astype(np.int32), prompt_mask),
        rng.integers(4, V, (P, G, TC)).astype(np.int32),
        mask,
        np.where(mask, logps[0], 0),
        lengths < TC,
    )
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    return Batch(rollout, advantages, logps[1], logps[2], rng.random((P, G, TC), np.float32))


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
    options = ProgramOptions(
        sampling=Sampling(), max_prompt_length=TP, max_completion_length=TC,
        stopping=Stopping.of_ids([3], V), pad_id=0, seed=0, dtype=jnp.dtype("float32"),
        remat="none", attention=BlockedAttention(64), objective=objective,
        mask_truncated_completions=True, top_entropy_quantile=0.5, micro_batch_size_per_device=2,
        tokens_per_micro_batch=64,
    )  # fmt: skip
    programs = Programs(options, parse_mesh("2,4,1").build(), ChunkedLoss(), optax.sgd(32.0))
    config = Qwen2Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2.init(config, jax.random.key(0), std=0.2)
    if trained == "adapters":
        model = with_adapters(model, Lora(rank=4, alpha=8.0), jax.random.key(1))
    model = jax.tree.map(shard, model, model.shardings(programs.mesh))
    batch = random_batch()
    packing = programs.packing(batch.rollout.prompts.mask.sum(axis=1), batch.rollout.lengths)
    assert packing.number > 1
    state, metrics = programs.update(programs.init(model), batch, packing)
    out = folder / f"update-{jax.process_count()}-{jax.process_index()}.npz"
    leaves, metrics = jax.tree.leaves(fetch(state.model)), fetch(metrics)
    np.savez(out, *leaves, **{f"metric {name}": value for name, value in metrics.items()})


if __name__ == "__main__":
    initialize({"the work": "an update"})
    main(Path(sys.argv[1]), sys.argv[2])
