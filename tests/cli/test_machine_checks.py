"""The command `grpo-eqx doctor`, under real conditions."""

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_eqx.cli import machine_checks
from grpo_eqx.models.hub import commit

CHECKS = [
    "packages", "devices", "compilation cache", "Hugging Face hub", "Weights & Biases",
    "output folder", "disk", "open files", "processes",
]  # fmt: skip


def run(*flags: str | Path, **environment: str) -> tuple[int, dict[str, str]]:
    """Runs the command; returns its exit code and the line of every check."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_eqx.cli.main", "doctor", *map(str, flags)],
        env=os.environ | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    lines = [re.fullmatch(r"((?:ok  |warn|fail) (.+?): .+)", x) for x in done.stdout.splitlines()]
    assert all(lines), done.stdout
    return done.returncode, {line[2]: line[1] for line in lines if line}


@pytest.fixture
def closed_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def few_files() -> Iterator[None]:
    """Lets this process open few files, as some shells do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_machine_that_is_ready_has_a_line_per_check(tmp_path: Path) -> None:
    code, lines = run("--output-dir", tmp_path / "runs", WANDB_MODE="offline")
    assert (code, list(lines)) == (0, CHECKS)
    assert all(line.startswith("ok") for line in lines.values()), lines
    assert "jaxlib" in lines["packages"]
    assert "8 x cpu" in lines["devices"]
    assert "offline (HF_HUB_OFFLINE)" in lines["Hugging Face hub"]
    assert "offline (WANDB_MODE)" in lines["Weights & Biases"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_is_missing_is_named_with_its_fix_and_no_secret(
    tmp_path: Path, closed_port: int
) -> None:
    (tmp_path / "file").touch()
    server = f"http://user:canary@127.0.0.1:{closed_port}"
    code, lines = run(
        "--output-dir", tmp_path / "file" / "runs", "--model", "Qwen/Qwen2.5-72B",
        JAX_PLATFORMS="cuda", HF_HUB_OFFLINE="0", HF_ENDPOINT=server, HF_TOKEN="hf_canary",
        WANDB_MODE="online", WANDB_BASE_URL=server, WANDB_API_KEY="canary" * 7,
        JAX_NUM_PROCESSES="4", JAX_ENABLE_COMPILATION_CACHE="true",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "file"),
    )  # fmt: skip
    assert (code, list(lines)) == (1, CHECKS)
    failed = {name for name, line in lines.items() if line.startswith("fail")}
    assert failed >= {"devices", "output folder", "processes"}
    assert "JAX cannot use its devices with JAX_PLATFORMS=cuda" in lines["devices"]
    assert "fix: unset JAX_PLATFORMS" in lines["devices"]
    assert "file cannot be written (Not a directory); fix: " in lines["output folder"]
    assert "must be set too" in lines["processes"]
    assert "a checkpoint of Qwen/Qwen2.5-72B takes" in lines["disk"]
    for name in ("Hugging Face hub", "Weights & Biases"):
        assert lines[name].startswith(f"warn {name}: 127.0.0.1:{closed_port} cannot be reached")
        assert "fix: check the network" in lines[name]
    assert "with a token" in lines["Hugging Face hub"]
    assert lines["compilation cache"].startswith("warn")
    assert not any("canary" in line for line in lines.values())


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        hub = machine_checks.hugging_face_hub()
    assert hub.status == "warn"
    assert "timed out" in hub.found


def test_few_open_files_are_a_warning(few_files: None) -> None:
    assert machine_checks.open_files() == ("warn", "at most 300 at a time", "ulimit -n 4096")


def test_a_file_in_place_of_the_output_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert machine_checks.output_folder(tmp_path / "runs").status == "fail"
    assert machine_checks.output_folder(tmp_path / "new" / "runs").status == "ok"


def test_the_disk_is_compared_with_the_models_checkpoints(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_checks.disk(tmp_path, str(small_model)).status == "ok"
    assert "takes 34.5 GiB" in machine_checks.disk(tmp_path, "Qwen/Qwen2.5-3B@v1").found
    # All experts are saved, however few a token uses.
    assert "takes 341.2 GiB" in machine_checks.disk(tmp_path, "Qwen/Qwen3-30B-A3B").found
    unknown = machine_checks.disk(tmp_path, "someone/new")
    assert unknown.status == "ok"
    assert "is not known without a download" in unknown.found
    assert commit("model", "someone/new") is None


def test_the_processes_of_a_run_are_told_without_joining_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine_checks.processes().found == "one: no launcher declares others"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "nowhere:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    found = "this is 2 of 4, which meet at nowhere:1234, declared by JAX's variables"
    assert machine_checks.processes() == ("ok", found, "")


def test_an_accelerator_is_known_by_its_device_files(tmp_path: Path) -> None:
    assert machine_checks.accelerator(tmp_path) is None
    (tmp_path / "accel0").touch()
    assert machine_checks.accelerator(tmp_path) == "TPU"
    (tmp_path / "nvidiactl").touch()
    assert machine_checks.accelerator(tmp_path) == "TPU"
    (tmp_path / "nvidia0").touch()
    assert machine_checks.accelerator(tmp_path) == "GPU"


def test_a_cache_that_others_can_write_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert machine_checks.compilation_cache() == ("ok", str(tmp_path), "")
    tmp_path.chmod(0o777)
    assert machine_checks.compilation_cache().fix == f"chmod o-w {tmp_path}"


def test_a_key_in_a_netrc_file_counts_and_a_broken_file_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    path = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(path))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert machine_checks.weights_and_biases().found.startswith("not logged in")
    path.write_text("machine 127.0.0.1 login user password canary\n")
    path.chmod(0o600)
    assert "cannot be reached" in machine_checks.weights_and_biases().found
    path.write_text("canary\n")
    with pytest.raises(machine_checks.UserError, match="is not a valid netrc file") as info:
        machine_checks.weights_and_biases()
    assert "canary" not in str(info.value)
