"""A run whose completions call tools."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.common.errors import EXIT_INTERRUPTED
from grpo_eqx.environments.chat_format import ChatFormat, Parsed
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.tracking.run_folder import PASSED, RunFolder
from tests.environments.arithmetic import add, multiply
from tests.environments.templates import FORGETS_CALLS, HERMES
from tests.tracking.test_metric_registry import OF_TOOLS

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


@pytest.fixture
def settings(tmp_path: Path, small_model: Path) -> dict[str, Any]:
    (tmp_path / "template.jinja").write_text(HERMES)
    return {
        "model": str(small_model), "data": str(PROBLEMS), "steps": 2, "prompts_per_step": 8,
        "num_generations": 4, "max_completion_length": 120, "eval_problems": 8, "eval_steps": 1,
        "chat_template": str(tmp_path / "template.jinja"), "output_dir": tmp_path / "run",
        "max_prompt_length": 800, "log_completions_steps": 1,
    }  # fmt: skip


@pytest.fixture
def calls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads calls in whatever an untrained model writes."""
    parse = ChatFormat.parse

    def made_up(self: ChatFormat, ids: Any, prefix: Any, tools: Any) -> Parsed:
        parsed = parse(self, ids, prefix, tools)
        names = [["multiply"], ["add"], ["multiply", "add"], ["lost"], []][sum(ids) % 5]
        calls = [{"name": name, "arguments": {"a": len(ids), "b": 2}} for name in names]
        functions = [{"type": "function", "function": call} for call in calls]
        return Parsed({**parsed.message, **({"tool_calls": functions} if calls else {})})

    monkeypatch.setattr(ChatFormat, "parse", made_up)


def trained(settings: dict[str, Any], **changes: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The dialogues that rewards saw, and the metrics of the steps."""
    seen: list[Any] = []

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(messages) % 3) for messages in completions]

    trainer = GRPOTrainer(
        GRPOConfig(**{**settings, **changes}), reward_funcs=reward, tools=[multiply, add],
        eval_func=reward,
    )  # fmt: skip
    trainer.fit()
    lines = (settings["output_dir"] / "metrics.jsonl").read_text().splitlines()
    return seen, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_calls_are_answered_and_rewards_see_whole_dialogues(
    settings: dict[str, Any], calls_often: None
) -> None:
    seen, metrics = trained(settings)
    roles = {tuple(message["role"] for message in messages) for messages in seen}
    assert max(map(len, roles)) > 2
    assert all(own[0] == "assistant" for own in roles)
    answers = [m for messages in seen for m in messages if m["role"] == "tool"]
    assert {message["name"] for message in answers} == {"multiply", "add", "lost"}
    for messages in seen:
        for before, after in itertools.pairwise(messages):
            if after["role"] == "tool" and before["role"] == "assistant":
                call = before["tool_calls"][0]["function"]
                a = call["arguments"]["a"]
                expected = {"multiply": str(2 * a), "add": str(2 + a)}
                assert after["content"] == expected.get(call["name"], after["content"])
    steps = [line for line in metrics if "loss" in line]
    assert all(line.keys() >= OF_TOOLS for line in steps)
    assert any(line["tools/failure_frequency"] > 0 for line in steps)
    for line in steps:
        assert line["tools/call_frequency"] > 0
        assert 0 <= line["tools/failure_frequency"] < 1
        assert np.isfinite(line["loss"])
    for name in ("weights", "prefill", "decode", "extend"):  # of rollouts and of evaluations
        assert steps[-1][f"compile/num_shapes/{name}"] == 2
    assert "compile/num_shapes/generate" not in steps[-1]
    run = RunFolder(settings["output_dir"])
    assert json.loads(run.passed.read_text())["tools"] == f"multiply, add{PASSED}"
    table = pq.read_table(settings["output_dir"] / "completions" / "step_000001.parquet")
    (first,) = (line for line in steps if line["step"] == 1)
    assert fmean(table["tools/calls"].to_pylist()) == first["tools/call_frequency"]
    assert sum(table["tools/failures"].to_pylist()) == pytest.approx(
        first["tools/failure_frequency"] * sum(table["tools/calls"].to_pylist())
    )
    for length, logps in zip(table["length"], table["token_logps"], strict=True):
        assert np.isfinite(logps.as_py()).sum() == length.as_py()
    with pytest.raises(
        UserError, match=r"had tools, environments or a harness \(multiply, add\), which"
    ):
        Subject.find(str(settings["output_dir"])).check_single_turn()


def test_an_answer_must_fit_into_a_completion(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="max_tool_response_length is 120 and max_completion_lengt"):
        GRPOTrainer(GRPOConfig(**settings, max_tool_response_length=120), tools=[multiply])


@pytest.mark.slow
def test_a_limit_on_turns_ends_dialogues(settings: dict[str, Any], calls_often: None) -> None:
    seen, _ = trained(settings, max_tool_calling_iterations=1, steps=1)
    turns = [sum(m["role"] == "assistant" for m in messages) for messages in seen]
    assert max(turns) == 2


def test_templates_without_tools_are_refused(settings: dict[str, Any]) -> None:
    Path(settings["chat_template"]).write_text(FORGETS_CALLS)
    with pytest.raises(UserError, match="leaves out the model's calls"):
        GRPOTrainer(GRPOConfig(**settings), tools=[multiply])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tool_timeout": 3.0}, "tool_timeout is 3.0, and no tools or environments are passed: it"),
        (
            {"tool_failures": "stop"},
            "tool_failures is stop, and no tools or environments are passed",
        ),
        ({"max_tool_calling_iterations": 2}, "max_tool_calling_iterations is 2, and no tools"),
    ],
)
def test_settings_of_tools_need_tools(
    settings: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        GRPOTrainer(GRPOConfig(**settings, **changes))


INTERRUPTED = """
import os, signal, sys, threading
from grpo_eqx import GRPOConfig, GRPOTrainer, cli
from grpo_eqx.environments import Environment, Step

class Slow(Environment):
    def reset(self, seed: int) -> str:
        return "Guess."

    def step(self, text: str) -> Step:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60.0)
        return Step(done=True)

    def close(self) -> None:
        print("closed", flush=True)

def main(cfg: GRPOConfig) -> None:
    GRPOTrainer(cfg, environment_factory=Slow).evaluate()

if __name__ == "__main__":
    cli.run(main)
"""


@pytest.mark.slow
def test_environments_are_closed_when_an_evaluation_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(INTERRUPTED)
    flags = ["--eval-problems", "1", "--output-dir", "out", "--tool-timeout", "5"]
    done = subprocess.run(
        [sys.executable, "slow.py", *flags], cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == EXIT_INTERRUPTED, done.stderr
    assert "closed" in done.stdout
