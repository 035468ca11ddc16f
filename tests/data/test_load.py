"""Data from names and files, and one clear sentence for what is wrong with them."""

import json
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


def test_an_unreachable_hub_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    with pytest.raises(UserError, match=r"'openai/gsm8k' is not a local file.*no route"):
        load_data("openai/gsm8k", None, 1)


def test_a_hub_data_set_is_read_by_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {"train": [json.loads(row(i)) for i in range(4)], "test": [json.loads(row(9))]}
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main", "socratic"])
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split: datasets.Dataset.from_list(rows[split]),
    )
    train, heldout = load_data("openai/gsm8k", None, 512)
    assert (len(train), heldout[0].text) == (4, "9+9?")


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not beside this checkout")
def test_the_real_gsm8k() -> None:
    train, heldout = load_data(str(GSM8K), None, num_eval=512)
    assert len(train) + len(heldout) == 7473
    assert len(heldout) == 512
