"""Data sets on the hub: their configurations, revisions and splits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.hub_data import HubData, repository_of
from grpo_eqx.data.load import is_hub_name, load_data, load_problems
from grpo_eqx.models.hub import HubName

AddToHub = Callable[..., None]
OLD, NEW = "0" * 40, "1" * 40


def data_set(
    folder: Path,
    configs: Sequence[str] = ("socratic", "main"),
    *,
    first: int = 0,
    default: str | None = None,
    splits: Sequence[str] = ("train", "test"),
) -> Path:
    """A data set as on the hub, with problems that name their configuration and split."""
    card = []
    for config in configs:
        card.append(f"- config_name: {config}")
        if config == default:
            card.append("  default: true")
        card.append("  data_files:")
        for split in splits:
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {"question": f"{config} {split} {first + i}?", "answer": f"#### {i}"}
                for i in range(4 if split == "train" else 1)
            ]
            path.write_text("\n".join(map(json.dumps, rows)))
            card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("---\nconfigs:\n" + "\n".join(card) + "\n---\n")
    return folder


def test_a_hub_name_that_cannot_be_loaded_says_so(add_to_hub: AddToHub) -> None:
    with pytest.raises(UserError, match=r"'openai/gsm8k' is not a local file.*LocalEntryNotFound"):
        load_data("openai/gsm8k", None, 1)


def test_it_is_read_by_its_splits_at_its_revision(add_to_hub: AddToHub, tmp_path: Path) -> None:
    add_to_hub("dataset", "openai/gsm8k", data_set(tmp_path / "old", first=10), OLD, "v1")
    add_to_hub("dataset", "openai/gsm8k", data_set(tmp_path / "new", first=20), NEW, "main")
    for name, first in (
        ("openai/gsm8k", 20),
        ("openai/gsm8k@main", 20),
        ("openai/gsm8k@v1", 10),
        (f"openai/gsm8k@{OLD}", 10),
    ):
        train, heldout = load_data(name, None, 512)
        assert (len(train), heldout[0].text) == (4, f"main test {first}?")
    train, heldout = load_data("openai/gsm8k@v1:train[:2]", None, 512)
    assert (len(train), heldout.name) == (2, "openai/gsm8k/main@v1 (test)")
    assert len(load_data("openai/gsm8k:test", "openai/gsm8k:train[1:]", 512)[1]) == 3
    # What may have problems of the split test is not evaluated on that.
    train, heldout = load_data("openai/gsm8k:train+test", None, 512)
    assert (len(train), heldout.name) == (4, "the last 1 of openai/gsm8k/main (train+test)")
    with pytest.raises(UserError, match=r"'openai/gsm8k@v2' is not a local file and could not be"):
        load_data("openai/gsm8k@v2", None, 512)


@pytest.mark.parametrize(
    ("configs", "default", "name", "expected"),
    [
        (("a", "b"), "b", "o/d", "o/d/b"),
        (("main", "b"), "b", "o/d", "o/d/b"),
        (("a", "default", "main"), None, "o/d", "o/d/default"),
        (("only",), None, "o/d", "o/d"),
        (("socratic", "main"), None, "o/d", "o/d/main"),
        (("a", "b"), "b", "o/d/a", "o/d/a"),
        (("v1.0-en_US", "main"), None, "o/d/v1.0-en_US@dev", "o/d/v1.0-en_US@dev"),
        (("two words", "b"), None, "o/d/two words:train", "o/d/two words"),
        (("a", "b"), None, "o/d/b@dev:train[:3]", "o/d/b@dev"),
    ],
)
def test_the_configuration_is_the_one_that_is_named_or_else_the_default(
    add_to_hub: AddToHub,
    tmp_path: Path,
    configs: Sequence[str],
    default: str | None,
    name: str,
    expected: str,
) -> None:
    """Training and held-out problems are of the same, which their names tell."""
    files = data_set(tmp_path / "files", configs, default=default)
    add_to_hub("dataset", "o/d", files, NEW, "main", "dev")
    assert is_hub_name(name)
    train, heldout = load_data(name, None, 512)
    config = HubData.parse("data", expected).config or "only"
    assert train[0].text == f"{config} train 0?"
    assert heldout[0].text == f"{config} test 0?"
    assert train.name.startswith(f"{expected} (train")
    assert heldout.name == f"{expected} (test)"
    assert load_problems(name.partition(":")[0], None)[0].text == f"{config} test 0?"


def test_files_without_a_card_have_one_configuration(add_to_hub: AddToHub, tmp_path: Path) -> None:
    files = data_set(tmp_path / "files")
    (files / "README.md").unlink()
    for path in files.glob("socratic/*"):
        path.unlink()
    add_to_hub("dataset", "o/d", files, NEW, "main")
    train, _ = load_data("o/d", None, 512)
    assert (train.name, train[0].text) == ("o/d (train)", "main train 0?")


MANY = [f"c{i:02}" for i in range(40)]


@pytest.mark.parametrize(
    ("configs", "name", "message"),
    [
        (
            ("a", "b"), "o/d",
            "data 'o/d' has the configurations a and b, none of them the default: name one, as in "
            "o/d/a.",
        ),
        (
            ("a", "b"), "o/d@dev:train[:2]",
            "data 'o/d@dev:train[:2]' has the configurations a and b, none of them the default: "
            "name one, as in o/d/a@dev:train[:2].",
        ),
        (
            ("socratic", "main"), "o/d/socratik",
            "data 'o/d/socratik' has the configurations socratic and main, and no 'socratik' (did "
            "you mean socratic?): name one, as in o/d/socratic.",
        ),
        (MANY, "o/d", "c10, c11 and 28 others, none of them the default: name one, as in o/d/c00."),
        (
            ("a", "b"), "o/d/a:trian",
            "data 'o/d/a:trian' has the splits train and test, and no 'trian' (did you mean "
            "train?): name one, as in o/d/a:train.",
        ),
        (("a", "b"), "o/d/a:train[:2]+dev", "and no 'dev'"),
        (
            ("a", "b"), "o/d/a:train[3:1]",
            "data 'o/d/a:train[3:1]': the part 'train[3:1]' takes no rows of train: train has 4 "
            "and test has 1; give a first and a last row, as in o/d/a:train[:100].",
        ),
        (("a", "b"), "o/d/a:train[:2]+test[9:]", "train[:2]+test[9:]' takes no rows of test: "),
        (("a", "b"), "o/d/a:train[50%:25%]", "takes no rows of train"),
        (("a", "b"), "o/d/a:train[:150%]", "cannot be read (Percent slice boundaries must be"),
        (("a", "b"), "o/d/a:train[-1:-3]", "takes no rows of train"),
        (("a", "b"), "o/d/a:train[2:2]", "rows of train"),
        (("a", "b"), "o/d/a:train[x]", "the part 'train[x]' cannot be read (Unrecognized"),
        (("a", "b"), "o/d/a:train[", "the part 'train[' cannot be read (Unrecognized"),
        (("a", "b"), "o/d/a:all[:1]", "the part 'all[:1]' cannot be read (Unknown split"),
        (("a", "b"), "o/d/a:+", "the part '+' cannot be read"),
        (("a", "b"), "o/d/", "give a configuration after the second /, or leave it out"),
        (("a", "b"), "o/d/@dev", "give a configuration after the second /, or leave it out"),
        (("a", "b"), "o/d/a@", "give a branch, tag or commit after the @"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_with_what_is(
    add_to_hub: AddToHub, tmp_path: Path, configs: Sequence[str], name: str, message: str
) -> None:
    add_to_hub("dataset", "o/d", data_set(tmp_path / "files", configs), NEW, "main", "dev")
    with pytest.raises(UserError) as error:
        load_data(name, None, 512)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("split", "count"),
    [("train[-3:]", 3), ("train[25%:]", 3), ("train[1:90]", 3), ("all", 5), ("test+train[:1]", 2)],
)
def test_parts_of_splits_are_taken(
    add_to_hub: AddToHub, tmp_path: Path, split: str, count: int
) -> None:
    add_to_hub("dataset", "o/d", data_set(tmp_path / "files"), NEW, "main")
    assert len(load_problems(f"o/d:{split}", None)) == count


@pytest.mark.parametrize("spoiled", ["README.md", "main/train.jsonl"])
def test_files_that_cannot_be_read_are_not_blamed_on_the_network(
    add_to_hub: AddToHub, tmp_path: Path, spoiled: str
) -> None:
    files = data_set(tmp_path / "files")
    (files / spoiled).write_text("---\nconfigs: [{[\n---\n")
    add_to_hub("dataset", "o/d", files, NEW, "main")
    with pytest.raises(UserError, match=r"data 'o/d' has files or a card that .* cannot read"):
        load_data("o/d", None, 1)


def test_a_split_that_a_configuration_lacks_is_said(add_to_hub: AddToHub, tmp_path: Path) -> None:
    files = data_set(tmp_path / "files", ("a", "b"), splits=("validation",))
    add_to_hub("dataset", "o/d", files, NEW, "main")
    with pytest.raises(
        UserError, match=r"eval_data 'o/d/a' has the split validation, and no 'test'.*"
    ):
        load_data("o/d/a:validation", "o/d/a", 1)
    with pytest.raises(UserError, match=r"and no 'train': name one, as in o/d/a:validation\."):
        load_data("o/d/a", None, 1)


@pytest.mark.parametrize(
    ("name", "parsed", "repository"),
    [
        ("o/d", HubData(HubName("o/d", None), None, None), "o/d"),
        ("o/d/c", HubData(HubName("o/d", None), "c", None), "o/d"),
        ("o/d@refs/pr/1", HubData(HubName("o/d", "refs/pr/1"), None, None), "o/d@refs/pr/1"),
        ("o/d/c@v1:train[:1]", HubData(HubName("o/d", "v1"), "c", "train[:1]"), "o/d@v1"),
    ],
)
def test_a_name_has_up_to_four_parts(name: str, parsed: HubData, repository: str) -> None:
    assert HubData.parse("data", name) == parsed
    assert str(parsed) == name
    assert repository_of(name) == repository


def test_a_folder_that_is_here_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "data").mkdir(parents=True)
    for name in ("my/data", "my/data/main", "my/data@v1", "a/b/c/d", "./a/b", "x/y/z.jsonl"):
        assert not is_hub_name(name)
