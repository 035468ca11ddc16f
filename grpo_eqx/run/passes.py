"""The forward passes of a step besides those of its updates."""

from typing import NamedTuple

from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.training.scorer import SCORE, SCORE_REFERENCE


class Passes(NamedTuple):
    """The forward passes over a step's completions besides those of its updates."""

    old_policy: bool
    """For the log-probs that ratios divide by. A single update has ratios of 1; with
    `importance_sampling_mode` `coupled`, they are relative to the sampler."""
    reference: bool
    """For the log-probs of the KL term."""
    entropies: bool
    """For the entropies of the policy before each of its updates."""

    @classmethod
    def of(cls, cfg: GRPOConfig) -> "Passes":
        """Decides which passes the settings need."""
        return cls(
            old_policy=cfg.updates_per_step > 1 and cfg.importance_sampling_mode != "coupled",
            reference=cfg.beta > 0,
            entropies=cfg.top_entropy_quantile < 1,
        )

    @property
    def row_fields(self) -> list[str]:
        """Fields of an update's `Rows` that the passes fill."""
        filled = {
            "old_logps": self.old_policy,
            "ref_logps": self.reference,
            "entropies": self.entropies,
        }
        return [name for name, fills in filled.items() if fills]

    def num_scores(self, cfg: GRPOConfig) -> dict[str, int]:
        """Counts the passes over a step's rollout, by scoring program."""
        entropies = cfg.num_iterations if self.entropies else 0
        return {
            SCORE: int(self.old_policy) + entropies,
            SCORE_REFERENCE: int(self.reference),
        }
