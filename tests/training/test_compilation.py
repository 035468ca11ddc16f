"""The cache of compiled programs, and the count of what is compiled."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_eqx.training.compilation import CompilationCounter, use_compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)
LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# A program is compiled before, as a run's first ones are.
SCRIPT = """
import json, jax
jax.jit(lambda x: x - 1)(2.0)
from grpo_eqx.training.compilation import CompilationCounter, use_compilation_cache
folder = use_compilation_cache()
counter = CompilationCounter()
jax.jit(lambda x: x @ x.T)(jax.numpy.ones((3, 2)))
print(json.dumps([folder, counter.metrics()]))
"""
TRAINERS = """
import json, sys
from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.training.compilation import CompilationCounter
folder, model, data, *runs = sys.argv[1:]
small = dict(prompts_per_step=8, num_generations=2, max_completion_length=8, eval_problems=8)
for number, settings in enumerate(runs):
    counter = CompilationCounter()
    cfg = GRPOConfig(model=model, data=data, **small, **json.loads(settings),
                     output_dir=f"{folder}/{number}", resume="never")
    GRPOTrainer(cfg).fit()
    metrics = counter.metrics()
    print("found", metrics["compile/num_cache_hits"], "of", metrics["compile/num_programs"])
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder of a user who has set nothing; compile nothing here, JAX would keep it."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (None, True, 1), strict=True):
        jax.config.update(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(LEAST_SECONDS, raising=False)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def run(cache_home: Path, **variables: str) -> tuple[str | None, dict[str, float]]:
    """The folder and the counts of a process that compiles a little.

    JAX only warns where it cannot keep or load a program; here that is an error.
    """
    own = {"JAX_ENABLE_COMPILATION_CACHE": "true", LEAST_SECONDS: "0"}
    inherited = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SCRIPT],
        env={**inherited, "XDG_CACHE_HOME": str(cache_home), **own, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "SIGILL" not in result.stderr  # XLA doubts that the program suits the machine
    folder, metrics = json.loads(result.stdout)
    return folder, metrics


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    folder, first = run(tmp_path)
    assert folder == str(tmp_path / "grpo_eqx" / "jax")
    assert any(Path(folder).iterdir())
    again, second = run(tmp_path)
    assert again == folder
    assert first["compile/num_programs"] == second["compile/num_programs"] > 0
    assert first["compile/num_cache_hits"] == 0
    assert second["compile/num_cache_hits"] == second["compile/num_programs"]


@pytest.mark.slow
def test_a_second_run_with_other_numbers_compiles_nothing(
    tmp_path: Path, small_model: Path
) -> None:
    """Neither in the same process nor in another, down to the smallest programs."""
    problems = Path(__file__).parents[1] / "problems.jsonl"
    variables = {LEAST_SECONDS: "0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    runs = [
        {"steps": 2, "beta": 0.1, "num_iterations": 2, "eval_steps": 2},
        {"steps": 3, "beta": 0.2, "num_iterations": 3, "eval_steps": 1, "temperature": 0.8},
        {"steps": 1, "beta": 0.3, "num_iterations": 2, "eval_steps": 1, "epsilon": 0.1, "seed": 3,
         "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_ratio": 0.5},
    ]  # fmt: skip

    def train(name: str, *runs: dict[str, float | str]) -> list[str]:
        folder = str(tmp_path / name)
        arguments = folder, str(small_model), str(problems), *map(json.dumps, runs)
        result = subprocess.run(
            [sys.executable, "-c", TRAINERS, *arguments],
            env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return [line for line in result.stdout.splitlines() if line.startswith("found")]

    first, second = train("one", *runs[:2])
    assert first.split()[1] == "0.0"
    (third,) = train("other", runs[2])
    for found in (second, third):
        _, hits, _, programs = found.split()
        assert float(hits) == float(programs) > 0


def test_jaxs_own_variable_turns_it_off(tmp_path: Path) -> None:
    folder, metrics = run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")
    assert folder is None
    assert metrics["compile/num_programs"] > 0
    assert not list(tmp_path.iterdir())


def test_it_lies_in_the_home_folder_for_its_owner_alone(home: Path) -> None:
    folder = home / ".cache" / "grpo_eqx" / "jax"
    assert use_compilation_cache() == str(folder)
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.iterdir())
    assert use_compilation_cache() == str(folder)


def test_a_folder_that_the_user_chose_stays(home: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/jax")
    assert use_compilation_cache() == "gs://bucket/jax"
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1
    assert not list(home.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    with pytest.warns(UserWarning, match="set JAX_COMPILATION_CACHE_DIR"):
        assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_several_processes_need_a_folder_that_they_share(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert use_compilation_cache() is None
    jax.config.update("jax_compilation_cache_dir", "/shared")
    assert use_compilation_cache() == "/shared"


@pytest.fixture
def no_cache() -> Iterator[None]:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("no_cache")
def test_counters_count_from_their_own_start() -> None:
    x = jnp.ones(3)
    first = CompilationCounter()
    assert set(first.metrics().values()) == {0}
    jax.jit(lambda x: x + 1)(x)
    second = CompilationCounter()
    square = jax.jit(lambda x: x * x)
    square(x)
    square(x)
    assert first.metrics()["compile/num_programs"] == 2
    assert second.metrics()["compile/num_programs"] == 1
    assert first.metrics()["compile/seconds"] > second.metrics()["compile/seconds"] > 0
    assert first.metrics()["compile/num_cache_hits"] == 0
