"""Traces of steps: what they have, and that a run is none the worse for them."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.tracking.metrics import StepClock
from grpo_eqx.tracking.step_profiler import StepProfiler, phase


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    yield
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


@phase("reward")
def work() -> jax.Array:
    return jax.block_until_ready(jnp.ones(8) * 2)


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    assert list(path.parent.glob("*.xplane.pb"))
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def names(folder: Path) -> list[str]:
    return [event.get("name", "") for event in events(folder)]


def test_the_steps_of_the_range_are_traced_with_their_phases(tmp_path: Path) -> None:
    notes = list[str]()
    with StepProfiler("2:3", tmp_path, notes.append) as profiler:
        for step in range(1, 6):
            profiler.begin(step)
            work()
    steps = [x for x in events(tmp_path) if x.get("name", "").startswith("train step")]
    assert [int(x["args"]["step_num"]) for x in steps] == [2, 3]
    assert names(tmp_path).count("reward") == 2
    assert notes == [f"the trace of steps up to 3 is in {tmp_path}"]


def test_what_comes_between_two_steps_is_in_no_step(tmp_path: Path) -> None:
    notes = list[str]()
    with StepProfiler("1:1", tmp_path, notes.append) as profiler:
        profiler.begin(1)
        work()
        profiler.end()
        assert len(notes) == 1  # the trace is written
        profiler.begin(2)
    assert names(tmp_path).count("reward") == 1


def test_what_is_in_memory_is_written_on_request(tmp_path: Path) -> None:
    with StepProfiler("1:2", tmp_path, print, of_memory=True) as profiler:
        for step in (1, 2, 3):
            profiler.begin(step)
            work()
    files = sorted(path.name for path in tmp_path.glob("*.prof"))
    assert files == ["memory_step_000001.prof", "memory_step_000002.prof"]
    assert gzip.decompress((tmp_path / files[0]).read_bytes())  # in pprof's format


def test_an_error_ends_the_trace_which_is_written(tmp_path: Path) -> None:
    def fail() -> None:
        with StepProfiler("1:9", tmp_path, print) as profiler:
            profiler.begin(1)
            work()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "reward" in names(tmp_path)


def test_beside_a_trace_of_the_program_itself_none_is_taken(tmp_path: Path) -> None:
    notes = list[str]()
    with jax.profiler.trace(tmp_path / "own"), StepProfiler("1:2", tmp_path, notes.append) as own:
        own.begin(1)
        work()
        own.begin(2)
    assert len(notes) == 1
    assert notes[0].startswith("note: steps are not profiled: Profile has already been started")
    assert not (tmp_path / "plugins").exists()
    assert "reward" in names(tmp_path / "own")


def test_a_run_that_is_past_the_steps_says_so(tmp_path: Path) -> None:
    notes = list[str]()
    with StepProfiler("2:3", tmp_path, notes.append) as profiler:
        for step in (5, 6):
            profiler.begin(step)
    (note,) = notes
    assert note.startswith("note: profile_steps 2:3 are done already, and are not profiled")
    assert not list(tmp_path.iterdir())


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    with StepProfiler(None, tmp_path, print) as profiler:
        profiler.begin(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", ["", "0", "5:", "0:1", "3:2", "a:b", "1:2:3", "-1:2"])
def test_ranges_that_are_none_are_refused(steps: str) -> None:
    with pytest.raises(UserError, match="give one step, or the first and the last"):
        GRPOConfig(profile_steps=steps)


def test_the_range_is_in_the_run() -> None:
    assert GRPOConfig(steps=7, profile_steps="5:7").profile_steps == "5:7"
    assert GRPOConfig(steps=7, profile_steps="7").profile_steps == "7"
    with pytest.raises(UserError, match="profile_steps is 5:7, and the run has 6 steps"):
        GRPOConfig(steps=6, profile_steps="5:7")
    epochs = GRPOConfig(num_train_epochs=1.0, prompts_per_step=2, profile_steps="200:300")
    assert epochs.for_problems(1000).steps == 500
    with pytest.raises(UserError, match="the run has 5 steps"):
        epochs.for_problems(10)


@pytest.mark.slow
def test_a_run_traces_its_phases(small_model: Path, tmp_path: Path) -> None:
    cfg = GRPOConfig(
        model=str(small_model), steps=3, prompts_per_step=8, num_generations=2,
        max_completion_length=8, output_dir=tmp_path / "run", profile_steps="2:3",
    )  # fmt: skip
    GRPOTrainer(cfg).fit()
    traced = names(tmp_path / "run" / "profile")
    assert {"rollout", "reward", "score", "update", "record", "checkpoint"} <= set(traced)
    assert sum(name.startswith("train step") for name in traced) == 2


def test_starting_and_writing_a_trace_are_no_part_of_steps(tmp_path: Path) -> None:
    with StepProfiler("1:1", tmp_path, print) as profiler:
        clock = StepClock()
        before = time.perf_counter()
        clock.skip(profiler.begin(1))
        clock.lap("rollout")
        clock.skip(profiler.end())
        clock.lap("update")
        elapsed = time.perf_counter() - before
    assert (tmp_path / "plugins").exists()  # which takes most of the time
    assert clock.metrics()["step_time"] < elapsed / 2
