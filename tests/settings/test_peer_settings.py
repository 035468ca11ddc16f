"""Answers to settings of other libraries."""

import dataclasses
import re

import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.settings.peer_settings import ADVICE, refuse_unknown

OURS = {field.name for field in dataclasses.fields(GRPOConfig)}


def test_no_setting_of_ours_is_advised_against() -> None:
    assert not OURS & ADVICE.keys()


NO_SETTINGS = {
    "process_id", "save_pretrained", "resume_from_checkpoint", "eval_metrics",
    "num_tokens", "push_to_hub", "repo_id", "jax_default_matmul_precision", "jax_debug_nans",
    "loss_type", "grpo_eqx", "train_data", "adam_beta",
    "dr_grpo", "low_var_kl", "sequence_token", "sequence_truncate", "token_truncate",
    "sequence_mask", "token_mask",
    "truncate_left", "q_proj", "v_proj", "load_in", "mse_kl",
}  # fmt: skip
"""Words of advice with an underscore that are arguments, methods, values and names of others."""


def test_settings_that_are_advised_exist() -> None:
    named = {word for text in ADVICE.values() for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text)}
    assert named - NO_SETTINGS <= OURS


def test_a_misspelled_name_of_another_library_is_answered_by_ours() -> None:
    with pytest.raises(UserError, match=r"did you mean max_steps\? use steps, which counts rollo"):
        refuse_unknown(["max_step"], ["eval_steps", "steps"])
    with pytest.raises(UserError, match=r"did you mean eval_steps\?$"):
        refuse_unknown(["eval_step"], ["eval_steps", "steps"])


def test_the_start_of_one_name_is_answered_by_it() -> None:
    with pytest.raises(UserError, match=r"did you mean micro_batch_size_per_device\?$"):
        refuse_unknown(["micro_batch"], OURS)
    with pytest.raises(UserError, match="lists all settings"):
        refuse_unknown(["num"], OURS)  # of several


def test_advice_for_a_name_that_is_only_alike_is_not_given() -> None:
    for name in ("half_precision", "kl_losses", "prompt_lengths_of_eval"):
        with pytest.raises(UserError, match=f"{name} is no setting: grpo-eqx train --help-all"):
            refuse_unknown([name], ["steps"])
