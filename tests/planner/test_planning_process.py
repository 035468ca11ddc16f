"""Plans of another process, and those that are known already."""

import json
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.common.errors import PlanningError
from grpo_eqx.planner import planning_process
from grpo_eqx.planner.planning_process import ask

PROBLEMS = str(Path(__file__).parents[1] / "problems.jsonl")
SMALL = {"data": PROBLEMS, "prompts_per_step": 8, "num_generations": 2, "max_completion_length": 8}


@pytest.fixture
def answers(plan_of, with_memory, monkeypatch, tmp_path) -> list[dict]:
    """The questions that reach the other process, which is none here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planning_process.importlib.util, "find_spec", lambda name: object())
    questions = []

    def compute(question, say):
        questions.append(question)
        return plan_of({"update": 100}, with_memory(1000)).to_json()

    monkeypatch.setattr(planning_process, "_compute", compute)
    return questions


def test_a_second_question_needs_no_process(answers) -> None:
    first = ask(GRPOConfig(), "v6e-8", print)
    assert ask(GRPOConfig(), "v6e-8", print) == first
    assert len(answers) == 1
    ask(GRPOConfig(seed=1), "v6e-8", print)
    ask(GRPOConfig(), "v6e-16", print)
    ask(GRPOConfig(), "v6e-8", print, "num_generations")
    assert len(answers) == 4


def test_another_model_under_the_same_name_is_another_question(answers, tmp_path) -> None:
    cfg = GRPOConfig(model=str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    for layers in (2, 3, 3):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
        ask(cfg, "v6e-8", print)
    assert len(answers) == 2


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(planning_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "grpo_eqx\[plan\]"') as error:
        ask(GRPOConfig(), "v6e-8", print)
    assert "\n" not in str(error.value)


def test_an_unknown_topology_is_told_first(monkeypatch) -> None:
    monkeypatch.setattr(planning_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="TPU type v6e-7 does not exist: use one of"):
        ask(GRPOConfig(), "v6e-7", print)


@pytest.mark.slow
def test_of_this_machine(said, monkeypatch, tmp_path) -> None:
    """In truth another process, with this one's environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was compiled before
    plan = ask(GRPOConfig(**SMALL, eval_problems=8), "local", said.append)
    assert plan.fits
    assert plan.num_devices == 8
    assert list(plan.programs) == ["generate", "update", "evaluate"]
    compiled = [f"compiling {name} for local" for name in ("update", "generate", "evaluate")]
    assert said == [*compiled, "measuring this machine's rates"]
    said.clear()
    again = ask(GRPOConfig(**SMALL, eval_problems=8), "local", said.append)
    assert again.programs == plan.programs
    assert said == ["measuring this machine's rates"]  # what was compiled is on disk


@pytest.mark.slow
def test_a_users_mistake_comes_back_as_one(said) -> None:
    with pytest.raises(UserError, match="mesh 3,1,1"):
        ask(GRPOConfig(mesh="3,1,1"), "local", said.append)


def test_a_process_that_fails_shows_its_last_words(said, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(PlanningError, match="nonsense"):
        ask(GRPOConfig(), "local", said.append)
