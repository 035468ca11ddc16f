"""Every setting and argument of TRL's is one of ours, or answered by what to use."""

import dataclasses
import inspect

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.settings.unknown_names import advice, names_of_others

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity


def test_every_setting_of_trl_is_ours_or_answered() -> None:
    ours = {field.name for field in dataclasses.fields(GRPOConfig)}
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert not {name for name in theirs - ours if advice(name) is None}


def test_every_argument_of_trls_trainer_is_ours_or_answered() -> None:
    ours = inspect.signature(GRPOTrainer.__init__).parameters
    theirs = inspect.signature(trl.GRPOTrainer.__init__).parameters
    assert theirs.keys() <= {*ours, *names_of_others("arguments of GRPOTrainer")}
