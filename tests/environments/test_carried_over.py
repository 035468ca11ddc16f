"""Games that go on from one step to the next."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.environments import Environment, Step
from tests.environments.templates import HERMES

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
STEPS, P, G = 4, 8, 2
SECONDS = 120.0


class Quiz(Environment):
    """Asks twice more. The games of a few questions wait until a step has been rewarded."""

    rewarded = threading.Event()
    slow = frozenset[str]()

    def reset(self, prompt: Any, **row: Any) -> None:
        self.question, self.turns = str(prompt), 0

    async def step(self, text: str) -> Step:  # type: ignore[override]
        self.turns += 1
        if self.question in self.slow:
            await asyncio.to_thread(self.rewarded.wait, SECONDS)
        return Step(f"Once more, {len(text)}?", reward=1.0, done=self.turns == 3)


class Seen:
    """A reward that notes the dialogues of each question, in the order of the steps."""

    def __init__(self) -> None:
        self.dialogues: dict[str, list[Any]] = {}

    def __call__(
        self, completions: list[Any], prompts: list[Any], environments: list[Any], **row: Any
    ) -> list[float]:
        if len(completions) > 1:  # else it is the trial
            for each, messages, game in zip(prompts, completions, environments, strict=True):
                assert game.question == str(each)
                self.dialogues.setdefault(game.question, []).append(messages)
            Quiz.rewarded.set()
        return [float(len(messages) % 3) for messages in completions]


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Quiz, "rewarded", threading.Event())
    yield
    Quiz.rewarded.set()


@pytest.fixture
def settings(tmp_path: Path, small_model: Path) -> dict[str, Any]:
    (tmp_path / "template.jinja").write_text(HERMES)
    return {
        "model": str(small_model), "data": str(PROBLEMS), "steps": STEPS, "prompts_per_step": P,
        "num_generations": G, "max_completion_length": 100, "eval_problems": 8,
        "chat_template": str(tmp_path / "template.jinja"), "max_prompt_length": 800, "seed": 3,
        "learning_rate": 1e-30,
    }  # fmt: skip


def played(settings: dict[str, Any], folder: Path, **others: Any) -> tuple[dict[str, Any], Any]:
    seen = Seen()
    cfg = GRPOConfig(output_dir=folder, **settings, **others)
    result = GRPOTrainer(cfg, reward_funcs=seen, environment_factory=Quiz).fit()
    return seen.dialogues, result


@pytest.mark.slow
@pytest.mark.parametrize("caches", ["recompute", "keep"])
def test_dialogues_are_those_of_a_synchronous_run_and_waits_hold_no_step(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: str
) -> None:
    expected, _ = played(settings, tmp_path / "synchronous")
    asks = [each for each, group in expected.items() if max(map(len, group)) > 2]
    Quiz.rewarded.clear()
    # A step that waited for them would wait for itself.
    monkeypatch.setattr(Quiz, "slow", frozenset(asks[:3]))
    found, result = played(
        settings, tmp_path / "carried", max_staleness=2, max_num_seqs=8, carried_caches=caches,
        importance_sampling_mode="token_truncate",
    )  # fmt: skip
    assert found == expected
    assert not set(list(found)[:P]) & Quiz.slow
    assert all(metrics["tools/num_lost"] == 0 for metrics in result.history)
    assert 0 < max(metrics["staleness/max"] for metrics in result.history) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_dialogues_go_on_while_a_step_trains_on_other_devices(
    settings: dict[str, Any], tmp_path: Path, max_staleness: int
) -> None:
    expected, _ = played(settings, tmp_path / "synchronous")
    found, result = played(
        settings, tmp_path / "ahead", max_staleness=max_staleness, rollout_devices=4,
        importance_sampling_mode="token_truncate",
    )  # fmt: skip
    assert found == expected
    assert 0 < max(metrics["staleness/max"] for metrics in result.history) <= max_staleness
