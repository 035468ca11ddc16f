"""The result of an evaluation."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from grpo_eqx.common.errors import UserError
from grpo_eqx.evaluation.intervals import Estimate, mean_of, mean_share_of, share_of

PREFIX = "eval/"
"""Prefix of the names of an evaluation's metrics."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Correctness of `S` completions for each of `N` held-out problems."""

    solved: Bool[np.ndarray, "N S"]
    strict: Bool[np.ndarray, "N S"] | None = None
    """Correctness if answers must be marked; `None` if `eval_func` has no strict form."""
    voted: Bool[np.ndarray, " N"] | None = None
    """Whether the most frequent answer is correct; `None` if answers cannot be compared."""
    scores: Mapping[str, Float[np.ndarray, "N S"]] = dataclasses.field(default_factory=dict)
    """Values of each of `eval_metrics`, NaN for completions that it does not apply to."""
    temperature: float = 0.0
    """Sampling temperature of the completions; 0 for greedy completions."""

    def __str__(self) -> str:
        problems, samples = self.solved.shape
        first, *others = self.estimates().items()
        each = f", {samples} completions each" if samples > 1 else ""
        how = f"at temperature {self.temperature:g}" if self.temperature else "greedy"
        text = f"{_percent(first[1])} correct on {problems:,} problems{each}, {how}"
        for name, estimate in others:
            words = _number(estimate) if name in self.scores else _percent(estimate)
            text += f"; {name.replace('/', ' ')} {words}"
        return text

    @property
    def how(self) -> str:
        """Part of the metrics' names for the sampling: `greedy`, or the temperature."""
        return f"temperature_{self.temperature:g}" if self.temperature else "greedy"

    def estimates(self) -> dict[str, Estimate]:
        """Returns the figures with their 95 % intervals.

        pass@k and maj@k have Wilson's interval, with an effective number of completions from the
        variance between problems. Values of `eval_metrics`, which may be any numbers, have the
        normal interval over problems. `evaluation/intervals.py` has the sources.
        """
        samples = self.solved.shape[1]
        found = {f"pass@{k}": _pass_estimate(self.solved, k) for k in sorted({1, samples})}
        if self.voted is not None and samples > 1:
            found[f"maj@{samples}"] = share_of(self.voted)
        if self.strict is not None:
            strict = {f"strict/pass@{k}": _pass_estimate(self.strict, k) for k in (1, samples)}
            found |= strict
        return found | {name: mean_of(_mean(own)) for name, own in self.scores.items()}

    def metrics(self) -> dict[str, float]:
        """Returns the figures under their recorded names."""
        found = dict[str, float]()
        for name, estimate in self.estimates().items():
            full = f"{PREFIX}{self.how}/{name}"
            found |= {full: estimate.value, f"{full}/ci_low": estimate.low}
            found[f"{full}/ci_high"] = estimate.high
        return {**found, f"{PREFIX}num_problems": float(len(self.solved))}

    @property
    def accuracy(self) -> float:
        """Share of correct completions: pass@1."""
        return self.pass_at(1)

    def pass_at(self, k: int) -> float:
        """Estimates pass@k without bias (arXiv 2107.03374, eq. 1).

        pass@k is the probability that at least one of `k` completions is correct. Raises
        `UserError` for a `k` below 1, or above the number of completions per problem.
        """
        samples = self.solved.shape[1]
        if k != int(k) or not 1 <= k <= samples:
            raise UserError(f"pass@{k} needs 1 <= k <= {samples}, the samples per problem.")
        return float(_pass_at(self.solved, k).mean())

    def joined(self, other: "Evaluation") -> "Evaluation":
        """Returns one evaluation of the problems of both: these first, then those of `other`."""
        pairs = {name: (own, other.scores[name]) for name, own in self.scores.items()}
        return dataclasses.replace(
            self,
            solved=np.concatenate([self.solved, other.solved]),
            strict=_joined(self.strict, other.strict),
            voted=_joined(self.voted, other.voted),
            scores={name: np.concatenate(pair) for name, pair in pairs.items()},
        )


def _pass_at(solved: Bool[np.ndarray, "N S"], k: int) -> Float[np.ndarray, " N"]:
    """Estimates each problem's pass@k."""
    samples = solved.shape[1]
    wrong = samples - solved.sum(axis=1)
    # C(wrong, k) / C(samples, k), as a product of k ratios
    draws = np.arange(k)
    missed = np.prod(np.maximum(wrong[:, None] - draws, 0) / (samples - draws), axis=1)
    return 1 - missed


def _pass_estimate(solved: Bool[np.ndarray, "N S"], k: int) -> Estimate:
    if k == solved.shape[1]:
        return share_of(solved.max(axis=1))
    return mean_share_of(_pass_at(solved, k), solved.shape[1])


def _mean(scores: Float[np.ndarray, "N S"]) -> Float[np.ndarray, " N"]:
    """Averages each problem's scores; NaN for problems without scores."""
    counts = (~np.isnan(scores)).sum(axis=1)
    sums = np.nansum(scores, axis=1)
    return np.divide(sums, counts, out=np.full(len(scores), np.nan), where=counts > 0)


def _joined(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None else np.concatenate([one, other])


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} ({100 * estimate.low:.1f}-{100 * estimate.high:.1f})"
