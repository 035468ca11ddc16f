"""Loading of training and held-out problems from names, files, the hub, and objects."""

import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.data.hub_data import load_hub_data, repository_of
from grpo_eqx.data.jsonl import ARGUMENTS, read_jsonl
from grpo_eqx.data.prompts import Part, PromptSource
from grpo_eqx.data.records import Records, is_list_of_rows
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.models.hub import HubName
from grpo_eqx.settings.embedded import EMBEDDED_DATA

Data = str | Path | PromptSource | Iterable[Any]
"""Problems: a name or path as in `GRPOConfig.data`, a source, or dicts by column."""

_TABLES = {
    "DataFrame": "datasets.Dataset.from_pandas({}, preserve_index=False)",
    "Table": "datasets.Dataset({})",
}
"""Calls that make data sets of pandas and pyarrow tables."""
_MANY = 100_000
_HELDOUT_SHARE = 10  # holds out at most one in ten problems of data without held-out ones


def load_data(
    data: Data, eval_data: Data | None, num_eval: int, *, needs_prompt: bool = True
) -> tuple[PromptSource, PromptSource]:
    """Loads training and held-out problems.

    Without `eval_data`, the embedded data have held-out problems, and data on the hub may have a
    split `test`. Otherwise, the last problems are held out: `num_eval`, but at most a tenth.

    **Arguments:**

    - `data`, `eval_data`: the training and the held-out problems.
    - `num_eval`: held-out problems that an evaluation uses.
    - `needs_prompt`: whether problems must have a question or a prompt.

    Raises `UserError` for data that is missing, empty or unreadable.
    """
    load = functools.partial(_load, needs_prompt=needs_prompt)
    train = load("data", data, "train")
    if eval_data is None:
        heldout = _own_heldout(data, needs_prompt)
    else:
        heldout = load("eval_data", eval_data, "test")
    return split(train, num_eval) if heldout is None else (train, heldout)


def load_problems(data: str | Path, most: int | None) -> PromptSource:
    """Loads problems to evaluate on: embedded held-out problems, or the split `test` on the hub.

    **Arguments:**

    - `data`: a name or path as in `GRPOConfig.data`.
    - `most`: the number of first problems to take; `None` for all.

    Raises `UserError` for data that is missing, empty or unreadable.
    """
    return first_problems(_load("data", data, "test"), most)


def first_problems(source: PromptSource, most: int | None) -> PromptSource:
    """Returns the first `most` problems of a source, or all."""
    count = len(source) if most is None else min(most, len(source))
    if count == len(source):
        return source
    return Part(name=str(source), source=source, start=0, stop=count)


