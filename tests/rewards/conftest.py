"""Reward functions of all kinds of faults, found as a user's would be."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def reward_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`reward_module.py`, which worker processes find too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("reward_module")
