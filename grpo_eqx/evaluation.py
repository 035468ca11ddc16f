"""What an evaluation found."""

import dataclasses

import numpy as np
from jaxtyping import Bool

_MOST_COMPLETIONS = 128


def evaluation_rows(num_problems: int, num_samples: int, num_shards: int) -> int:
    """Problems that are completed at a time: about 128 completions, as many on each device."""
    rows = min(num_problems, max(1, _MOST_COMPLETIONS // num_samples))
    return -(-rows // num_shards) * num_shards


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Which of `N` held-out problems each of `S` completions solved."""

    solved: Bool[np.ndarray, "N S"]

    @property
    def accuracy(self) -> float:
        """The share of completions that are right: pass@1."""
        return float(self.solved.mean())

    def pass_at(self, k: int) -> float:
        """The chance that one of `k` completions is right, unbiased (arXiv 2107.03374, eq. 1)."""
        num_samples = self.solved.shape[1]
        if not 1 <= k <= num_samples:
            raise ValueError(f"pass@{k} needs 1 <= k <= {num_samples}, the samples of a problem.")
        wrong = num_samples - self.solved.sum(axis=1)
        # C(wrong, k) / C(samples, k), as a product of k ratios
        draws = np.arange(k)
        missed = np.prod(np.maximum(wrong[:, None] - draws, 0) / (num_samples - draws), axis=1)
        return float(1 - missed.mean())
