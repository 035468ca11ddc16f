"""Published recipes as starting points: functions that return a config.

Each sets its paper's objective, advantages and number of updates per rollout, and takes any field
of `GRPOConfig` as an override. Sizes, learning rate and data keep the config's defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.config import GRPOConfig

_UPDATES = 4  # per rollout, where a recipe is off-policy: as in GSPO, and a divisor of 16


def grpo(**overrides: Any) -> GRPOConfig:
    """GRPO as first published (DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.2).

    The mean over sequences of token means, advantages divided by the group's standard deviation,
    one update per rollout, and a KL term of weight 0.04 with the k3 estimator.
    """
    return _config(
        overrides,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.04,
        use_bias_correction_kl=False,
    )


def dapo(**overrides: Any) -> GRPOConfig:
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token mean, soft overlong penalty.

    No KL term. As in the paper, groups are filtered by their rewards without the penalty. Four
    updates per rollout (the paper: 16, with 512 prompts per rollout). The token mean is TRL's, over
    the tokens of the rollout. The paper takes it over those of one prompt's group (eq. 8), its code
    over those of an update, which is `loss_type="bnpo"`.
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
    """Dr. GRPO (arXiv 2503.20783): no division by lengths or deviations; no KL term."""
    return _config(overrides, loss_type="dr_grpo", scale_rewards="none")


def gspo(**overrides: Any) -> GRPOConfig:
    """GSPO (arXiv 2507.18071, section 5.1): sequence ratios, clipped at 3e-4 and 4e-4.

    Four updates per rollout, as in the paper.
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
    """CISPO (MiniMax-M1, arXiv 2506.13585): capped ratios weight log-probs; no token is dropped.

    The cap is ScaleRL's (arXiv 2510.13786), 5; four updates per rollout. The token mean is TRL's,
    over the tokens of the rollout; both papers take it over those of one prompt's group.
    """
    return _config(overrides, loss_type="cispo", epsilon_high=5.0, steps_per_generation=_UPDATES)


def rloo(**overrides: Any) -> GRPOConfig:
    """RLOO (arXiv 2402.14740): REINFORCE with a leave-one-out baseline, one update per rollout.

    A completion's log-prob is the sum over its tokens, which dr_grpo's aggregation matches up to a
    constant factor. The paper's KL penalty, part of its reward, is left out.
    """
    return _config(overrides, loss_type="dr_grpo", advantage_estimator="rloo")


RecipeName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"]

RECIPES: Mapping[str, Callable[..., GRPOConfig]] = {
    recipe.__name__: recipe for recipe in (grpo, dapo, dr_grpo, gspo, cispo, rloo)
}
"""Recipes by name, as `--recipe` accepts them."""


def _config(overrides: Mapping[str, Any], **fields: Any) -> GRPOConfig:
    try:
        return GRPOConfig(**{**fields, **overrides})
    except UserError as error:
        kept = {name: value for name, value in fields.items() if name not in overrides}
        blamed = {name: getattr(GRPOConfig, name) for name in kept if name in str(error)}
        if not overrides or not blamed:
            raise
        raise UserError(
            f"{error} The recipe sets {_listed(kept)}: where that does not apply, pass the "
            f"default, {_listed(blamed)}."
        ) from None


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
