"""Every setting of TRL's is one of ours, or answered by what to use."""

import dataclasses

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.settings.peer_settings import advice

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity


def test_every_setting_of_trl_is_ours_or_answered() -> None:
    ours = {field.name for field in dataclasses.fields(GRPOConfig)}
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert not {name for name in theirs - ours if advice(name) is None}
