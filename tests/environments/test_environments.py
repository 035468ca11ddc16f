"""Runs whose completions act in environments."""

import asyncio
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.common.errors import RunError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.exchange import own_share
from grpo_eqx.environments.acting import _own_groups
from grpo_eqx.environments.environment import Environment, Step
from grpo_eqx.environments.pool import Environments
from grpo_eqx.environments.starts import started, with_observation, with_one_prompt
from tests.environments.templates import FORGETS_CALLS, HERMES, tokenizer_with
from tests.environments.test_acting import calls_often, settings

__all__ = ["calls_often", "settings"]


class Counter:
    """Counts what it is asked to, in TRL's contract."""

    made: list["Counter"]

    def __init__(self) -> None:
        self.value, self.is_closed, self.rows = 0, False, list[dict[str, Any]]()
        type(self).made.append(self)

    async def reset(self, **row: Any) -> str:
        await asyncio.sleep(0)
        self.value = 0
        self.rows.append(row)
        row["answer"] += "!"  # of a copy
        return f" Answer {row['answer']}."

    def multiply(self, a: int, b: int) -> int:
        """Counts.

        Args:
            a: A number.
            b: Another.
        """
        self.value += 1
        return self.value

    @property
    def secret(self) -> int:
        raise AssertionError("properties are not evaluated")

    def get_reward(self) -> float:
        return float(self.value)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counter.made = []