def split(source: PromptSource, num_eval: int) -> tuple[PromptSource, PromptSource]:
    """Splits the held-out problems off the end of a source."""
    size = len(source)
    if size < 2:
        raise UserError(
            f"{source} has a single problem, which would be held out for evaluations: add "
            f"problems, or set eval_data."
        )
    count = min(num_eval, max(1, size // _HELDOUT_SHARE))
    return (
        Part(name=str(source), source=source, start=0, stop=size - count),
        Part(
            name=f"the last {count:,} of {source}",
            source=source, start=size - count, stop=size,
        ),
    )  # fmt: skip


def _own_heldout(data: Data, needs_prompt: bool) -> PromptSource | None:
    """Returns the held-out problems that belong to the data, if any."""
    if not isinstance(data, str):
        return None
    if data == EMBEDDED_DATA:
        return WordProblems("heldout")
    name, _, split = data.partition(":")
    # Any split but `train` may share problems with the split `test`.
    if is_hub_name(data) and re.fullmatch(r"(train(\[[^]]*\])?)?", split):
        return load_hub_data("data", name, "test", optional=True, needs_prompt=needs_prompt)
    return None


def is_hub_name(name: str) -> bool:
    """Returns whether a name is looked up on the Hugging Face hub: it is not a file's name."""
    repository = name.partition(":")[0].partition("@")[0]
    here = name, repository, repository_of(repository)
    return (
        not any(map(os.path.exists, here))
        and repository.count("/") in (1, 2)
        and not repository.startswith((".", "/", "~"))
        and not repository.endswith(
            (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz")
        )
    )


def _load(
    setting: str, data: Data, default_split: str, *, needs_prompt: bool = True
) -> PromptSource:
    """Loads problems; messages call them by the setting, or by the trainer's argument."""
    source = (
        data
        if isinstance(data, PromptSource)
        else _loaded(setting, data, default_split, needs_prompt)
    )
    if not len(source):
        raise UserError(f"{source} has no problems: add problems.")
    return source


def _loaded(
    setting: str, data: str | Path | Iterable[Any], default_split: str, needs_prompt: bool
) -> PromptSource:
    if not isinstance(data, str | Path):
        return _records(ARGUMENTS[setting], data, needs_prompt)
    name = str(data)
    if name == EMBEDDED_DATA:
        return WordProblems("train" if default_split == "train" else "heldout")
    if isinstance(data, str) and is_hub_name(name):
        source = load_hub_data(setting, name, default_split, needs_prompt=needs_prompt)
        assert source is not None  # the split is not optional
        return source
    path = expanded(name)
    if os.path.isdir(path) or not os.path.exists(path):  # a pipe is as good as a file
        _refuse_name(setting, name, path)
    return read_jsonl(path, setting, needs_prompt=needs_prompt)


def _refuse_name(setting: str, name: str, path: Path) -> NoReturn:
    HubName.parse(setting, name, EMBEDDED_DATA)  # rejects a revision
    if name and os.path.exists(path / "dataset_info.json"):
        raise UserError(
            f"{setting} {name!r} is what save_to_disk wrote: pass "
            f"datasets.load_from_disk({name!r}) to GRPOTrainer(train_data=...)."
        )
    if name and os.path.isdir(path):
        raise UserError(f"{setting} {name!r} is a folder: give a JSONL file, or a hub name.")
    before, colon, _ = name.partition(":")
    if not colon:
        before, colon, _ = name.partition("[")
    if colon and (before == EMBEDDED_DATA or os.path.isfile(expanded(before))):
        raise UserError(
            f"{setting} is {name!r}, but only names on the Hugging Face hub have splits: use "
            f"{before!r}, or pass a part of it to GRPOTrainer."
        )
    raise UserError(
        f"{setting} {name!r} is neither a file, nor {EMBEDDED_DATA!r}, nor a hub name such as "
        f"openai/gsm8k."
    )


def _records(argument: str, data: Any, needs_prompt: bool) -> Records:
    """Reads rows from an object that was passed to the trainer."""
    if isinstance(data, Mapping):
        raise UserError(
            f"{argument} is a {type(data).__name__} of {', '.join(map(str, data))}: pass "
            f"{_one_of_mapping(argument, data)}."
        )
    if type(data).__name__ in _TABLES:
        raise UserError(
            f"{argument} is a {type(data).__name__}: pass "
            f"{_TABLES[type(data).__name__].format(argument)}."
        )
    if type(data).__name__ in ("Dataset", "IterableDataset"):
        data = data.with_format(None)  # plain numbers
    try:
        rows = _read_all(argument, data)
    except TypeError as error:
        raise UserError(
            f"{argument} is of type {type(data).__name__}: pass a datasets.Dataset, a list of "
            f"dicts, a path or a hub name."
        ) from error
    numbered = ((f"{argument}, problem {i}", row) for i, row in enumerate(rows, start=1))
    return Records.of(numbered, argument, needs_prompt=needs_prompt)


def _read_all(argument: str, data: Iterable[Any]) -> list[Any]:
    """Reads all rows, and reports the number so far if there are many."""
    rows = []
    for row in data:
        rows.append(row)
        if len(rows) % _MANY == 0:
            print_clean(
                f"read {len(rows):,} problems of {argument} so far: it is read to its end",
                file=sys.stderr,
            )
    return rows


def _one_of_mapping(argument: str, data: Mapping[Any, Any]) -> str:
    """Returns what to pass in place of a mapping of data sets, or of columns."""
    if not all(map(_is_data_set, data.values())):
        return f"datasets.Dataset.from_dict({argument}), or a list of problems"
    preferred = ("test", "validation") if argument == "eval_data" else ("train",)
    part = next((name for name in preferred if name in data), next(iter(data), "train"))
    return f"one data set, as in {argument}=data[{part!r}]"


def _is_data_set(part: Any) -> bool:
    """Returns whether an entry of a mapping is a data set rather than a column."""
    return is_list_of_rows(part) or hasattr(part, "column_names") or isinstance(part, PromptSource)
