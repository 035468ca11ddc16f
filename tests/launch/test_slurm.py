"""Slurm: the script, executed with a stand-in for srun."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
SRUN = """\
#!/usr/bin/env python3
import json, os, sys
seen = [os.environ["GRPO_EQX_REQUIRE_PROCESSES"], sys.argv[1:]]
print(json.dumps(seen))
sys.exit(int(os.environ.get("SRUN_CODE", "3")))
"""


def run_with_srun(script: str, folder: Path) -> tuple[str, list[str]]:
    """What srun sees: the number of processes to require, and its arguments."""
    srun = folder / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONUTF8": "1"}
    done = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, env=environment, check=False
    )
    assert done.returncode == 3, "the script ends with srun's exit code"
    required, arguments = json.loads(done.stdout)
    return required, arguments


def test_one_process_on_each_node_and_one_failure_ends_the_job(
    launch: Launch, tmp_path: Path
) -> None:
    done = launch("slurm", "--nodes", "4", "--", "python", "train.py", "--mesh", "auto")
    assert done.code == 0
    required, arguments = run_with_srun(done.out, tmp_path)
    assert required == "4"
    assert arguments[-4:] == ["python", "train.py", "--mesh", "auto"]
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} < set(
        arguments
    )


def test_arguments_arrive_as_they_are(
    launch: Launch, tmp_path: Path, hostile: tuple[str, ...]
) -> None:
    done = launch("slurm", "--nodes", "1", "--", "python", *hostile)
    subprocess.run(["bash", "-n"], input=done.out.encode(), check=True)
    _, arguments = run_with_srun(done.out, tmp_path)
    assert arguments[-len(hostile) :] == list(hostile)


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (143, True), (1, False), (0, False)])
def test_a_run_that_was_asked_to_stop_is_queued_again(
    launch: Launch, tmp_path: Path, code: int, requeued: bool
) -> None:
    script = launch("slurm", "--nodes", "2", "--requeue", "--", "true").out
    assert "#SBATCH --requeue\n" in script
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho $* > requeued\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SRUN_CODE": str(code),
        "SLURM_JOB_ID": "17",
    }  # fmt: skip
    done = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, env=environment, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.returncode == code
    said = tmp_path / "requeued"
    assert (said.read_text() if said.exists() else None) == ("requeue 17\n" if requeued else None)


def test_options_are_directives_before_the_first_command(launch: Launch) -> None:
    script = launch(
        "slurm", "--nodes", "2", "--name", "my-run", "--gpus-per-node", "8", "--time",
        "1-00:00:00", "--partition", "a,b", "--account", "team_1", "--", "true",
    ).out  # fmt: skip
    lines = script.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines.index(directives[-1]) < lines.index("set -euo pipefail")
    for option in (
        "--job-name=my-run", "--nodes=2", "--gpus-per-node=8", "--time=1-00:00:00",
        "--partition=a,b", "--account=team_1",
    ):  # fmt: skip
        assert f"#SBATCH {option}" in directives


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--name", "x\n#SBATCH --uid=0"),
        ("--name", "a b"),
        ("--partition", "$(id)"),
        ("--account", "-x"),
        ("--time", "soon"),
        ("--gpus-per-node", "0"),
    ],
)
def test_what_no_directive_can_hold_is_refused(launch: Launch, flag: str, value: str) -> None:
    done = launch("slurm", "--nodes", "2", f"{flag}={value}", "--", "true")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {flag} is ")
    assert len(done.err.splitlines()) == 1


def test_it_writes_a_file(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    assert launch("slurm", "--nodes", "2", "--output", str(path), "--", "true").out == ""
    assert path.read_text() == launch("slurm", "--nodes", "2", "--", "true").out
    missing = launch("slurm", "--nodes", "2", "--output", str(tmp_path / "no/x"), "--", "true")
    assert missing.code == 2
    assert "cannot write" in missing.err
