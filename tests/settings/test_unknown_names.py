"""Answers to names that do not exist here."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.settings import unknown_names
from grpo_eqx.settings.unknown_names import advice_on_call, names_of_others, refuse_unknown

OURS = {field.name for field in dataclasses.fields(GRPOConfig)}


def test_no_setting_of_ours_is_advised_against() -> None:
    assert not OURS & names_of_others("settings").keys()
    arguments = inspect.signature(GRPOTrainer.__init__).parameters.keys()
    assert not arguments & names_of_others("arguments of GRPOTrainer").keys()


def test_a_name_has_one_answer() -> None:
    tables = yaml.safe_load(Path(unknown_names.__file__).with_suffix(".yaml").read_text())
    for answers in tables.values():
        names = [name for each in answers.values() for name in each]
        assert all(isinstance(name, str) for name in names)
        assert len(set(names)) == len(names)


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
    texts = names_of_others("settings").values()
    named = {word for text in texts for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text)}
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
        with pytest.raises(UserError, match=f"{name} is an unknown setting: grpo-eqx train --hel"):
            refuse_unknown([name], ["steps"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(GRPOConfig):
    """A config with a field of its own."""

    penalty: float = 0.5


UNEXPECTED = "got an unexpected keyword argument"


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            f"GRPOConfig.__init__() {UNEXPECTED} 'max_steps'. Did you mean 'steps'?",
            "max_steps is an unknown setting: use steps, which counts rollouts.",
        ),
        (
            f"GRPOConfig.__init__() {UNEXPECTED} 'vllm_mode'",
            "vllm_mode is an unknown setting: there is no second engine: the trainer's own weights "
            "sample, in the same process.",
        ),
        (
            f"GRPOConfig.__init__() {UNEXPECTED} 'learning_rat'",
            "learning_rat is an unknown setting: did you mean learning_rate?",
        ),
        (
            f"GRPOConfig.__init__() {UNEXPECTED} 'xyz'",
            "xyz is an unknown setting: grpo-eqx train --help-all lists all settings.",
        ),
        (
            f"Own.__init__() {UNEXPECTED} 'penalti'",
            "penalti is an unknown setting: did you mean penalty?",
        ),
        (
            f"GRPOTrainer.__init__() {UNEXPECTED} 'data_collator'",
            "GRPOTrainer has no argument data_collator: prompts are padded by themselves.",
        ),
        (
            f"GRPOTrainer.__init__() {UNEXPECTED} 'learning_rate'",
            "GRPOTrainer has no argument learning_rate: it is a setting: "
            "GRPOConfig(learning_rate=...).",
        ),
        (
            f"GRPOTrainer.__init__() {UNEXPECTED} 'max_steps'",
            "GRPOTrainer has no argument max_steps: it is none of the settings either; use steps, "
            "which counts rollouts.",
        ),
        (
            f"GRPOTrainer.__init__() {UNEXPECTED} 'train_datset'. Did you mean 'train_dataset'?",
            "GRPOTrainer has no argument train_datset: did you mean train_dataset?",
        ),
        (
            f"GRPOTrainer.__init__() {UNEXPECTED} 'xyz'",
            "GRPOTrainer has no argument xyz: its docstring lists all.",
        ),
        (
            f"GRPOTrainer.generate() {UNEXPECTED} 'max_new_tokens'",
            "generate has no argument max_new_tokens: set GRPOConfig(max_completion_length=...).",
        ),
        (
            f"from_pretrained() {UNEXPECTED} 'torch_dtype'",
            "from_pretrained has no argument torch_dtype: use dtype.",
        ),
    ],
)
def test_what_a_call_refuses_is_answered(refused: str, said: str) -> None:
    assert Own().penalty == 0.5
    assert advice_on_call(TypeError(refused)) == said


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"GRPOConfig.__init__() {UNEXPECTED} 'max_steps'"),
        TypeError(f"PreTrainedModel.from_pretrained() {UNEXPECTED} 'torch_dtype'"),
        TypeError(f"TRL.GRPOConfig.__init__() {UNEXPECTED} 'lr'"),
        TypeError(f"reward() {UNEXPECTED} 'answer'"),
        TypeError(),
        TypeError("GRPOConfig.__init__() takes 1 positional argument but 2 were given"),
    ],
    ids=str,
)
def test_other_errors_are_as_they_are(error: Exception) -> None:
    assert advice_on_call(error) is None


def test_the_config_is_a_plain_dataclass() -> None:
    """For completion, type checkers and `dataclasses.replace`."""
    own = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert inspect.signature(GRPOConfig).parameters.keys() == own
    assert dataclasses.replace(GRPOConfig(), steps=3) == GRPOConfig(steps=3)
    changed: dict[str, Any] = {"no_such": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        dataclasses.replace(GRPOConfig(), **changed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOConfig().steps = 5  # type: ignore[misc]
