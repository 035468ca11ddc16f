"""The command `grpo-eqx`: flags, COMMAND, and how it ends."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from grpo_eqx.cli.main import main


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What the command prints when it refuses, with the exit code of a user's mistake."""
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["launch", "local"], "COMMAND is missing"),
        (["launch", "local", "--"], "COMMAND is missing"),
        (["launch", "local", "--", "--processes", "2"], "COMMAND starts with '--processes'"),
        (["launch", "local", "--", ""], "COMMAND starts with ''"),
        (
            ["launch", "tpu-vm", "delete", "--name", "n", "--zone", "z", "--", "rm"],
            "this subcommand takes no COMMAND, but got 'rm'",
        ),
    ],
)
def test_a_command_follows_two_dashes_where_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    (line,) = error_of(monkeypatch, capsys, *arguments).splitlines()
    assert line.startswith(f"error: {error}")


def test_without_two_dashes_a_command_is_no_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "python" in error_of(monkeypatch, capsys, "launch", "local", "python", "train.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "launch"),
        (["compile"], "--micro-batch-size-per-device"),
        (["export"], "CHECKPOINT"),
        (["check"], "RUN"),
        (["doctor"], "--output-dir"),
        (["launch"], "skypilot"),
        (["launch", "local"], "--devices-per-process"),
        (["launch", "tpu-vm"], "sync-env"),
        (["launch", "tpu-vm", "create"], "anew"),
        (["launch", "tpu-vm", "run"], "--replace"),
        (["launch", "slurm"], "sbatch"),
        (["launch", "gke"], "kubectl"),
    ],
)
def test_every_level_has_help(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", *words, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["train"], ["export"], ["launch", "local"]])
def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", *words, "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"grpo_eqx {version('grpo_eqx')}\n"


def test_a_pipe_that_closes_early_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "grpo_eqx", "train", "--print-config"],
            stdout=writer, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
