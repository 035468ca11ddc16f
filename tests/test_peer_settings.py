"""Answers to settings of other libraries."""

import dataclasses

from grpo_eqx import GRPOConfig
from grpo_eqx.peer_settings import ADVICE

OURS = {field.name for field in dataclasses.fields(GRPOConfig)}


def test_no_setting_of_ours_is_advised_against() -> None:
    assert not OURS & ADVICE.keys()


def test_settings_that_are_advised_exist() -> None:
    """Of a text such as "use steps", the first word after "use"."""
    named = {text.split()[1].strip(",;:") for text in ADVICE.values() if text.startswith("use ")}
    assert named - {"process_id"} <= OURS
