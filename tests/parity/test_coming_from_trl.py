"""The page for people who come from TRL, against TRL."""

import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..fenced_blocks import ROOT, blocks
from ..scripts import load_script

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity


@pytest.fixture
def tables() -> ModuleType:
    return load_script("coming_from_tables")


def test_the_tables_have_every_field_of_trl_and_no_other(tables: ModuleType) -> None:
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert theirs == {*tables.TRL_DEFAULTS, *tables.TRL_INHERITED}
    own = inspect.get_annotations(trl.GRPOConfig).keys()
    assert own <= tables.TRL_DEFAULTS.keys()


def test_the_defaults_are_those_of_trl(tables: ModuleType) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: fields[name] for name in tables.TRL_DEFAULTS} == tables.TRL_DEFAULTS


@pytest.mark.filterwarnings("ignore")  # of torch, transformers and TRL
def test_the_script_of_trl_runs(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, but for a model that this machine has, and for one small step on a CPU."""
    monkeypatch.chdir(tmp_path)
    marked = [block for block in blocks(ROOT / "docs" / "coming_from" / "trl.md") if block.mark]
    (code,) = (block.text for block in marked if block.mark.startswith("run in tests/parity"))
    code = re.sub(r'"Qwen/[^"]*"', repr(str(small_model)), code)
    code = code.replace("max_steps=100,", "max_steps=1, use_cpu=True, bf16=False, report_to=[],")
    code = code.replace("gradient_accumulation_steps=8,", "gradient_accumulation_steps=1,")
    code = re.sub(r"max_completion_length=\d+", "max_completion_length=4", code)
    names: dict[str, Any] = {"__name__": "script"}
    exec(code, names)
    assert names["trainer"].state.global_step == 1
