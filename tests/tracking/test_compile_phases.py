"""Phases in which programs are compiled, and how long such took before."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from grpo_eqx.sharding import parse_mesh
from grpo_eqx.tracking.compile_phases import CompilePhases, CompileTimes
from grpo_eqx.tracking.phases import PHASES
from grpo_eqx.tracking.stages import Stages


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return parse_mesh("auto").build()


def test_times_are_known_to_the_next_run_of_the_same_model_and_devices(
    tmp_path: Path, mesh: jax.sharding.Mesh
) -> None:
    times = CompileTimes(str(tmp_path), "tiny_qwen2", mesh)
    assert times.before("update") is None
    times.remember("update", 41.04)
    times.remember("generate", 0.2)  # not worth knowing
    again = CompileTimes(str(tmp_path), "tiny_qwen2", mesh)
    assert (again.before("update"), again.before("generate")) == (41.0, None)
    assert CompileTimes(str(tmp_path), "Qwen/Qwen2.5-3B", mesh).before("update") is None


@pytest.mark.parametrize("content", ["", "[]", '{"update": "soon"}', "{"])
def test_a_damaged_file_is_as_none(content: str, tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    (tmp_path / "grpo_eqx_compile_seconds.json").write_text(content)
    times = CompileTimes(str(tmp_path), "tiny_qwen2", mesh)
    assert times.before("update") is None
    times.remember("update", 41.0)
    assert times.before("update") == 41.0


@pytest.mark.parametrize("cache", [None, "gs://bucket/cache", "/proc/no/folder"])
def test_without_a_folder_nothing_is_remembered(cache: str | None, mesh: jax.sharding.Mesh) -> None:
    times = CompileTimes(cache, "tiny_qwen2", mesh)
    times.remember("update", 41.0)
    assert times.before("update") is None


def test_only_the_newest_times_are_kept(
    tmp_path: Path, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_eqx.tracking.compile_phases._MOST_ENTRIES", 2)
    times = CompileTimes(str(tmp_path), "m", mesh)
    for name in ("a", "b", "a", "c"):
        times.remember(name, 2.0)
    (file,) = tmp_path.iterdir()
    assert [key.split()[0] for key in json.loads(file.read_text())] == ["a", "c"]


def test_a_phase_lasts_from_the_trace_of_a_program_until_it_is_compiled(
    tmp_path: Path, mesh: jax.sharding.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    times = CompileTimes(str(tmp_path), "m", mesh)
    times.remember("update", 41.0)
    compiling, traced = CompilePhases(Stages(), times), []

    @jax.jit
    def _update_program(x: jax.Array) -> jax.Array:
        compiling.begin("update")
        jax.jit(jnp.sin)  # of another name, which ends nothing
        traced.append(str(PHASES.latest))
        return x + jnp.pi

    lowered = _update_program.lower(jnp.ones(3))
    assert PHASES.latest is not None
    lowered.compile()
    assert PHASES.latest is None
    (phase,) = traced
    assert re.fullmatch(r"compiling update, \d s; took 41 s before", phase)
    said = capsys.readouterr().err
    assert re.fullmatch(r"\[ +\d+ s\] compiling update \(41 s, unless it is cached\)\n", said)


def test_a_live_display_says_it_alone(
    mesh: jax.sharding.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    compiling = CompilePhases(Stages(), CompileTimes(None, "m", mesh))

    def _score_program(x: jax.Array) -> jax.Array:
        compiling.begin("score")
        return x * jnp.e

    with PHASES.shown():
        jax.jit(_score_program)(jnp.ones(2)).block_until_ready()
    assert PHASES.latest is None
    assert capsys.readouterr().err == ""
