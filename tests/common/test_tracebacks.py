"""A mistake in a script is shown by the script's own lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "from grpo_eqx import GRPOConfig\n\n\n"
        "def make():\n    return GRPOConfig(steps=0)\n\n\nmake()\n"
    )
    return path


def run(script: Path, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_only_the_users_frames_are_shown(script: Path) -> None:
    lines = run(script).splitlines()
    places = [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")]
    assert places == ["<module>", "make"]
    assert lines[-1] == "UserError: steps is 0: it must be at least 1."


def test_all_frames_can_be_asked_for(script: Path) -> None:
    assert "in __post_init__" in run(script, GRPO_EQX_FULL_TRACEBACKS="1")


def test_errors_of_others_are_as_ever(script: Path) -> None:
    script.write_text("import grpo_eqx, json\njson.loads('{')\n")
    assert "in raw_decode" in run(script)


def test_an_argument_that_python_refuses_is_answered(script: Path) -> None:
    script.write_text("import grpo_eqx\ngrpo_eqx.GRPOConfig(max_steps=3)\n")
    *_, refused, answer = run(script).splitlines()
    assert refused.startswith("TypeError: GRPOConfig.__init__() got an unexpected keyword argument")
    assert answer == "max_steps is an unknown setting: use steps, which counts rollouts."
