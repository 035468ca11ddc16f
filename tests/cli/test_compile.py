"""The command `grpo-eqx compile`."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from grpo_eqx.cli.compile import _cache_to_fill, _compiled
from grpo_eqx.common.errors import OutOfMemoryError, UserError

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)
OF_STEPS = ("jit_generate_program", "jit_score_program", "jit_update_program")
SMALL = {
    "--prompts-per-step": 8, "--num-generations": 2, "--max-completion-length": 16, "--steps": 2,
    "--mesh": "auto", "--beta": 0.1, "--top-entropy-quantile": 0.5, "--steps-per-generation": 2,
    "--eval-problems": 8,
}  # fmt: skip


def grpo_eqx(command: str, flags: list[str], cache: Path) -> str:
    """What the command prints, in a process whose cache is in a folder."""
    of_tests = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "grpo_eqx", command, *flags],
        env={
            **{name: x for name, x in os.environ.items() if not name.startswith(of_tests)},
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "XDG_CACHE_HOME": str(cache),
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def how(line: str) -> tuple[str, str]:
    """The program that a line names, without its prompts' width, and what was done for it."""
    name, _, said = line.partition(": ")
    return name.partition(" (")[0], said.rpartition(",")[0]


@pytest.mark.slow
def test_the_run_that_follows_compiles_no_program_of_its_steps(
    small_model: Path, tmp_path: Path
) -> None:
    data, cache, run = tmp_path / "data.jsonl", tmp_path / "cache", tmp_path / "run"
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(200)]
    rows[0]["question"] = "1 + 1, " * 20 + "?"  # worth a width of its own
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"--model": small_model, "--data": data, "--output-dir": run}
    flags = [str(x) for pair in {**SMALL, **own}.items() for x in pair]

    *first, where = grpo_eqx("compile", flags, cache).splitlines()
    kept = {path.name for path in cache.rglob("jit_*-cache")}
    assert not run.exists()
    assert where.startswith(f"the cache is in {cache / 'grpo_eqx' / 'jax'};")
    assert [how(line) for line in first] == [
        ("generate", "compiled"),
        ("score", "compiled"),
        ("score_reference", "the same program as one above"),  # in float32
        ("score_share", "compiled"),
        ("update", "compiled"),
        ("generate", "compiled"),
        ("evaluate", "compiled"),
    ]

    assert "greedy" in grpo_eqx("train", flags, cache)
    more = {path.name for path in cache.rglob("jit_*-cache")} - kept
    assert not [name for name in more if name.startswith(OF_STEPS)]
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["compile/num_cache_hits"] >= 5

    *again, _ = grpo_eqx("compile", flags, cache).splitlines()
    assert [how(line)[0] for line in again] == [how(line)[0] for line in first]
    assert not [line for line in again if how(line)[1] == "compiled"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home folder of a user who has set nothing; compile nothing here, JAX would keep it."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (None, True, 1), strict=True):
        jax.config.update(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_all_programs_are_kept_however_quick(home: Path) -> None:
    assert _cache_to_fill() == str(home / "grpo_eqx" / "jax")
    assert getattr(jax.config, SETTINGS[2]) == 0


@pytest.mark.usefixtures("home")
def test_there_is_nothing_to_fill_where_the_cache_is_off() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    with pytest.raises(UserError, match="JAX_ENABLE_COMPILATION_CACHE is false: unset it"):
        _cache_to_fill()


@pytest.mark.usefixtures("home")
def test_several_processes_need_a_folder_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="COMPILATION_CACHE_DIR to a folder that all processes sh"):
        _cache_to_fill()


def test_a_folder_that_cannot_be_written_is_refused(home: Path) -> None:
    (home / "file").touch()
    jax.config.update("jax_compilation_cache_dir", str(home / "file" / "jax"))
    with pytest.raises(UserError, match=r"file cannot be written .*: set JAX_"):
        _cache_to_fill()


def program(compile_: Any) -> Any:
    """A program that compiles as the function does."""
    return SimpleNamespace(compile=compile_)


def test_a_program_that_cannot_be_kept_is_an_error() -> None:
    def compiled() -> None:
        warnings.warn("Error writing persistent compilation cache entry: disk full", stacklevel=1)

    with pytest.raises(UserError, match=r"update is compiled, but cannot be kept \(.*disk full\)"):
        _compiled("update", program(compiled))


def test_a_program_that_does_not_fit_is_an_error() -> None:
    def compiled() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 80G of 32G")

    with pytest.raises(OutOfMemoryError, match=r"update does not fit .*32G\): grpo-eqx plan"):
        _compiled("update", program(compiled))
