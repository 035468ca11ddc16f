"""Table of a step's prompts, completions and rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.generation import Completions
from grpo_eqx.rewards import Rewards


def completions_columns(
    step: int,
    prompts: Sequence[Prompt],
    completions: Completions,
    rewards: Rewards,
    advantages: Float[np.ndarray, "P G"],
) -> dict[str, list[Any]]:
    """Returns the columns of the step's table, with one value per completion."""
    group = advantages.shape[1]
    return {
        "step": [step] * advantages.size,
        "prompt": [prompt.text for prompt in prompts for _ in range(group)],
        "completion": [text for texts in completions.texts for text in texts],
        **{
            f"rewards/{name}": each.reshape(-1).tolist()
            for name, each in zip(rewards.names, rewards.each, strict=True)
        },
        "reward": rewards.total.reshape(-1).tolist(),
        "advantage": advantages.reshape(-1).tolist(),
        "length": completions.lengths.reshape(-1).tolist(),
        "truncated": (~completions.finished).reshape(-1).tolist(),
    }


def write_completions(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes the columns as a Parquet table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("wb") as file:  # a path with a colon would be taken for an address
        pq.write_table(pa.table(dict(columns)), file)
