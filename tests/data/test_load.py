"""Data from names and files, and one clear sentence for what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx.data.load import load_data
from grpo_eqx.errors import UserError

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
        ([row(1), "{oops"], r"p\.jsonl, line 2: not valid JSON"),
        ([row(1), "", "[1]"], r"line 3: expected a JSON object, got list"),
        ([row(1), '{"question": "x"}'], r"line 2: the field 'answer' is missing"),
        (
            ['{"question": 3, "answer": "4"}'],
            r"line 1: the field 'question' must be non-empty text",
        ),
        ([row(1), "", row(2, level=3)], r"line 3: the columns are .*level"),
        ([row(1), "[" * 100_000], r"line 2: not valid JSON"),
        ([r'{"question": "\ud800", "answer": "1"}'], r"line 1: .* an unpaired surrogate"),
        ([], r"is empty"),
        (["", " "], r"is empty"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_data(write(tmp_path / "p.jsonl", *lines), None, 1)


def test_binary_and_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\n\xff\xfe\x00")
    for name in ("binary.jsonl", "missing.jsonl", "."):
        with pytest.raises(UserError, match=r"line 2: not valid JSON|is neither a file"):
            load_data(str(tmp_path / name), None, 1)


def test_a_hub_name_that_cannot_be_loaded_says_so(add_to_hub: Callable[..., None]) -> None:
    with pytest.raises(UserError, match=r"'openai/gsm8k' is not a local file.*LocalEntryNotFound"):
        load_data("openai/gsm8k", None, 1)


def gsm8k_like(folder: Path, first: int) -> Path:
    """A data set as on the hub: two configs, each with two splits."""
    for config in ("socratic", "main"):
        for split, count in (("train", 4), ("test", 1)):
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, *(row(first + i) for i in range(count)))
    configs = [
        f"- config_name: {config}\n  data_files:\n"
        f"  - split: train\n    path: {config}/train.jsonl\n"
        f"  - split: test\n    path: {config}/test.jsonl\n"
        for config in ("socratic", "main")
    ]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    return folder


def test_a_hub_data_set_is_read_by_its_splits_at_its_revision(
    add_to_hub: Callable[..., None], tmp_path: Path
) -> None:
    old, new = "0" * 40, "1" * 40
    add_to_hub("dataset", "openai/gsm8k", gsm8k_like(tmp_path / "old", 10), old, "v1")
    add_to_hub("dataset", "openai/gsm8k", gsm8k_like(tmp_path / "new", 20), new, "main")
    for name, first in (
        ("openai/gsm8k", 20),
        ("openai/gsm8k@main", 20),
        ("openai/gsm8k@v1", 10),
        (f"openai/gsm8k@{old}", 10),
    ):
        train, heldout = load_data(name, None, 512)
        assert (len(train), heldout[0].text) == (4, f"{first}+{first}?")
    with pytest.raises(UserError, match=r"'openai/gsm8k@v2' is not a local file and could not be"):
        load_data("openai/gsm8k@v2", None, 512)


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
