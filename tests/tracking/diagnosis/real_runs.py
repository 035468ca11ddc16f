"""Seven sick and six healthy runs of the embedded model: `real_runs.py FOLDER`, which has its name.

They have the same shapes, and many the same settings but for the rewards or the seed, so that many
programs come from the cache. With a constant learning rate, a program is the same for any steps.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.loss_backends import DenseLoss, LossBackend
from grpo_eqx.settings.recipes import RECIPES


def never(*, completions: list[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)


def always(*, completions: list[str], **columns: object) -> list[float]:
    return [1.0] * len(completions)


def length(*, completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Pays for tokens, whatever they say."""
    return [len(ids) / 48 for ids in completion_ids]


class Detached(LossBackend):
    """Stops all gradients, as a backend may whose backward pass is wrong."""

    def token_stats(self, hidden, head, *others):
        return DenseLoss().token_stats(*jax.lax.stop_gradient((hidden, head)), *others)


class Run(NamedTuple):
    """Settings of a run that differ from the others', and the rules that must fire on it."""

    settings: Mapping[str, Any]
    rules: frozenset[str] = frozenset()
    reward: Callable[..., list[float]] | None = None
    loss_backend: LossBackend | None = None
    recipe: str | None = None
    evaluates: bool = False


SICK = {
    "too_large_steps": Run(
        {"learning_rate": 1e-2}, frozenset({"length_explosion", "groups_without_variance"})
    ),
    "too_short": Run({"max_completion_length": 8, "steps": 6}, frozenset({"truncated"})),
    "reward_never_fires": Run({"steps": 8}, frozenset({"reward_never_fires"}), never),
    "reward_always_fires": Run({"steps": 8}, frozenset({"reward_always_fires"}), always),
    "other_distribution": Run({"top_p": 0.5, "steps": 6}, frozenset({"sampler_gap"})),
    "no_gradient": Run(
        {"steps": 6}, frozenset({"gradient_is_zero"}), loss_backend=Detached()
    ),
    "pays_for_length": Run(
        {"learning_rate": 1e-3, "steps": 20}, frozenset({"evaluation_falls"}), length,
        evaluates=True,
    ),
}  # fmt: skip
HEALTHY = {
    "defaults": Run({"seed": 1}),
    "another_seed": Run({"seed": 2}, evaluates=True),
    "small_steps": Run({"seed": 3, "learning_rate": 1e-5}),
    "recipe_grpo": Run({"seed": 4}, recipe="grpo"),
    "recipe_dapo": Run({"seed": 5}, recipe="dapo"),
    "lora": Run({"seed": 6, "lora_rank": 8}),
}


def main(folder: Path) -> None:
    run = {**SICK, **HEALTHY}[folder.name]
    make = GRPOConfig if run.recipe is None else RECIPES[run.recipe]
    cfg = make(
        **{
            "steps": 14, "prompts_per_step": 8, "num_generations": 4, "eval_problems": 64,
            "log_completions_steps": 0, "save_minutes": None, "lr_scheduler_type": "constant",
            "output_dir": folder,
            **run.settings,
        }
    )  # fmt: skip
    trainer = GRPOTrainer(cfg, reward_funcs=run.reward, loss_backend=run.loss_backend)
    if run.evaluates:
        trainer.evaluate()
    trainer.fit()
    if run.evaluates:
        trainer.evaluate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
