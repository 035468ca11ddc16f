"""Data from names and files, and one clear sentence for what is wrong with them."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.jsonl import read_jsonl
from grpo_eqx.data.load import load_data

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def row(i: int, **more: object) -> str:
    return json.dumps({"question": f"{i}+{i}?", "answer": f"#### {2 * i}", **more})


def test_a_file_sets_its_last_problems_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *[row(i) for i in range(50)])
    train, heldout = load_data(path, None, num_eval=512)
    assert (len(train), len(heldout)) == (45, 5)
    assert train[0].text == "0+0?"
    assert heldout[0].text == "45+45?"
    assert dict(heldout[4].columns) == {"answer": "#### 98"}
    assert len(load_data(path, None, num_eval=2)[1]) == 2


def test_held_out_problems_can_have_a_file_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *[row(i) for i in range(5)])
    train, heldout = load_data(path, "word_problems", num_eval=512)
    assert len(train) == 5
    assert "heldout" in heldout.name


def test_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", row(1), "", row(2), "  ")
    assert len(load_data(path, "word_problems", 1)[0]) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([row(1), "{oops"], r"p\.jsonl, line 2 is not valid JSON .* write one object on each line"),
        ([row(1), row(2)[:-3]], r"line 2 is not valid JSON .* as it ends too early"),
        ([row(1), "", "[1]"], r"line 3 is of type list: give an object"),
        (['{"query": "x", "label": 3}'], r"line 1 has no column question or prompt, only label, q"),
        (["{}"], r"line 1 has no column question or prompt, none at all"),
        (['{"question": 3, "answer": "4"}'], r"line 1: question is 3: it must be non-empty text"),
        (['{"prompt": " "}'], r"line 1: prompt is ' ': it must be non-empty text"),
        (['{"prompt": []}'], r"line 1: prompt is \[\]: it must be non-empty text"),
        (['{"prompt": ["x"]}'], r"line 1: prompt has the message 'x': give messages as objects"),
        (['{"prompt": [{"role": "user", "content": [1]}]}'], r"role and content, both text"),
        (
            ['{"prompt": [{"role": "assistant", "content": "hi"}]}'],
            r"line 1: the conversation in prompt ends with the assistant's message",
        ),
        ([row(1), "", row(2, level=3)], r"line 3 has the columns answer, level, question, but the"),
        ([row(1), "[" * 100_000], r"line 2 is nested too deeply"),
        (
            [r'{"question": "\ud800", "answer": "1"}'],
            r"line 1 has .* character 1 of a text, half of a",
        ),
        (["[" + row(1) + "]"], r"is a JSON list: write one object per line, as jq"),
        ([], r"is empty"),
        (["", " "], r"is empty"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_data(write(tmp_path / "p.jsonl", *lines), None, 1)


def test_a_null_character_is_a_character_of_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "a\0b", "answer": "1"}) + "\n")
    assert read_jsonl(path, "data")[0].content == "a\0b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.jsonl", b"\n\xff\xfe\x00", "line 2 is encoded in UTF-16: save"),
        ("latin1.jsonl", '{"question": "é"}'.encode("latin-1"), "perhaps in Latin-1"),
        ("utf16.jsonl", row(1).encode("utf-16"), "is encoded in UTF-16: save it in UTF-8"),
        ("table.csv", b"question,answer", r"load_dataset\('csv'"),
        ("missing.jsonl", None, "is neither a file"),
        (".", None, "is a folder: give a JSONL file"),
    ],
)
def test_other_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_data(str(tmp_path / name), None, 1)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(row, range(3))), encoding="utf-8-sig")
    assert load_data(path, None, 1)[0][0].text == "0+0?"


ROWS = [{"question": f"{i}?", "answer": i} for i in range(20)]
CONVERSATION = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1, 2"}]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        iter(ROWS),
    ],
    ids=lambda data: type(data).__name__,
)
def test_rows_can_be_passed_in_any_container(data: Iterable[dict[str, Any]]) -> None:
    train, heldout = load_data(data, None, num_eval=512)
    assert [(p.text, p.columns["answer"]) for p in train] == [(f"{i}?", i) for i in range(18)]
    assert [p.text for p in heldout] == ["18?", "19?"]
    assert heldout.name == "the last 2 of train_data"


def test_a_prompt_is_as_in_trl() -> None:
    """A conversation goes through the chat template, a text does not; other columns are kept."""
    (plain,) = load_data([{"prompt": "1, 2", "question": "which?"}], [ROWS[0]], 1)[0]
    assert (plain.content, plain.plain, plain.columns) == ("1, 2", True, {"question": "which?"})
    (chat,) = load_data([{"prompt": CONVERSATION, "solution": "3"}], [ROWS[0]], 1)[0]
    assert (chat.content, chat.plain, chat.columns) == (CONVERSATION, False, {"solution": "3"})
    assert chat.text == "system: Count.\nuser: 1, 2"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "is a DatasetDict of train"),
        ({"question": ["x"]}, "is a dict of question: pass datasets.Dataset.from_dict"),
        ([], "train_data has no problems"),
        (["1 + 1?"], "train_data, problem 1 is of type str: give an object"),
        ([{"text": "x"}], "problem 1 has no column question or prompt, only text"),
        ([ROWS[0], {"question": "x"}], "problem 2 has the columns question, but the first"),
        (ROWS[:1], "train_data has a single problem, which would be held out"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_holds_no_problems_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_data(data, None, 1)


def test_only_hub_names_have_revisions(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *map(row, range(4)))
    for name in (f"{path}@main", "word_problems@main"):
        with pytest.raises(UserError, match=r"only names on the Hugging Face hub have revisions"):
            load_data(name, None, 1)
    with pytest.raises(UserError, match="give a branch, tag or commit after the @"):
        load_data("openai/gsm8k@", None, 1)
    at = write(tmp_path / "p@main.jsonl", *map(row, range(4)))
    assert len(load_data(str(at), "word_problems", 1)[0]) == 4


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not beside this checkout")
def test_the_real_gsm8k() -> None:
    train, heldout = load_data(str(GSM8K), None, num_eval=512)
    assert len(train) + len(heldout) == 7473
    assert len(heldout) == 512


def test_a_file_can_be_named_by_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", row(1))
    assert read_jsonl(path)[0].text == "1+1?"


def test_problems_can_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(20))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(pipe.write_text, text)
        train, heldout = load_data(str(pipe), None, 8)
        writing.result()
    assert (len(train), len(heldout)) == (18, 2)


def test_a_data_set_in_another_format_is_read_as_plain_numbers() -> None:
    rows = [{"question": f"{i}?", "answer": i} for i in range(20)]
    data = datasets.Dataset.from_list(rows).with_format("numpy")
    train, _ = load_data(data, None, 2)
    assert [type(train[i].columns["answer"]) for i in range(2)] == [int, int]
