"""Tools and environments here and in TRL, in the same runs.

TRL's package comes without its tests, so the lists below have those that we know of: by their
code in other versions of its repository, or, those with `train_with` or `owned_reward` in the name
and that of malformed calls, by name alone. What they are about is run with TRL's trainer and ours:
the tokens, which of them are learned from, the dialogues, the rewards, the metrics, the loss and
the norm of the gradient are the same.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx import UserError
from tests.environments.arithmetic import add, multiply
from tests.parity.scripted_runs import Case, Run, run_ours, run_trl

pytest.importorskip("torch")
trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # of torch, transformers and TRL
]

SHOWN = {
    "test_training_with_tools": "test_calls",
    "test_training_with_malformed_tool_calls": "test_calls",
    "test_single_turn_no_tools": "test_calls",
    "test_multi_turn_tool_calling": "test_calls",
    "test_truncated_at_max_turns": "test_calls",
    "test_trajectory_no_duplicates_end_to_end": "test_calls",
    "test_score_group_tool_metrics": "test_calls",
    "test_train_with_environment_factory": "test_an_environment_of_each_completion",
    "test_environment_owned_reward_coexists_with_reward_funcs": (
        "test_an_environment_of_each_completion"
    ),
    "test_train_with_environment_owned_reward": "test_an_environment_that_owns_all",
    "test_environment_owned_reward_mixed_environments": "test_several_environments",
    "test_multiple_environments_expose_only_their_own_tools": "test_several_environments",
    "test_unknown_environment_raises": "test_both_refuse",
}
"""TRL's tests, and ours that show the same."""
DIFFERS = {
    "test_dataset_required_without_environment": "without data, the embedded problems are taken",
    "test_environment_owned_data_requires_max_steps": "steps has a default",
    "test_add_response_schema_vlm": "models that see images are not supported",
    "answers and observations with images": "models that see images are not supported",
    "async tools after plain ones, in one turn": "answers have the order of the calls, always",
}
"""TRL's tests, and what it says of itself, that do not pass here, and why. Its tests of formats
(schemas, which templates have tools or keep their prefix, what is read of a response) are in
`test_chat_formats_trl.py`, for all of its templates."""
LIKE_TRL = (
    "loss", "grad_norm", "entropy", "reward", "reward_std", "frac_reward_zero_std",
    "completions/mean_length", "completions/min_length", "completions/max_length",
    "tools/call_frequency", "tools/failure_frequency",
)  # fmt: skip
ENDS = (
    "completions/clipped_ratio", "completions/mean_terminated_length",
    "completions/min_terminated_length", "completions/max_terminated_length",
)  # fmt: skip


@pytest.fixture
def template() -> str:
    path = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    return path.read_text(encoding="utf-8")


