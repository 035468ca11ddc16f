"""libtpu, which only compiles for TPUs here, says nothing where there is none."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from grpo_eqx.distributed import tpu_runtime
from grpo_eqx.distributed.tpu_runtime import leave_out_libtpu, libtpu_to_compile

LEFT_OUT = {"TPU_LIBRARY_PATH": tpu_runtime.__file__}


def left_out(environment: dict[str, str], devices: Path) -> dict[str, str]:
    """What the environment has more than before."""
    before = dict(environment)
    leave_out_libtpu(environment, devices)
    return dict(environment.items() - before.items())


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("libtpu", None, origin="/site/libtpu/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.usefixtures("_installed")
def test_without_a_tpu_it_is_left_out(tmp_path: Path) -> None:
    assert left_out({}, tmp_path) == LEFT_OUT
    assert left_out({"JAX_PLATFORMS": "cpu"}, tmp_path) == LEFT_OUT
    imported = {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "/site/libtpu/libtpu.so"}
    assert left_out(imported, tmp_path) == LEFT_OUT  # JAX was imported before
    (tmp_path / "nvidia0").touch()
    assert left_out({}, tmp_path) == LEFT_OUT


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("device", ["accel0", "vfio/0"])
def test_with_a_tpu_nothing_changes(tmp_path: Path, device: str) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert left_out({}, tmp_path) == {}


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "name", ["TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_LIBRARY_PATH", "JAX_FORCE_TPU_INIT"]
)
def test_what_the_environment_says_of_a_tpu_stays(tmp_path: Path, name: str) -> None:
    assert left_out({name: "x"}, tmp_path) == {}
    assert left_out({"JAX_PLATFORMS": "tpu,cpu"}, tmp_path) == {}


def test_without_libtpu_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert left_out({}, tmp_path) == {}


def test_to_compile_for_a_tpu_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(LEFT_OUT.items())))
    with libtpu_to_compile():
        assert "TPU_LIBRARY_PATH" not in os.environ
    assert os.environ.items() >= LEFT_OUT.items()
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/mine")
    with libtpu_to_compile():
        assert os.environ["TPU_LIBRARY_PATH"] == "/mine"


@pytest.mark.topology
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the plan extra")
@pytest.mark.parametrize("imports", ["grpo_eqx, jax", "jax, grpo_eqx"])
def test_jax_finds_the_cpu_in_silence_and_then_describes_tpus(imports: str) -> None:
    program = f"""
import {imports}
from grpo_eqx.planner.devices import described_devices
print(jax.devices()[0].platform, flush=True)
jax.numpy.zeros(())
print("described", file=__import__("sys").stderr, flush=True)
print(len(described_devices("v6e-4")))
"""
    environment = {name: x for name, x in os.environ.items() if "TPU" not in name}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["cpu", "4"], done.stderr
    assert done.stderr.partition("described")[0] == ""
