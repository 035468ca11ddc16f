"""Result of an evaluation."""

import dataclasses

import numpy as np
from jaxtyping import Bool

_MOST_COMPLETIONS = 128


def evaluation_rows(num_problems: int, num_samples: int, num_shards: int) -> int:
    """Returns how many problems to complete at a time: about 128 completions, split evenly."""
    rows = min(num_problems, max(1, _MOST_COMPLETIONS // num_samples))
    return -(-rows // num_shards) * num_shards


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Correctness of `S` completions for each of `N` held-out problems."""

    solved: Bool[np.ndarray, "N S"]

    def __str__(self) -> str:
        problems, samples = self.solved.shape
        each = f", {samples} completions each" if samples > 1 else ""
        best = f"; pass@{samples} {self.pass_at(samples):.1%}" if samples > 1 else ""
        return f"{self.accuracy:.1%} correct on {problems:,} problems{each}{best}"

    @property
    def accuracy(self) -> float:
        """Fraction of completions that are correct: pass@1."""
        return float(self.solved.mean())

    def pass_at(self, k: int) -> float:
        """Estimates pass@k without bias (arXiv 2107.03374, eq. 1).

        pass@k is the probability that at least one of `k` completions is correct.
        """
        num_samples = self.solved.shape[1]
        if not 1 <= k <= num_samples:
            raise ValueError(f"pass@{k} needs 1 <= k <= {num_samples}, the samples per problem.")
        wrong = num_samples - self.solved.sum(axis=1)
        # C(wrong, k) / C(samples, k), as a product of k ratios
        draws = np.arange(k)
        missed = np.prod(np.maximum(wrong[:, None] - draws, 0) / (num_samples - draws), axis=1)
        return float(1 - missed.mean())
