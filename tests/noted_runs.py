"""What runs leave to be compared: their completions and their model."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


class Seen:
    """A reward that notes the completions of each prompt."""

    def __init__(self) -> None:
        self.ids: dict[str, list[list[int]]] = {}

    def __call__(
        self, prompts: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        if len(prompts) > 1:  # not the trial before the first rollout
            for prompt, ids in zip(prompts, completion_ids, strict=True):
                self.ids.setdefault(str(prompt), []).append(ids)
        return [float(len(ids) % 3) for ids in completion_ids]


def model_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the final model of a run folder."""
    return load_file(folder / "model" / "model.safetensors")
