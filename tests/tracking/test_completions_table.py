"""The table of a step's completions."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.rewards import Rewards
from grpo_eqx.rewards.logged import Logged
from grpo_eqx.tracking.completions_table import (
    completion_columns,
    prompt_id,
    token_columns,
    write_completions,
)

LOGPS = [-1.5, -0.1, -3.0]


@pytest.fixture
def tokenizer(small_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(small_model, None)


@pytest.fixture
def group(tokenizer: ChatTokenizer) -> Group:
    """Two completions of one prompt, of one token and of two, of which the last is special."""
    (letter,) = tokenizer.tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = [letter], [letter, tokenizer.eos_ids[0]]
    logps = LOGPS[:1], LOGPS[1:]
    return [
        Trajectory([letter], Address(0, 0, sample)).completed(
            np.array(own), np.array(rows, np.float32), finish_reason="stop" if sample else "length"
        )
        for sample, (own, rows) in enumerate(zip(ids, logps, strict=True))
    ]  # fmt: skip


@pytest.fixture
def rewards() -> Rewards:
    return Rewards.of(["correct"], np.array([[[1.0, np.nan]]]), [1.0])


def columns(group: Group, rewards: Rewards) -> dict[str, list]:
    advantages = np.array([[0.7, -0.7]])
    return completion_columns(3, [Prompt("1 + 1?", {})], [["a", "a"]], [group], rewards, advantages)


def test_calls_are_counted_and_tokens_of_others_have_no_log_prob(
    group: Group, rewards: Rewards, tokenizer: ChatTokenizer
) -> None:
    counts = [ToolCounts(turns=2, calls=3, failures=1), ToolCounts(lost=1)]
    acted = Acted(["1 + 1?"] * 2, [[]] * 2, [None] * 2, counts)
    advantages = np.array([[0.7, -0.7]])
    prompts = [Prompt("1 + 1?", {})]
    table = completion_columns(3, prompts, [["a", "a"]], [group], rewards, advantages, acted)
    assert (table["tools/turns"], table["tools/calls"]) == ([2, 0], [3, 0])
    assert (table["tools/failures"], table["tools/lost"]) == ([1, 0], [False, True])
    answered = group[1].extended(group[0].ids)
    (logps,) = token_columns([[answered]], tokenizer)["token_logps"]
    assert np.isnan(logps).tolist() == [False, False, True]


def test_environments_are_named_where_prompts_name_them(group: Group, rewards: Rewards) -> None:
    acted = Acted(["1 + 1?"] * 2, [[]] * 2, [None] * 2, [ToolCounts()] * 2)
    for columns, names in (({"environment": "shelf"}, ["shelf"] * 2), ({}, None)):
        prompts, advantages = [Prompt("1 + 1?", columns)], np.array([[0.7, -0.7]])
        table = completion_columns(3, prompts, [["a", "a"]], [group], rewards, advantages, acted)
        assert table.get("environment") == names


def test_columns_have_an_entry_for_each_completion(group: Group, rewards: Rewards) -> None:
    table = columns(group, rewards)
    assert table["step"] == [3, 3]
    assert table["prompt"] == ["1 + 1?"] * 2
    assert table["prompt_id"] == [prompt_id("1 + 1?")] * 2
    assert table["completion"] == ["a", "a"]
    assert table["rewards/correct"][0] == table["reward"][0] == 1.0
    assert np.isnan(table["rewards/correct"][1])
    assert table["advantage"] == [0.7, -0.7]
    assert table["length"] == [1, 2]
    assert table["truncated"] == [True, False]
    assert all(type(x) is not np.ndarray for x in table.values())


def test_tokens_have_their_texts_and_log_probs(group: Group, tokenizer: ChatTokenizer) -> None:
    table = token_columns([group], tokenizer)
    end = tokenizer.tokenizer.convert_ids_to_tokens(tokenizer.eos_ids[0])
    assert table["tokens"] == [["a"], ["a", end]]
    assert [len(row) for row in table["token_logps"]] == [1, 2]
    read = np.concatenate(table["token_logps"])
    np.testing.assert_allclose(read, LOGPS, rtol=2**-11)  # half a unit in float16's last place


def test_logged_columns_come_last_and_are_read_as_they_were_written(
    group: Group, rewards: Rewards, tmp_path: Path
) -> None:
    values = {"mixed": [1, "x"], "none": [None, None], "count": [3, None], "score": [1, 0.5]}
    table = columns(group, dataclasses.replace(rewards, logged=Logged(2, {}, values)))
    assert [*table][-4:] == ["count", "mixed", "none", "score"]
    write_completions(tmp_path / "table", table)
    read = pq.read_table(tmp_path / "table").to_pydict()
    assert {name: read[name] for name in values} == {**values, "mixed": ["1", "x"]}


def test_the_id_of_a_prompt_is_the_same_in_every_run() -> None:
    assert prompt_id("1 + 1?") == "c97c3a9c9b99"
    assert prompt_id("1 + 2?") != prompt_id("1 + 1?")
    assert len(prompt_id("\ud800")) == 12  # half of a pair, as tokenizers may decode


@pytest.mark.parametrize("name", ["exp:1", "file:1", "é"])
def test_a_table_is_read_as_it_was_written_in_a_folder_of_any_name(
    name: str,
    group: Group,
    tokenizer: ChatTokenizer,
    rewards: Rewards,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    path = Path(name) / "step_000003.parquet"
    table = {**columns(group, rewards), **token_columns([group], tokenizer)}
    write_completions(path, table)
    with path.open("rb") as file:
        rows = pq.read_table(file).to_pydict()
    assert list(rows) == list(table)
    for column, values in table.items():
        for read, written in zip(rows[column], values, strict=True):
            np.testing.assert_equal(np.asarray(read), np.asarray(written), column)
    assert [entry.name for entry in Path(name).iterdir()] == [path.name]
