"""Hosts that would compile different programs are told apart before JAX starts."""

import subprocess
import sys

import jax
import pytest

from grpo_eqx.distributed.exchange import disagreement
from grpo_eqx.distributed.program_facts import program_facts

OPTIONS = {
    "jax_enable_x64": True,
    "jax_platforms": "cpu,tpu",
    "jax_default_matmul_precision": "float32",
    "jax_threefry_partitionable": False,
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_prng_impl": "rbg",
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_cpu_collectives_implementation": "mpi",
    "jax_use_shardy_partitioner": False,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_jax_is_named_with_both_values(name: str) -> None:
    before, here = jax.config.values[name], program_facts()
    try:
        jax.config.update(name, OPTIONS[name])
        there = program_facts()
    finally:
        jax.config.update(name, before)
    said = disagreement({0: here, 1: there}, {0: "a", 1: "b"})
    assert said.startswith(f"the hosts disagree on {name.upper()}: ")
    assert f"{here[name.upper()]} on process 0 (a), {there[name.upper()]} on process 1 (b)" in said


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_xla_are_compared_in_any_order(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def flags(text: str) -> str:
        monkeypatch.setenv(name, text)
        return program_facts()[name]

    assert flags("--xla_a=1 --xla_b=2") == flags("--xla_b=2  --xla_a=1") != flags("--xla_a=1")
    # Devices are counted later, and where one host dumps its programs does not matter.
    of_one_host = "--xla_dump_to=/tmp --xla_force_host_platform_device_count=2"
    assert flags(of_one_host) == flags("") == "none"


@pytest.mark.parametrize("package", ["jax", "jaxlib", "equinox", "optax"])
def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    here = program_facts()
    found = {f"the version of {package}": "0.0.1"}
    monkeypatch.setattr("grpo_eqx.distributed.program_facts.version", lambda name: "0.0.1")
    assert program_facts() | here == here
    assert found.items() <= program_facts().items()
    assert here[f"the version of {package}"] != "0.0.1"


def test_what_one_host_logs_and_caches_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from grpo_eqx.distributed.program_facts import program_facts; print(program_facts())"
    own = {
        "JAX_LOG_COMPILES": "1", "JAX_COMPILATION_CACHE_DIR": "/tmp/x", "JAX_DUMP_IR_TO": "/tmp/y",
        "JAX_TRACEBACK_FILTERING": "off", "JAX_LOGGING_LEVEL": "DEBUG", "JAX_NUM_CPU_DEVICES": "1",
    }  # fmt: skip
    for name in own:
        monkeypatch.delenv(name, raising=False)
    shown = [sys.executable, "-c", program]
    here = subprocess.run(shown, capture_output=True, check=True).stdout
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert subprocess.run(shown, capture_output=True, check=True).stdout == here
