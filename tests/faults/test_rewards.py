"""Reward functions that fail, in a whole run: it goes on or stops as the policy says."""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.errors import RewardFailureError

from ..processes import processes
from .conftest import Command

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
STEPS, PROMPTS, GROUP = 3, 8, 4

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="lists processes in /proc")

MODULE = """
import asyncio, ctypes, os, time


def _score(text, ids):
    kind = os.environ["GRPO_EQX_TEST_FAULT"]
    if sum(ids) % 10 == 0:
        if kind == "sleep":
            time.sleep(3600)
        if kind == "segfault":
            ctypes.string_at(0)
        if kind == "raise":
            raise ValueError("no such unit")
        if kind == "nan":
            return float("nan")
    return float(len(text))


def faulty(*, completions, completion_ids, **columns):
    return [_score(text, ids) for text, ids in zip(completions, completion_ids, strict=True)]


def crashes_on_half(*, completions, **columns):
    seen = os.environ["GRPO_EQX_TEST_CALLS"]
    with open(seen, "a") as file:
        file.write("x")
    if os.path.getsize(seen) % 2 == 0:
        ctypes.string_at(0)
    return [1.0] * len(completions)


async def judge(*, completions, completion_ids, **columns):
    if any(sum(ids) % 10 == 0 for ids in completion_ids):
        await asyncio.Event().wait()
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose functions fail on about every tenth completion."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "faulty_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("faulty_rewards", None)
    return importlib.import_module("faulty_rewards")


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    return {process.pid for process in processes() if process.parent == os.getpid()}


def trainer(model: Path, out: Path, func: Any, **fields: Any) -> GRPOTrainer:
    cfg = GRPOConfig(
        model=str(model), data=str(PROBLEMS), output_dir=out, steps=STEPS, prompts_per_step=PROMPTS,
        num_generations=GROUP, max_completion_length=6, eval_problems=8, log_completions_steps=0,
        save_minutes=None, learning_rate=1e-3, **fields,
    )  # fmt: skip
    return GRPOTrainer(cfg, reward_funcs=[func])


CASES = {
    "sleep": {"reward_workers": 2, "reward_timeout": 0.5},
    "segfault": {"reward_workers": 2},
    "raise": {},
    "nan": {},
    "hang": {"reward_timeout": 0.5},
}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_run_goes_on_without_the_completions_on_which_a_function_fails(
    small_model: Path, tmp_path: Path, rewards: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_EQX_TEST_FAULT", kind)
    func = rewards.judge if kind == "hang" else rewards.faulty
    before = children()
    run = trainer(
        small_model, tmp_path / "run", func,
        reward_failures="drop", max_failed_rewards=0.5, **CASES[kind],
    )  # fmt: skip
    steps = []
    learn = run._learner.learn

    def listen(state: Any, rollout: Any, advantages: Any) -> Any:
        yield from learn(state, rollout, advantages)
        steps.append((rollout, run._learner.num_counted))

    run._learner.learn = listen  # type: ignore[method-assign]
    history = run.fit().history
    assert children() <= before
    assert len(history) == STEPS
    for (rollout, num_counted), metrics in zip(steps, history, strict=True):
        tenth = np.array([[sum(tokens) % 10 == 0 for tokens in group] for group in rollout.ids])
        assert metrics[f"rewards/{func.__name__}/num_failed"] == tenth.sum() > 0
        np.testing.assert_array_equal(rollout.rewards.dropped, tenth)
        assert num_counted == rollout.lengths[~tenth].sum()
        assert all(map(np.isfinite, metrics.values()))
    # Where a whole group failed there is nothing to learn, and nothing breaks.
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.model))


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_by_default_the_run_stops_and_names_the_sample(
    small_model: Path, tmp_path: Path, rewards: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_EQX_TEST_FAULT", kind)
    func = rewards.judge if kind == "hang" else rewards.faulty
    before = children()
    run = trainer(small_model, tmp_path / "run", func, **CASES[kind])
    start = time.monotonic()
    with pytest.raises(
        RewardFailureError, match=rf"reward function {func.__name__} .* for completion \d+"
    ):
        run.fit()
    assert time.monotonic() - start < 30
    assert children() <= before


@pytest.mark.slow
def test_too_many_failures_stop_the_run_with_the_numbers(
    small_model: Path, tmp_path: Path, rewards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_EQX_TEST_FAULT", "raise")
    run = trainer(
        small_model, tmp_path / "run", rewards.faulty,
        reward_failures="drop", max_failed_rewards=0.01,
    )  # fmt: skip
    with pytest.raises(
        RewardFailureError, match=r"failed on \d+ of 32 .* max_failed_rewards is 0\.01"
    ):
        run.fit()


@pytest.mark.slow
def test_an_evaluation_keeps_to_the_policy_too(
    small_model: Path, tmp_path: Path, rewards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion that cannot be scored is not solved."""
    monkeypatch.setenv("GRPO_EQX_TEST_CALLS", str(tmp_path / "calls"))
    before = children()
    cfg = GRPOConfig(
        model=str(small_model), data=str(PROBLEMS), output_dir=tmp_path / "run", eval_problems=8,
        prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=6,
        reward_workers=1, reward_failures="drop", max_failed_rewards=1.0,
    )  # fmt: skip
    run = GRPOTrainer(cfg, reward_funcs=[rewards.faulty], eval_func=rewards.crashes_on_half)
    solved = run.evaluate().solved
    assert solved.tolist() == [[i % 2 == 0] for i in range(8)]
    assert children() <= before


SCRIPT = """
import os, sys
from pathlib import Path
from grpo_eqx import GRPOConfig, cli, GRPOTrainer


def wanders(prompts, completions, completion_ids, **columns):
    rewards = [float(len(text)) for text in completions]
    os.chdir("/")
    for edited in (*completion_ids, prompts, completions, *columns.values()):
        edited.clear()
    return rewards


def train(cfg: GRPOConfig) -> None:
    GRPOTrainer(cfg, reward_funcs=wanders).fit()


cli.run(train)
"""


@pytest.mark.slow
def test_a_reward_that_changes_the_directory_and_its_arguments_changes_nothing_of_the_run(
    small_model: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started three times in a folder, it makes one run there, with the records of any other."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    plain = tmp_path / "plain.py"
    plain.write_text(SCRIPT.replace('os.chdir("/")', "return rewards"))
    expected = Command(small_model, programs, tmp_path / "expected", script=plain, steps=4)
    expected.finish()
    monkeypatch.chdir(tmp_path)
    run = Command(small_model, programs, Path("run"), script=script, steps=4)
    run.arguments += ["--stop-after", "1s"]
    said = [run.finish(75), run.finish(75)]
    run.arguments = run.arguments[:-2]
    said.append(run.finish())
    for output in said:
        assert "warning: reward function wanders changed the working directory: the run" in output
        assert "error" not in output
    assert "resuming from run/checkpoints/step_1, after step 1 of 4" in said[1]
    assert "resuming from run/checkpoints/step_2, after step 2 of 4" in said[2]
    assert run.rows() == expected.rows()
    assert run.tables() == expected.tables()
    assert run.model() == expected.model()
