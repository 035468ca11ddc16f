"""Published recipes as starting points: functions that return a config.

Each sets what its paper says of the objective, the advantages and the number of updates on a
rollout, and takes any field of `GRPOConfig` as an override. Sizes, learning rate and data are the
config's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from grpo_eqx.config import GRPOConfig

_UPDATES = 4  # on each rollout, where a recipe is off-policy: as in GSPO, and a divisor of 16


def grpo(**overrides: Any) -> GRPOConfig:
    """GRPO as first published (DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.2).

    Means over sequences of token means, advantages over the group's standard deviation, one update
    a rollout, and a KL term of weight 0.04 with the estimator k3.
    """
    return _config(
        overrides,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.04,
        use_bias_correction_kl=False,
    )


def dapo(**overrides: Any) -> GRPOConfig:
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token mean, soft over-long penalty.

    No KL term. Groups are kept by their rewards without the penalty, as there. Four updates a
    rollout (the paper: 16, with 512 prompts a rollout). The token mean is TRL's, over the tokens of
    the rollout. The paper writes it over those of one prompt's group (eq. 8), and its code takes
    it over those of an update, which is `loss_type="bnpo"`.
    """
    return _config(
        overrides,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        dynamic_sampling=True,
        overlong_buffer=0.2,
        steps_per_generation=_UPDATES,
    )


def dr_grpo(**overrides: Any) -> GRPOConfig:
    """Dr. GRPO (arXiv 2503.20783): neither lengths nor deviations divide; no KL term."""
    return _config(overrides, loss_type="dr_grpo", scale_rewards="none")


def gspo(**overrides: Any) -> GRPOConfig:
    """GSPO (arXiv 2507.18071, section 5.1): sequence ratios, clipped at 3e-4 and 4e-4.

    Four updates a rollout, as in the paper.
    """
    return _config(
        overrides,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=_UPDATES,
    )


def cispo(**overrides: Any) -> GRPOConfig:
    """CISPO (MiniMax-M1, arXiv 2506.13585): capped ratios weigh log-probs; every token learns.

    The cap is that of ScaleRL (arXiv 2510.13786), 5; four updates a rollout. The token mean is
    TRL's, over the tokens of the rollout; both papers take it over those of one prompt's group.
    """
    return _config(overrides, loss_type="cispo", epsilon_high=5.0, steps_per_generation=_UPDATES)


def rloo(**overrides: Any) -> GRPOConfig:
    """RLOO (arXiv 2402.14740): REINFORCE with a leave-one-out baseline, one update a rollout.

    A completion's log-prob is the sum over its tokens, which dr_grpo's aggregation gives up to a
    constant. The paper's KL penalty, part of its reward, is left out.
    """
    return _config(overrides, loss_type="dr_grpo", advantage_estimator="rloo")


RecipeName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"]

RECIPES: Mapping[str, Callable[..., GRPOConfig]] = {
    recipe.__name__: recipe for recipe in (grpo, dapo, dr_grpo, gspo, cispo, rloo)
}
"""The recipes by name, as `--recipe` knows them."""


def _config(overrides: Mapping[str, Any], **fields: Any) -> GRPOConfig:
    return GRPOConfig(**{**fields, **overrides})
