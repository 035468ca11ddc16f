"""SkyPilot: the task, as YAML reads it, and its script, as bash does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_eqx.distributed.cluster import Cluster, find_cluster

Launch = Callable[..., Any]
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


def task(launch: Launch, *flags: str, arguments: tuple[str, ...] = ()) -> Any:
    done = launch("skypilot", *flags, "--", sys.executable, "-c", SHOW, *arguments)
    assert done.code == 0, done.err
    return yaml.safe_load(done.out)


RECOVERY = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}


def executed(script: str, home: Path, **variables: str) -> tuple[dict[str, str], list[str]]:
    """The environment and the arguments of the command that the script runs."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONUTF8": "1", **variables}
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, check=True)
    found, arguments = json.loads(done.stdout)
    return found, arguments


def test_a_tpu_slice_is_one_node_with_all_its_hosts(launch: Launch, tmp_path: Path) -> None:
    found = task(launch, "--type", "v5e-16", "--spot")
    assert found["resources"] == {
        "accelerators": "tpu-v5litepod-16",
        "accelerator_args": {"runtime_version": "v2-alpha-tpuv5-lite"},
        "use_spot": True,
        "job_recovery": RECOVERY,
    }
    assert found["num_nodes"] == 1
    assert '".[tpu]"' in found["setup"]
    environment, _ = executed(found["run"], tmp_path)
    assert environment["GRPO_EQX_REQUIRE_PROCESSES"] == "4"
    assert not [name for name in environment if name.startswith("JAX_")]


def test_a_folder_that_cannot_be_installed_is_said(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "skypilot", "--type", "v6e-16", "--", "python", "train.py"
    assert "this folder has no pyproject.toml" in launch(*command).err
    (tmp_path / "pyproject.toml").touch()
    assert launch(*command).err == ""


def test_gpu_nodes_find_each_other(launch: Launch, tmp_path: Path) -> None:
    found = task(launch, "--gpus", "H100:8", "--nodes", "2")
    assert found["resources"] == {
        "accelerators": "H100:8",
        "use_spot": False,
        "job_recovery": RECOVERY,
    }
    assert found["num_nodes"] == 2
    assert '".[cuda]"' in found["setup"]
    environment, _ = executed(
        found["run"],
        tmp_path,
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_NODES="2",
    )
    assert environment["GRPO_EQX_REQUIRE_PROCESSES"] == "2"
    assert find_cluster(environment) == Cluster("10.0.0.1:8476", 2, 1)


def test_arguments_arrive_as_they_are(
    launch: Launch, tmp_path: Path, hostile: tuple[str, ...]
) -> None:
    found = task(launch, "--type", "v6e-8", arguments=hostile)
    _, arguments = executed(found["run"], tmp_path)
    assert arguments == list(hostile)


def test_the_set_up_is_shell(launch: Launch) -> None:
    subprocess.run(["bash", "-n", "-c", task(launch, "--type", "v6e-8")["setup"]], check=True)


def test_secrets_are_named_and_hold_no_value(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    done = launch("skypilot", "--type", "v6e-8", "--secrets", "HF_TOKEN", "--", "true")
    assert yaml.safe_load(done.out)["secrets"] == {"HF_TOKEN": None}
    assert "canary" not in done.out


def test_a_bucket_is_mounted_where_output_dir_can_be(launch: Launch) -> None:
    found = task(launch, "--type", "v6e-16", "--bucket", "gs://my-bucket")
    assert found["file_mounts"] == {"/shared": {"source": "gs://my-bucket", "mode": "MOUNT"}}


@pytest.mark.parametrize(
    ("flags", "command"),
    [([], "sky launch"), (["--spot"], "sky jobs launch"), (["--max-restarts", "2"], "sky jobs")],
)
def test_the_task_says_how_it_is_started(launch: Launch, flags: list[str], command: str) -> None:
    done = launch("skypilot", "--type", "v6e-16", *flags, "--", "true")
    assert f"Start this with {command}" in done.out


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--type", "v6e-8", "--bucket", "my bucket"], "--bucket is 'my bucket'"),
        ([], "either --type"),
        (["--type", "v6e-8", "--gpus", "H100:8"], "either --type"),
        (["--type", "v6e-8", "--nodes", "2"], "--nodes is 2"),
        (["--gpus", "H100"], "--gpus is 'H100'"),
        (["--gpus", "H100:8", "--nodes", "0"], "--nodes is 0"),
        (["--type", "v6e-8", "--secrets", "HF_TOKEN=abc"], "only names of variables"),
        (["--type", "v6e-8", "--name", "a b"], "--name is 'a b'"),
    ],
)
def test_what_cannot_work_is_refused(launch: Launch, flags: list[str], error: str) -> None:
    done = launch("skypilot", *flags, "--", "true")
    assert (done.code, done.out) == (2, "")
    assert error in done.err
    assert "abc" not in done.err
