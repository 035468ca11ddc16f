"""Table of a step's prompts, completions and rewards."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.generation import Completions
from grpo_eqx.rewards import Rewards


def write_completions(
    path: Path,
    step: int,
    prompts: Sequence[Prompt],
    completions: Completions,
    rewards: Rewards,
    advantages: Float[np.ndarray, "P G"],
) -> None:
    """Writes a Parquet table of the step, one row per completion."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    group = advantages.shape[1]
    table = {
        "step": [step] * advantages.size,
        "prompt": [prompt.text for prompt in prompts for _ in range(group)],
        "completion": [text for texts in completions.texts for text in texts],
        **{
            f"rewards/{name}": each.reshape(-1)
            for name, each in zip(rewards.names, rewards.each, strict=True)
        },
        "reward": rewards.total.reshape(-1),
        "advantage": advantages.reshape(-1),
        "length": completions.lengths.reshape(-1),
        "truncated": ~completions.finished.reshape(-1),
    }
    with path.open("wb") as file:  # a path with a colon would be taken for an address
        pq.write_table(pa.table(table), file)
