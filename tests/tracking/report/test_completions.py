"""The completions that a report shows."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_eqx.tracking.report.completions import Examples, choose_examples, shortened

Row = tuple[str, str, float | None, float]


def choose(tmp_path: Path, **tables: Sequence[Row]) -> tuple[Examples, list[str]]:
    """Chooses from tables of (prompt, completion, reward, advantage), by step."""
    paths, gaps = {}, list[str]()
    for name, rows in tables.items():
        columns = list(zip(*rows, strict=True))
        names = ("prompt", "completion", "reward", "advantage")
        paths[int(name[1:])] = path = tmp_path / f"{name}.parquet"
        table = {name: list(column) for name, column in zip(names, columns, strict=True)}
        pq.write_table(pa.table(table), path)
    return choose_examples(paths, gaps), gaps


def test_best_and_worst_are_of_the_last_table_and_of_different_prompts(tmp_path: Path) -> None:
    last = [
        ("a", "easy", 1.0, 0.1), ("a", "easy too", 1.0, 0.1), ("b", "hard", 1.0, 2.0),
        ("b", "wrong", 0.0, -0.3), ("c", "hopeless", 0.0, 0.0), ("d", "not scored", None, 0.0),
    ]  # fmt: skip
    chosen, _ = choose(tmp_path, s1=[("x", "early", 9.0, 9.0)], s5=last)
    assert chosen.step == 5
    # of equal rewards, first those that few others of their groups earned
    assert [x.completion for x in chosen.best][:2] == ["hard", "easy"]
    assert chosen.worst[0].completion == "wrong"
    assert not {x.completion for x in chosen.best} & {x.completion for x in chosen.worst}


def test_chosen_completions_have_their_calls_and_what_functions_logged(tmp_path: Path) -> None:
    table = {
        "prompt": ["a", "a"], "completion": ["right", "wrong"], "reward": [1.0, 0.0],
        "advantage": [1.0, -1.0], "rewards/correct": [1.0, 0.0],
        "tools/turns": [1, 3], "tools/calls": [1, 3], "tools/failures": [1, 0],
        "verdict": ["good", None], "score": [0.5, 0.25], "tokens": [["right"], ["wrong"]],
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    chosen = choose_examples({1: tmp_path / "table.parquet"}, [])
    (best,), (worst,) = chosen.best, chosen.worst
    assert (best.calls, best.logged) == ("1 call (1 failed)", {"verdict": "good", "score": "0.5"})
    assert (worst.calls, worst.logged) == ("3 calls", {"score": "0.25"})


def test_prompts_that_come_again_are_compared_by_their_mean_reward(tmp_path: Path) -> None:
    early = [("a", "a1", 0.0, 0.0), ("a", "a2", 1.0, 0.0), ("b", "b1", 0.0, 0.0)]
    late = [("a", "a3", 1.0, 0.0), ("a", "a4", 1.0, 0.0), ("b", "b2", 1.0, 0.0)]
    chosen, _ = choose(tmp_path, s1=early, s2=[("z", "z1", 0.0, 0.0)], s3=late)
    first, second = chosen.changes
    assert (first.before.completion, first.after.completion) == ("b1", "b2")
    assert (first.mean_before, first.mean_after) == (0.0, 1.0)
    assert (second.mean_before, second.mean_after) == (0.5, 1.0)
    assert first.same_prompt


def test_where_no_prompt_comes_again_typical_completions_are_compared(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path, s1=[("a", "a1", 0.0, 0.0)], s2=[("b", "b1", 1.0, 0.0)])
    (change,) = chosen.changes
    assert not change.same_prompt
    assert (change.before.step, change.after.step) == (1, 2)


def test_texts_that_cannot_be_read_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pq.ParquetFile.read

    def fail(file: pq.ParquetFile, columns: Sequence[str]) -> pa.Table:
        if columns == ["completion"]:
            raise pa.ArrowInvalid("a page is damaged")
        return whole(file, columns)

    monkeypatch.setattr(pq.ParquetFile, "read", fail)
    chosen, gaps = choose(tmp_path, s1=[("a", "a1", 1.0, 0.0), ("b", "b1", 0.0, 0.0)])
    assert [x.completion for x in chosen.best] == ["", ""]
    assert gaps == ["s1.parquet cannot be read (a page is damaged): its completions are not shown."]


def test_a_table_that_cannot_be_read_is_named_and_the_others_count(tmp_path: Path) -> None:
    chosen, _ = choose(tmp_path, s1=[("a", "a1", 0.0, 0.0)])
    broken = tmp_path / "step_000009.parquet"
    broken.write_bytes(b"PAR1")
    gaps = list[str]()
    chosen = choose_examples({1: tmp_path / "s1.parquet", 9: broken}, gaps)
    assert chosen.step == 1
    assert len(gaps) == 1
    assert gaps[0].startswith("step_000009.parquet cannot be read (Parquet file size is 4 bytes")


def test_long_texts_keep_their_start_and_their_end() -> None:
    text = "start" + "x" * 5000 + "#### 42"
    assert shortened(text).startswith("startxxx")
    assert shortened(text).endswith("#### 42")
    assert " more... " in shortened(text)
    assert len(shortened(text)) <= 1500
