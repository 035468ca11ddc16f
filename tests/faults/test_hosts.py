"""Hosts that are missing, or were told different things."""

from pathlib import Path

import pytest

from grpo_eqx.common.errors import EXIT_FAULT, EXIT_USER_ERROR

from .conftest import PROBLEMS, Command

pytestmark = pytest.mark.slow


def test_a_host_that_was_not_launched_is_named(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    command = Command(small_model, programs, tmp_path / "run", start_timeout=5)
    [host] = command.start_hosts([], number=2)
    output, _ = host.communicate(timeout=120)
    assert host.returncode == EXIT_FAULT  # a host may only be late
    assert output.splitlines()[-1].startswith("error: 1 of 2 hosts present: waiting for process 1")


def test_hosts_that_disagree_are_refused_by_the_setting(command: Command, tmp_path: Path) -> None:
    hosts = command.start_hosts([], ["--seed", "7"], number=2)
    for host in hosts:
        output, _ = host.communicate(timeout=120)
        assert host.returncode == EXIT_USER_ERROR
        assert "error: the hosts disagree on seed: 0 on process 0" in output
    others = tmp_path / "others.jsonl"
    others.write_text("".join(PROBLEMS.read_text().splitlines(keepends=True)[1:]))
    hosts = command.start_hosts([], ["--data", str(others)], number=2)
    for host in hosts:
        output, _ = host.communicate(timeout=120)
        assert host.returncode == EXIT_USER_ERROR
        assert "error: the hosts disagree on " in output


SCRIPT = """
import os, sys
sys.path.insert(0, os.getcwd())
from own_rewards import marked
from grpo_eqx import GRPOConfig, GRPOTrainer, cli

def main(cfg: GRPOConfig) -> None:
    GRPOTrainer(cfg, reward_funcs=[marked]).fit()

cli.run(main)
"""


def test_hosts_with_other_code_of_a_reward_are_refused(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, mark in zip(folders, ("####", "#####"), strict=True):
        folder.mkdir()
        body = f"return [float({mark!r} in x) for x in completions]"
        (folder / "own_rewards.py").write_text(f"def marked(completions, **columns): {body}\n")
    command = Command(small_model, programs, tmp_path / "run", script=script)
    hosts = command.start_hosts([], [], number=2, folders=folders)
    outputs = [host.communicate(timeout=120)[0] for host in hosts]
    for host, output in zip(hosts, outputs, strict=True):
        assert host.returncode == EXIT_USER_ERROR, output
        assert "error: the hosts disagree on the code of marked: " in output
