"""The command `grpo-eqx inspect`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_eqx.cli.main import main
from grpo_eqx.tracking.completions_table import prompt_id, write_completions
from grpo_eqx.tracking.recorded_completions import RecordedCompletions, Wanted
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.run_folder import RunFolder

STEPS = 1, 2, 4
PROMPTS = "How many pens?", "How many cakes?"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Inspect = Callable[..., Outcome]


@pytest.fixture
def inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path
) -> Inspect:
    """Runs `grpo-eqx inspect RUN ...` as in a pipe of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "inspect", str(run), *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call


def columns(step: int) -> dict[str, list[Any]]:
    """Returns two completions of each prompt, whose rewards grow with the step."""
    texts = [f"step {step}, row {row}: [b]{row}" for row in range(4)]
    prompts = [PROMPTS[row // 2] for row in range(4)]
    rewards = [step / 4, 0.0, float("nan"), 0.25]
    return {
        "step": [step] * 4,
        "prompt_id": list(map(prompt_id, prompts)),
        "prompt": prompts,
        "completion": texts,
        "rewards/correct": rewards,
        "reward": rewards,
        "advantage": [0.5, -0.5, 0.0, 0.0],
        "length": [2] * 4,
        "truncated": [False, False, True, False],
        "tokens": [["row", f" {row}"] for row in range(4)],
        "token_logps": [np.log(np.float32([0.95, 0.05]))] * 4,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the tables of three steps."""
    folder = RunFolder(tmp_path / "run")
    folder.start({"log_completions_steps": 1}, {}, {})
    for step in STEPS:
        write_completions(folder.completions_of(step), columns(step))
    return folder.path


def shown(outcome: Outcome) -> list[str]:
    """Texts of the completions in an output, in order."""
    assert outcome.code == 0, outcome.err
    return [line.strip() for line in outcome.out.splitlines() if ", row " in line]


def test_without_flags_it_shows_an_even_spread_over_the_steps(inspect: Inspect) -> None:
    outcome = inspect("--limit", "3")
    assert [text[:6] for text in shown(outcome)] == ["step 1", "step 2", "step 4"]
    assert outcome.out.splitlines()[-1] == (
        "3 of 12 completions that match, spread evenly over steps 1 to 4; --limit 0 shows all"
    )
    assert outcome.out.splitlines()[:3] == [
        f"step 1  prompt {prompt_id(PROMPTS[0])}  reward 0.25  advantage +0.50  2 tokens",
        "  How many pens?",
        "    step 1, row 0: [b]0",
    ]


def test_the_best_are_counted_among_those_with_a_reward(inspect: Inspect) -> None:
    last = inspect("--best", "9", "--steps", "4").out.splitlines()[-1]
    assert last == "3 completions; 1 without a reward"


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--best", "2"], ["step 4, row 0", "step 2, row 0"]),
        (["--worst", "2"], ["step 4, row 1", "step 2, row 1"]),
        (["--best", "1", "--steps", ":2"], ["step 2, row 0"]),
        (["--best", "2", "--max-reward", "0.25"], ["step 4, row 3", "step 2, row 3"]),
        (["--prompt", "cakes", "--best", "1"], ["step 4, row 3"]),
        (["--min-reward", "0.5"], ["step 2, row 0", "step 4, row 0"]),
        (["--truncated", "--steps", "2:"], ["step 2, row 2", "step 4, row 2"]),
        (["--text", r"\[b\]3", "--steps", "2"], ["step 2, row 3"]),
        (["--limit", "0", "--steps", "1:1"], [f"step 1, row {row}" for row in range(4)]),
    ],
)
def test_conditions_add_up(inspect: Inspect, flags: list[str], texts: list[str]) -> None:
    assert [text.partition(":")[0] for text in shown(inspect(*flags))] == texts


@pytest.mark.parametrize("prompt", ["pens", prompt_id(PROMPTS[0])[:5]])
def test_one_prompt_is_side_by_side_over_steps(inspect: Inspect, prompt: str) -> None:
    outcome = inspect("--prompt", prompt, "--steps", "1:2")
    lines = outcome.out.splitlines()
    assert lines[:3] == [f"prompt {prompt_id(PROMPTS[0])}", PROMPTS[0], ""]
    assert "step 1  mean reward 0.125 of 2" in lines[3]
    assert "step 2  mean reward 0.25 of 2" in lines[3]
    assert lines[5].startswith("0.25  step 1, row 0: [b]0")
    assert lines[5].endswith("0.5  step 2, row 0: [b]0")


def test_log_probs_are_digits_below_tokens_in_a_pipe(inspect: Inspect) -> None:
    lines = inspect("--best", "1", "--logps").out.splitlines()
    assert lines[-5:-2] == ["    row 0", "    9  0", ""]
    assert (
        lines[-2] == "digits: tenths of a token's probability when it was drawn; none: it was not"
    )


def test_log_probs_are_colors_on_a_terminal(
    inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = inspect("--best", "1", "--logps").out
    assert "row\x1b[30;48;2;255;157;108m 0\x1b[0m" in out
    assert "probability of a token" in out


def test_json_has_a_line_for_each_completion(inspect: Inspect) -> None:
    rows = [json.loads(line) for line in inspect("--json", "--steps", "2").out.splitlines()]
    assert [row["reward"] for row in rows] == [0.5, 0.0, None, 0.25]
    assert {"step", "prompt_id", "prompt", "completion", "rewards/correct"} <= rows[0].keys()
    assert "tokens" not in rows[0]
    (best,) = map(json.loads, inspect("--json", "--logps", "--best", "1").out.splitlines())
    assert best["tokens"] == ["row", " 0"]
    assert np.exp(best["token_logps"]) == pytest.approx([0.95, 0.05], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--min-reward", "2"],
            "no completion matches in steps 1 to 4: of 12 completions, 3 are truncated, and "
            "rewards are from 0 to 1",
        ),
        (
            ["--text", "absent", "--steps", "2"],
            "no completion matches in step 2: of 4 completions, 0 have the text",
        ),
        (["--min-reward", "1", "--max-reward", "0.5"], "--min-reward 1 is above --max-reward 0.5"),
        (["--prompt", "absent"], "--prompt 'absent' is in no prompt of steps 1 to 4"),
        (["--steps", "7:9"], "the run has those of steps 1 to 4"),
        (["--steps", "9:7"], "use 7:9"),
        (["--steps", "ten"], "use 10:50, 10: (from 10 on), :50 or 50"),
        (["--text", "("], "is not a regular expression (missing ), unterminated subpattern"),
        (["--prompt", "How"], "is in 2 prompts: give more of the text, or an id ("),
        (["--prompt", "How", "--logps"], "is in 2 prompts: give more of the text, or an id ("),
        (["--prompt", "How", "--json"], "is in 2 prompts: give more of the text, or an id ("),
        (["--best", "3", "--limit", "9"], "--best and --limit both say how many: leave out one"),
        (["--best", "1", "--worst", "1"], "ask for one at a time"),
        (["--best", "0"], "--best is 0: give a number of completions"),
        (["--limit", "-1"], "--limit is -1"),
        (["--rewards", "1"], "--rewards is not a flag of grpo-eqx inspect"),
    ],
)
def test_what_cannot_be_shown_is_said(inspect: Inspect, flags: list[str], message: str) -> None:
    outcome = inspect(*flags)
    assert outcome.code == 2
    assert message in outcome.err
    assert not outcome.out


def test_a_folder_without_tables_says_why(inspect: Inspect, run: Path) -> None:
    for path in (run / "completions").iterdir():
        path.unlink()
    assert "the first is written after the first step" in inspect().err
    (run / "config.json").write_text('{"log_completions_steps": 0}')
    assert "it was made with log_completions_steps 0" in inspect().err
    (run / "metrics.jsonl").unlink()
    assert "is not a run folder: it has no metrics.jsonl" in inspect().err


def test_a_damaged_table_is_named_and_the_others_are_shown(inspect: Inspect, run: Path) -> None:
    path = run / "completions" / "step_000002.parquet"
    path.write_bytes(path.read_bytes()[:100])
    for flags in ([], ["--best", "1"], ["--prompt", "pens"], ["--json"], ["--text", "step"]):
        outcome = inspect(*flags)
        assert outcome.code == 0
        assert outcome.err.startswith(f"warning: the table {str(path)!r} cannot be read (")
        assert outcome.err.endswith("): its completions are left out.\n")
        assert outcome.out.count("step 2,") == 0
        assert "step 4," in outcome.out
    assert inspect("--steps", "2").err.endswith("error: no table of step 2 can be read.\n")


@pytest.mark.parametrize(
    "change",
    [
        {"reward": ["high"] * 4}, {"reward": [True] * 4}, {"truncated": [1] * 4},
        {"truncated": [None, True, True, True]}, {"prompt_id": [1] * 4}, {"step": ["x"] * 4},
        {"prompt": [["x"]] * 4}, {"completion": [None] * 4}, {"tokens": ["x"] * 4},
        {"token_logps": [None] * 4}, {"length": [0.5] * 4}, {"advantage": [{"a": 1}] * 4},
    ],
    ids=str,
)  # fmt: skip
def test_so_is_one_with_columns_of_other_types(
    inspect: Inspect, run: Path, change: dict[str, Any]
) -> None:
    path = run / "completions" / "step_000002.parquet"
    pq.write_table(pa.table({**columns(2), **change}), path)
    for flags in (["--logps"], ["--prompt", "pens"], ["--json", "--logps"], ["--text", "step"]):
        outcome = inspect(*flags)
        assert outcome.code == 0
        assert "step_000002.parquet' cannot be read" in outcome.err or not outcome.err
        assert "step 4" in outcome.out or "--json" in flags


def test_so_is_one_of_which_only_the_texts_are_damaged(inspect: Inspect, run: Path) -> None:
    """They are read after the completions to show are chosen."""
    paths = [run / "completions" / f"step_{step:06d}.parquet" for step in STEPS]
    for i, path in enumerate(paths, start=1):
        content, column = (
            bytearray(path.read_bytes()),
            pq.read_metadata(path).row_group(0).column(3),
        )
        content[column.data_page_offset + 5] ^= 4
        path.write_bytes(content)
        outcome = inspect()
        assert outcome.err.count("the column completion is not as it was written") == i
        assert outcome.code == (0 if i < len(paths) else 2)
    assert outcome.err.endswith("error: no table of these completions can be read.\n")


def test_a_table_of_an_earlier_version_is_said_to_be(inspect: Inspect, run: Path) -> None:
    for name in ("prompt_id", "advantage"):  # read to find completions, and to show them
        table = columns(4)
        del table[name]
        write_completions(run / "completions" / "step_000004.parquet", table)
        outcome = inspect()
        assert outcome.code == 0
        assert f"has no column '{name}': an earlier version of grpo_eqx wrote it" in outcome.err


def test_each_table_is_read_once_and_without_tokens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedCompletions(RecordedRun.read(run), print)
    found = recorded.find(Wanted())
    read, whole = list[list[str]](), pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile, "read", lambda file, names: read.append(names) or whole(file, names)
    )
    mixed = sorted(found, key=lambda match: match.row)
    rows = list(recorded.rows(mixed, with_tokens=False))
    assert [row["completion"][:13] for row in rows] == [
        f"step {match.step}, row {match.row}" for match in mixed
    ]
    assert len(read) == len(STEPS)
    assert not {name for names in read for name in names} & {"tokens", "token_logps"}


def test_a_table_without_log_probs_is_answered(inspect: Inspect, run: Path) -> None:
    table = {name: x for name, x in columns(4).items() if not name.startswith("token")}
    write_completions(run / "completions" / "step_000004.parquet", table)
    assert "has no log-probs of tokens: leave out --logps" in inspect("--best", "1", "--logps").err


def test_it_imports_neither_jax_nor_transformers(run: Path) -> None:
    code = f"""
import sys
from grpo_eqx.cli.main import run
assert run(["inspect", {str(run)!r}, "--logps"]) == 0
print(*({{"jax", "transformers", "matplotlib", "datasets"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
