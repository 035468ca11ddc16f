"""Recipes: what they set, and that they can be changed."""

from typing import get_args

import pytest

from grpo_eqx import UserError, recipes
from grpo_eqx.settings.recipes import RECIPES, RecipeName


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_config_that_takes_overrides(name: str) -> None:
    cfg = RECIPES[name](seed=3, steps=7, prompts_per_step=8)
    assert (cfg.seed, cfg.steps, cfg.prompts_per_step) == (3, 7, 8)
    assert cfg.resolved() == cfg.resolved().resolved()


def test_the_command_line_knows_every_recipe() -> None:
    assert set(get_args(RecipeName)) == set(RECIPES)


def test_recipes_are_what_their_papers_say() -> None:
    grpo = recipes.grpo().resolved()
    assert (grpo.loss_type, grpo.scale_rewards, grpo.beta) == ("grpo", "group", 0.04)
    assert (grpo.kl_estimator, grpo.use_bias_correction_kl) == ("k3", False)
    dapo = recipes.dapo().resolved()
    assert (dapo.loss_type, dapo.epsilon, dapo.epsilon_high) == ("dapo", 0.2, 0.28)
    assert (dapo.dynamic_sampling, dapo.overlong_buffer, dapo.beta) == (True, 0.2, 0.0)
    dr_grpo = recipes.dr_grpo().resolved()
    assert (dr_grpo.loss_type, dr_grpo.scale_rewards) == ("dr_grpo", "none")
    gspo = recipes.gspo().resolved()
    assert (gspo.importance_sampling_level, gspo.loss_type) == ("sequence", "grpo")
    assert (gspo.epsilon, gspo.epsilon_high) == (3e-4, 4e-4)
    cispo = recipes.cispo().resolved()
    assert (cispo.loss_type, cispo.epsilon, cispo.epsilon_high) == ("cispo", None, 5.0)
    assert recipes.rloo().resolved().advantage_estimator == "rloo"


def test_an_override_that_does_not_belong_is_refused() -> None:
    with pytest.raises(UserError, match="does not clip ratios"):
        recipes.gspo(loss_type="sapo")