@pytest.fixture
def both(
    tmp_path: Path, small_model: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Case], tuple[Run, Run]]:
    """Runs both sides, and compares all but how completions ended."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def run(case: Case) -> tuple[Run, Run]:
        ours = run_ours(case, small_model, template, tmp_path / "ours")
        theirs = run_trl(case, small_model, template, tmp_path / "trl")
        assert ours.completions == theirs.completions
        assert len(ours.completions) == case.steps
        assert ours.notes == theirs.notes
        for own, other in zip(ours.metrics, theirs.metrics, strict=True):
            names = {*LIKE_TRL, *(name for name in other if name.startswith("rewards/"))}
            if "rollout_func" in case.passed:  # which knows of no tools
                names -= {"tools/call_frequency", "tools/failure_frequency"}
            expected = {name: other[name] for name in names}
            assert {name: own[name] for name in names} == pytest.approx(expected, 1e-3, 1e-5)
        return ours, theirs

    return run


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def fail(text: str) -> str:
    """Fails.

    Args:
        text: With what.
    """
    raise ValueError(text)


async def fail_later(text: str) -> str:
    """Fails.

    Args:
        text: With what.
    """
    await asyncio.sleep(0)
    raise ValueError(text)


def words(number: int) -> str:
    """Returns many words.

    Args:
        number: How many.
    """
    return " ".join(map(str, range(number)))


CALLS = {
    "a plain function": [call("multiply", a=3, b=4), "It is 12."],
    "an async function": [call("add", a=3, b=4), "It is 7."],
    "no call": ["I know no tool."],
    "an argument too many": [call("multiply", a=3, b=4, c=5), "Sorry."],
    "an async function with an argument too many": [call("add", a=3, b=4, c=5), "Sorry."],
    "an unknown tool": [call("divide", a=3, b=4), "Sorry."],
    "a failure": [call("fail", text="no such page"), "Sorry."],
    "an async failure": [call("fail_later", text="no such page"), "Sorry."],
    "no JSON": [
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 3\n</tool_call>',
        "Not read.",
    ],
    "several calls in a turn": [
        "All: "
        + call("multiply", a=1, b=2)
        + "\n"
        + call("fail", text="no")
        + call("add", a=1, b=1),
        "Done.",
    ],
    "several turns": [call("add", a=3, b=4), call("multiply", a=7, b=2), "14."],
    "more turns than are allowed": [call("add", a=n, b=1) for n in range(5)],
}


@pytest.mark.slow
def test_calls(both: Callable[[Case], tuple[Run, Run]]) -> None:
    scripts = list(CALLS.values())
    ours, theirs = both(
        Case(
            script=lambda prompt, n: scripts[n],
            rows=[{"prompt": user("3 x 4?"), "answer": "12"}],
            group=len(scripts),
            settings={"max_tool_calling_iterations": 2},
            passed={"tools": [multiply, add, fail, fail_later]},
        )
    )
    assert [ours.metrics[0][x] for x in ENDS] == [theirs.metrics[0][x] for x in ENDS]
    assert ours.metrics[0]["tools/call_frequency"] == pytest.approx(14 / 12)
    assert ours.metrics[0]["tools/failure_frequency"] == pytest.approx(6 / 14)


@pytest.mark.slow
def test_answers_that_do_not_fit_are_dropped(both: Callable[[Case], tuple[Run, Run]]) -> None:
    """Such a completion is truncated here; TRL looks for an end token alone."""
    scripts = [
        [call("words", number=9), "Nine."],
        [call("words", number=9), call("words", number=300), "Not written."],
        ["I know no tool."],
        [call("words", number=50), "word " * 300],
    ]
    ours, theirs = both(
        Case(
            script=lambda prompt, n: scripts[n],
            rows=[{"prompt": user("Count.")}],
            group=4,
            passed={"tools": [words]},
        )
    )
    assert theirs.metrics[0]["completions/clipped_ratio"] == 0.25
    assert ours.metrics[0]["completions/clipped_ratio"] == 0.5
    assert ours.metrics[0]["completions/min_terminated_length"] == pytest.approx(
        theirs.metrics[0]["completions/min_terminated_length"]
    )


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.is_new = True

    def reset(self, start: int, **row: Any) -> str | None:
        assert row["prompt"] == user("Count on.")
        self.value = start
        return f" Begin at {start}." if start else None

    def increase(self, by: int) -> int:
        """Counts on.

        Args:
            by: How far.
        """
        self.value += by
        return self.value

    async def double(self) -> int:
        """Doubles."""
        await asyncio.sleep(0)
        self.value *= 2
        return self.value

    def get_reward(self) -> float:
        return self.value / 10

    @property
    def not_a_tool(self) -> int:
        raise AssertionError("properties are not evaluated")

    def _not_a_tool(self) -> None: ...


@pytest.mark.slow
def test_an_environment_of_each_completion(both: Callable[[Case], tuple[Run, Run]]) -> None:
    """With the texts that `reset` returns, tools beside its own, and rewards besides its own."""
    scripts = [
        [call("increase", by=3), call("double"), "Done."],
        [
            call("reset", start=9),
            call("get_reward"),
            call("not_a_tool"),
            call("_not_a_tool"),
            "No.",
        ],
        [call("increase", by=1) + call("multiply", a=2, b=2) + call("increase", by=1), "Done."],
    ]
    ours, theirs = both(
        Case(
            script=lambda prompt, n: scripts[n],
            rows=[{"prompt": user("Count on."), "start": start} for start in (0, 4)],
            group=3,
            steps=2,
            passed={"tools": [multiply], "environment_factory": Counter},
            noted={"value": lambda environment: environment.value},
        )
    )
    assert [note["value"] for note in ours.notes[0]] == [note["value"] for note in ours.notes[1]]
    for run in (ours, theirs):  # instances are used again
        assert run.environments[0] == run.environments[1]
        assert len(run.environments[0]) == 6
    assert ours.metrics[0]["rewards/Counter/mean"] > 0


class Game:
    """Makes the prompt, and knows the reward."""

    def reset(self, **row: Any) -> str:
        self.guesses: list[int] = []
        return "Guess my number."

    async def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: A number.
        """
        await asyncio.sleep(0)
        self.guesses.append(number)
        return "Right." if number == 7 else "Wrong."

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(7 in self.guesses) / len(self.guesses) if self.guesses else 0.0