def steps_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (settings["output_dir"] / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.slow
def test_each_completion_has_an_environment_of_its_own(
    settings: dict[str, Any], calls_often: None
) -> None:
    seen: list[tuple[Any, Any, list[Any]]] = []

    def reward(
        prompts: list[Any], completions: list[Any], environments: list[Any], **columns: Any
    ) -> list[float]:
        assert len(set(map(id, environments))) == len(environments)
        for prompt, messages, environment in zip(prompts, completions, environments, strict=True):
            seen.append((prompt, environment.value, messages))
        return [0.0] * len(environments)

    trainer = GRPOTrainer(
        GRPOConfig(**settings), reward_funcs=reward, environment_factory=Counter, eval_func=reward
    )
    trainer.fit()
    for _, value, messages in seen:
        functions = [call for m in messages for call in m.get("tool_calls", [])]
        asked = [call["function"]["name"] for call in functions]
        answers = [
            m["content"] for m in messages if m["role"] == "tool" and m["name"] == "multiply"
        ]
        # In a last turn, answers may not have fit, or it was cut before its calls were run.
        assert len(answers) <= value <= asked.count("multiply")
        assert answers == [str(i) for i in range(1, len(answers) + 1)]
    assert any(value > 0 for _, value, _ in seen)
    for line in steps_of(settings):
        assert line["rewards/Counter/mean"] > 0
        assert line["reward"] == pytest.approx(line["rewards/Counter/mean"])
    # 32 completions at a time, of training and of an evaluation, and the one that was tried first.
    assert len(Counter.made) <= 33
    assert all(each.is_closed for each in Counter.made)
    rows = [row for each in Counter.made for row in each.rows]
    assert all({"prompt", "answer"} <= row.keys() for row in rows)
    assert all(row["answer"].count("!") == 1 for row in rows)
    assert all(" Answer " in prompt for prompt, _, _ in seen)


class Guess(Environment):
    """Ends a completion after as many turns as its seed says."""

    def reset(self, seed: int) -> str:
        self.left = seed % 3
        return f"Guess {seed}!"

    async def step(self, text: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        self.left -= 1
        if self.left < 0:
            return Step(reward=1.0, done=True)
        return Step("Again.", reward=0.5)


@pytest.mark.slow
def test_an_environment_makes_prompts_and_takes_turns(settings: dict[str, Any]) -> None:
    seen: list[tuple[int, list[Any], list[int]]] = []

    def reward(
        completions: list[Any], environments: list[Any], seed: list[int], **columns: Any
    ) -> list[float]:
        for messages, environment, each in zip(completions, environments, seed, strict=True):
            seen.append((each, messages, environment.total_reward))
        return [0.0] * len(environments)

    del settings["data"]
    cfg = GRPOConfig(**{**settings, "max_completion_length": 200, "stop_strings": ("e",)})
    trainer = GRPOTrainer(cfg, environment_factory=Guess, reward_funcs=reward, eval_func=reward)
    trainer.fit()
    assert all(0 < line["perf/slot_utilization"] <= 1 for line in steps_of(settings))
    assert len(trainer.generate([{"seed": 3}])) == 1
    assert 0.5 <= trainer.evaluate().scores["Guess"].mean() <= 2.0
    for seed, messages, total in seen:
        roles = [m["role"] for m in messages]
        assert roles == ["assistant", *["user", "assistant"] * (len(roles) // 2)]
        answered = len(roles) // 2
        assert answered <= seed % 3
        if answered == seed % 3:
            assert total in (0.5 * answered + 1.0, 0.5 * answered)
    assert {len(messages) for _, messages, _ in seen} == {1, 3, 5}


@pytest.mark.slow
def test_a_run_outlives_environments_that_die(
    settings: dict[str, Any], calls_often: None, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers, released = itertools.count(), threading.Event()

    class Dies(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)

        def reset(self, **row: Any) -> str:  # type: ignore[override]
            if self.number % 7 == 3:
                raise OSError("no container")
            return ""

        def multiply(self, a: int, b: int) -> int:
            """Counts.

            Args:
                a: A number.
                b: Another.
            """
            if self.number % 7 == 5:
                released.wait(30.0)
            return super().multiply(a, b)

    GRPOTrainer(
        GRPOConfig(**{**settings, "tool_timeout": 3.0, "eval_problems": 1, "eval_steps": None}),
        environment_factory=Dies,
    ).fit()
    released.set()
    lines = steps_of(settings)
    assert len(lines) == 2
    assert all(line["tools/num_lost"] > 0 for line in lines)
    assert all(each.is_closed for each in Counter.made)
    said = capfd.readouterr().err
    assert "warning: reset of environment Dies raised OSError: no container (" in said
    assert "warning: tool multiply ran out of time: it took more than 3 s (tool_timeout)" in said


def test_failures_stop_a_run_that_says_so(settings: dict[str, Any]) -> None:
    class Dead(Counter):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            raise OSError("no container")

    trainer = GRPOTrainer(GRPOConfig(**settings, tool_failures="stop"), environment_factory=Dead)
    with pytest.raises(RunError, match=r"reset of environment Dead raised OSError: no container"):
        trainer.fit()


@pytest.mark.parametrize(
    ("content", "observed", "expected"),
    [
        ("2 + 2?", " Use tools.", "2 + 2? Use tools."),
        ("2 + 2?", None, "2 + 2?"),
        (
            "2 + 2?",
            [{"type": "text", "text": " Use"}, {"type": "text", "text": "."}],
            "2 + 2? Use.",
        ),
        ("", [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
        ("", "Hi", [{"role": "user", "content": "Hi"}]),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
            " Now.",
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "2 + 2? Now."},
            ],
        ),
    ],
)
def test_a_prompt_is_continued_by_what_reset_returns(
    content: Any, observed: Any, expected: Any
) -> None:
    problem = Prompt(content, {"answer": "4"})
    assert with_observation(problem, observed, "Game").content == expected
    assert problem.content == content


@pytest.mark.parametrize("observed", [b"bytes", 3, [["nested"]], [{"type": "image"}], {}, []])
def test_other_results_of_reset_are_errors(observed: Any) -> None:
    with pytest.raises(UserError, match=r"reset of environment Game returned .*: return a text"):
        with_observation(Prompt("2 + 2?", {}), observed, "Game")
    with pytest.raises(UserError, match="reset of environment Game returned None"):
        with_observation(Prompt("", {}), None, "Game")
    answered = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi!"}]
    with pytest.raises(UserError, match=r"reset of environment Game: .* ends with the assistant's"):
        with_observation(Prompt("", {}), answered, "Game")


def test_different_prompts_of_a_problem_begin_its_completions() -> None:
    def begun(*ids: int) -> Trajectory:
        return Trajectory(ids, Address(0, 0, 0))

    same = [begun(1, 2, 3), begun(1, 2, 3)]
    assert with_one_prompt(same) == same
    made = with_one_prompt([begun(1, 2, 3), begun(1, 2, 5, 6), begun(1, 2)])
    assert [list(each.prompt_ids) for each in made] == [[1, 2]] * 3
    assert [each.ids.tolist() for each in made] == [[3], [5, 6], []]
    assert not any(each.written.any() for each in made)


@pytest.mark.slow
def test_a_run_with_different_prompts_of_a_problem(
    settings: dict[str, Any], calls_often: None
) -> None:
    numbers = itertools.count()

    class Varies(Counter):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            return f" Case {next(numbers)}."

    cfg = GRPOConfig(**{**settings, "steps": 1, "max_num_seqs": 16, "eval_problems": 1})
    GRPOTrainer(cfg, environment_factory=Varies).fit()
    (line,) = steps_of(settings)
    assert 0 < line["completions/mean_length"] < 120
    assert line["completions/max_length"] < 120  # a prompt's own part does not count


def test_processes_answer_what_they_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch is filled up: rewards are shared by the real problems."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    of_prompts, is_real = [[0, 1], [2, 3], [4, 5], [6, 7]], [True, True, True, False]
    for process, expected in enumerate([([0], []), ([1, 2], [3])]):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert _own_groups(of_prompts, is_real) == expected
        assert expected[0] == [0, 1, 2][own_share(3)]


def test_a_lost_completion_has_the_prompt_of_its_group() -> None:
    numbers = itertools.count()

    class Flaky(Counter):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            if next(numbers) == 0:
                raise OSError("no container")
            return " Now."

    environments = Environments(factory=Flaky)
    tokenizer = tokenizer_with(HERMES)
    problems = {n: Prompt("2 + 2?", {}) for n in range(4)}
    starts = started(environments, [[0, 1], [2, 3]], problems, tokenizer, max_prompt_length=99)
    environments.close()
    assert [start.dialogue.is_lost for start in starts.values()].count(True) == 1
    assert {start.content for start in starts.values()} == {"2 + 2? Now."}
    (ids,) = tokenizer.encode_prompts([Prompt("2 + 2? Now.", {})])
    assert all(start.ids == ids for start in starts.values())


def test_mistakes_are_said_before_anything_is_sampled(settings: dict[str, Any]) -> None:
    class Needs(Counter):
        def reset(self, level: int) -> None:  # type: ignore[override]
            ...

    with pytest.raises(
        UserError, match="environment Needs: reset needs level, and gets prompt and"
    ):
        GRPOTrainer(GRPOConfig(**settings), environment_factory=Needs)
    with pytest.raises(UserError, match=r"a problem has no column environment, .* with counter,"):
        GRPOTrainer(GRPOConfig(**settings), environment_factory={"counter": Counter})
    with pytest.raises(UserError, match="takes whole turns by step, and tools are passed"):
        GRPOTrainer(GRPOConfig(**settings), environment_factory=Guess, tools=[_double])
    with pytest.raises(UserError, match="asks for environments, which it does not get: pass"):
        GRPOTrainer(GRPOConfig(**settings), reward_funcs=_needs_environments)
    Path(settings["chat_template"]).write_text(FORGETS_CALLS)
    with pytest.raises(UserError, match="leaves out the model's calls"):
        GRPOTrainer(GRPOConfig(**settings), environment_factory=Counter)


def _double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


def _needs_environments(environments: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(environments)
