"""The command `grpo-eqx eval`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.cli.main import main
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.evaluation import results_file
from grpo_eqx.rewards import gsm8k
from grpo_eqx.run import to_compile

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Evaluate = Callable[..., Outcome]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs `grpo-eqx eval ...`."""

    def call(model: str | Path, **flags: Any) -> Outcome:
        arguments = [
            word
            for name, value in {"model": model, **flags}.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "eval", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = 0 if end.value.code is None else end.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return call


def metrics(path: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(path.read_text())["metrics"]
    return found


def problems(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_of_held_out_problems_it_gives_the_trainers_number(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    done = evaluate("tiny_qwen2", eval_problems=80, num_samples=3, output=output)
    assert done.code == 0
    trainer = GRPOTrainer(GRPOConfig(eval_problems=80))
    greedy, sampled = trainer.evaluate(), trainer.evaluate(temperature=1.0, num_samples=3)
    assert metrics(output) == {**greedy.metrics(), **sampled.metrics()}
    assert 0.7 < greedy.accuracy < 0.9
    rows = problems(output)
    assert [row["solved"] for row in rows] == [*greedy.solved.tolist(), *sampled.solved.tolist()]
    texts = trainer.generate([row["prompt"] for row in rows[:80]])
    assert [row["completions"] for row in rows[:80]] == [[text] for text in texts]
    for name in ("pass@1", "pass@3", "maj@3", "strict/pass@1"):
        assert f" {name} " in done.out
    assert f"{greedy.accuracy:.1%}".replace("%", " %") in done.out


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_compile, "_MOST_COMPLETIONS", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_what_is_cut_off_anywhere_is_continued_to_the_same_bytes(
    evaluate: Evaluate, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data": PROBLEMS, "eval_problems": 36, "num_samples": 2, "max_completion_length": 4}
    whole = tmp_path / "whole.json"
    assert evaluate(small_model, **flags, output=whole).code == 0
    lines = whole.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * 36
    added, add = list[int](), results_file.ResultsFile.add

    def counted(self: results_file.ResultsFile, batch: Any) -> None:
        added.append(batch.first)
        add(self, batch)

    monkeypatch.setattr(results_file.ResultsFile, "add", counted)
    # In the middle of a line of the first batch; after the second; in the sampled ones; at the end.
    for number, (length, expected) in enumerate(
        [
            (len(lines[0]) // 2, [0, 16, 32, *range(0, 36, 8)]),
            (len(b"".join(lines[:35])), [32, *range(0, 36, 8)]),
            (len(b"".join(lines[:36] + lines[36:47])), [8, 16, 24, 32]),
            (len(b"".join(lines)), []),
        ]
    ):
        part = tmp_path / f"part-{number}.json"
        begun = json.loads(whole.read_text()) | {"metrics": None}
        part.write_text(json.dumps(begun))
        part.with_suffix(".jsonl").write_bytes(b"".join(lines)[:length])
        assert evaluate(small_model, **flags, output=part).code == 0
        assert added == expected
        assert part.read_bytes() == whole.read_bytes()
        assert part.with_suffix(".jsonl").read_bytes() == b"".join(lines)
        added.clear()


def test_results_of_other_settings_are_not_continued(
    evaluate: Evaluate, small_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    flags = {"data": PROBLEMS, "eval_problems": 8, "max_completion_length": 4, "output": output}
    assert evaluate(small_model, **flags).code == 0
    before = output.read_bytes(), output.with_suffix(".jsonl").read_bytes()
    refused = evaluate(small_model, **{**flags, "eval_problems": 9, "seed": 1})
    assert refused.code == 2
    assert "which has results of other settings (" in refused.err
    assert "num_problems: 8 -> 9; seed: 0 -> 1" in refused.err
    assert (output.read_bytes(), output.with_suffix(".jsonl").read_bytes()) == before


def test_gsm8k_is_scored_flexibly_and_strictly(evaluate: Evaluate, tmp_path: Path) -> None:
    """By the reward functions, on problems in its format."""
    source = WordProblems("heldout")
    rows = [
        {
            "question": prompt.text,
            "answer": f"That is <<{prompt.columns['answer']}>>.\n#### {prompt.columns['answer']}",
        }
        for prompt in (source[i] for i in range(32))
    ]
    data, output = tmp_path / "data.jsonl", tmp_path / "results.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Short, so that some completions give a number without having marked it.
    done = evaluate("tiny_qwen2", data=data, output=output, max_completion_length=18)
    assert done.code == 0
    found = problems(output)
    for name, func in {"solved": gsm8k.correct, "strict": gsm8k.correct_strict}.items():
        texts, answers = [row["completions"][0] for row in found], [x["answer"] for x in rows]
        assert [row[name] for row in found] == [[x == 1] for x in func([], texts, answer=answers)]
    flexible, strict = (
        metrics(output)[f"eval/greedy/{name}"] for name in ("pass@1", "strict/pass@1")
    )
    assert strict < flexible


LEARNS = {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_rank": 4, "learning_rate": 3e-2, "eval_temperature": 0.8},
        pytest.param(
            {"lora_rank": 4, "learning_rate": 3e-2, "load_in_8bit": True}, marks=pytest.mark.long
        ),
    ],
    ids=["all parameters", "adapters", "adapters on int8"],
)
def test_of_a_run_it_gives_the_number_that_training_gave(
    evaluate: Evaluate, tmp_path: Path, settings: dict[str, Any]
) -> None:
    cfg = GRPOConfig(
        **{
            "steps": 2, "prompts_per_step": 8, "num_generations": 2, "eval_steps": 1,
            "num_generations_eval": 2, "eval_problems": 24, "max_completion_length": 40,
            "save_steps": 1, "seed": 3, "output_dir": tmp_path / "run", **LEARNS, **settings,
        }
    )  # fmt: skip
    result = GRPOTrainer(cfg).fit()
    own = {
        int(row["step"]): {name: x for name, x in row.items() if name.startswith("eval/")}
        for row in result.evaluations
    }
    assert own[1] != own[2]
    flags = {"num_samples": 2, "temperature": settings.get("eval_temperature", 1.0)}
    run = tmp_path / "run"
    for step, model in {2: run, 1: run / "checkpoints" / "step_1"}.items():
        output = tmp_path / f"{step}.json"
        assert evaluate(model, output=output, **flags).code == 0
        assert metrics(output) == own[step]
    missing = evaluate(run / "checkpoints" / "step_7", output=tmp_path / "none.json")
    assert missing.code == 2
    assert "has no step_7, but step_2, step_1: use one of these." in " ".join(missing.err.split())
    if "load_in_8bit" not in settings:  # which a folder does not say
        output = tmp_path / "folder.json"
        more = {"eval_problems": 24, "max_completion_length": 40, "seed": 3}
        assert evaluate(run / "model", output=output, **flags, **more).code == 0
        assert metrics(output) == own[2]


def test_without_an_output_the_file_is_named_after_the_flags(
    evaluate: Evaluate, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"data": PROBLEMS, "eval_problems": 8, "max_completion_length": 4}
    for _ in range(2):
        assert evaluate(small_model, **flags).code == 0
    assert evaluate(small_model, **flags, seed=1).code == 0
    names = sorted(path.name for path in (tmp_path / "evals").glob("*.json"))
    assert len(names) == 2
    assert all(name.startswith(f"{small_model.name}-problems-") for name in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temperature": 0.5}, "temperature is 0.5 without num_samples"),
        ({"temperature": 0.0, "num_samples": 2}, "temperature is 0: it must be above 0"),
        ({"num_samples": 0}, "num_samples is 0: use a whole number that is at least 1"),
        ({"num_samples": 10**20}, "and at most 1,000,000"),
        ({"eval_problems": 0}, "eval_problems is 0: it must be at least 1"),
        ({"eval_problems": 10**12}, "eval_problems is 1000000000000: it must be at most"),
        ({"data": ""}, "data is empty: give a name or path"),
        ({"chat_template": ""}, "chat_template is empty: give a name or path"),
        ({"output": "results.txt"}, "give a file whose name ends in .json"),
        ({"eval_func": "nice"}, "no reward function named 'nice'"),
        ({"data": "no.jsonl"}, "data 'no.jsonl' is neither a file"),
        ({"model": "no/where/folder"}, "model 'no/where/folder'"),
        ({"model": "/tmp/no-run"}, "No run is in '/tmp/no-run' either: of a run, give the output"),
        ({"max_completion_length": 0}, "max_completion_length is 0: it must be at least 1"),
    ],
)
def test_what_cannot_work_is_one_line(
    evaluate: Evaluate, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    done = evaluate(**{"model": "tiny_qwen2", "output": tmp_path / "results.json", **flags})
    assert done.code == 2
    assert message in done.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