@pytest.mark.slow
def test_an_environment_that_owns_all(both: Callable[[Case], tuple[Run, Run]]) -> None:
    """Data and rewards."""
    scripts = [
        [call("guess", number=7), "So it is."],
        [call("guess", number=3), call("guess", number=7), "So it is."],
        ["I do not guess."],
    ]
    ours, _ = both(
        Case(
            script=lambda prompt, n: scripts[n],
            group=3,
            passed={"environment_factory": Game},
            noted=None,
        )
    )
    assert ours.metrics[0]["reward"] == ours.metrics[0]["rewards/Game/mean"] == 0.5


class Echo:
    """Has no reward."""

    def reset(self, text: str, **row: Any) -> str:
        assert "environment" not in row
        return f"Shout {text!r}."

    def shout(self, text: str) -> str:
        """Shouts.

        Args:
            text: What.
        """
        return text.upper()


class Tally(Counter):
    """Another class, whose reward is its own."""

    def reset(self, start: int, **row: Any) -> str:  # type: ignore[override]
        self.value = 2 * start
        return "Count."


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [{"prompt": user("Now. ")}, {}], ids=["prompts", "no prompts"])
def test_several_environments(
    both: Callable[[Case], tuple[Run, Run]], prompt: dict[str, Any]
) -> None:
    """Each row has the environment that it names; two names have the same class."""
    turns = [call("shout", text="a") + call("increase", by=2), "Done."]
    kinds = {"tally": Tally, "again": Tally, "echo": Echo}
    ours, _ = both(
        Case(
            script=lambda prompt, n: turns[n:],
            rows=[{**prompt, "environment": kind, "start": 3, "text": "oh"} for kind in kinds],
            passed={"environment_factory": kinds},
            noted={"kind": lambda environment: type(environment).__name__},
        )
    )
    assert {(note["environment"], note["kind"]) for note in ours.notes[0]} == {
        ("tally", "Tally"), ("again", "Tally"), ("echo", "Echo"),
    }  # fmt: skip
    assert ours.metrics[0]["tools/failure_frequency"] == 0.5


def asks_itself(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Makes completions of two turns, with a question between them."""
    made: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "bonus")
    }

    def ids(text: str) -> list[int]:
        return list(trainer.processing_class(text, add_special_tokens=False)["input_ids"])

    for n, prompt in enumerate(prompts):
        m = n % trainer.num_generations
        turns = ids(f"It is {m}.<|im_end|>"), ids(" Sure? "), ids("Yes" * m + "<|im_end|>")
        made["prompt_ids"].append(ids(prompt[0]["content"] + "\n"))
        made["completion_ids"].append([x for turn in turns for x in turn])
        made["env_mask"].append([x for turn, x in zip(turns, (1, 0, 1), strict=True) for _ in turn])
        made["logprobs"].append([-1.0 * x for x in made["env_mask"][-1]])
        made["bonus"].append(m / 2 + len(prompt[0]["content"]))
    return made


@pytest.mark.slow
def test_completions_of_a_function(both: Callable[[Case], tuple[Run, Run]]) -> None:
    """It gets the prompt of each completion; what else it returns replaces a column of the data."""
    case = Case(
        script=lambda prompt, n: ["Not written."],
        rows=[{"prompt": user("Now."), "bonus": 9}, {"prompt": user("And now."), "bonus": 9}],
        group=3, steps=2, passed={"rollout_func": asks_itself},
    )  # fmt: skip
    ours, _ = both(case)
    assert {note["bonus"] for note in ours.notes[0]} == {4.0, 4.5, 5.0, 8.0, 8.5, 9.0}
    assert ours.metrics[0]["grad_norm"] > 0
    assert any(not all(own.is_learned) for own in ours.completions[0])


class NoReset:
    def shout(self, text: str) -> str:
        """Shouts.

        Args:
            text: What.
        """
        return text


ROW = {"prompt": user("Now."), "start": 3, "text": "oh"}
REFUSED = {
    "no method reset": {"rows": [ROW], "passed": {"environment_factory": NoReset}},
    "an unknown environment": {
        "rows": [{**ROW, "environment": "other"}],
        "passed": {"environment_factory": {"echo": Echo}},
    },
    "several environments without data": {"passed": {"environment_factory": {"echo": Echo}}},
    "an environment without data or rewards": {
        "passed": {"environment_factory": type("Asks", (), {"reset": lambda self: "Now."})},
        "noted": None,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_both_refuse(
    tmp_path: Path, small_model: Path, template: str, refused: dict[str, Any]
) -> None:
    case = Case(script=lambda prompt, n: ["Not written."], **refused)
    with pytest.raises(UserError):
        run_ours(case, small_model, template, tmp_path / "ours")
    with pytest.raises(ValueError, match="environment"):
        run_trl(case, small_model, template, tmp_path / "trl")


def test_every_test_of_trl_is_named_once() -> None:
    assert not SHOWN.keys() & DIFFERS.keys()
    assert all(name in globals() for name in SHOWN.values())
