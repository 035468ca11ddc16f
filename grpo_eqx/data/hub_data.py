"""Data sets on the hub: `owner/name`, or in full `owner/name/config@revision:split`."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.errors import UserError, did_you_mean, first_line, listed
from grpo_eqx.data.records import Records
from grpo_eqx.models.hub import HubName, download
from grpo_eqx.settings.embedded import EMBEDDED_DATA

_USUAL_CONFIG = "main"
"""Configuration to use if neither the name nor the data set says which."""
_MOST_NAMES = 12
"""Most names that a message lists."""


class HubData(NamedTuple):
    """A split of a data set on the hub."""

    hub: HubName
    config: str | None
    """Name of the configuration; `None` for the default, a single configuration, or `main`."""
    split: str | None
    """Expression for a split; `None` for the usual split for training or evaluation."""

    @classmethod
    def parse(cls, setting: str, name: str) -> "HubData":
        """Parses the name in a setting; raises `UserError` for an empty part."""
        path, _, split = name.partition(":")
        hub = HubName.parse(setting, path, EMBEDDED_DATA)
        owner, _, rest = hub.repository.partition("/")
        repository, slash, config = rest.partition("/")
        if slash and not config:
            raise UserError(
                f"{setting} is {name!r}: give a configuration after the second /, or leave it out."
            )
        hub = hub._replace(repository=f"{owner}/{repository}")
        return cls(hub, config or None, split or None)

    def __str__(self) -> str:
        config = "" if self.config is None else f"/{self.config}"
        revision = "" if self.hub.revision is None else f"@{self.hub.revision}"
        return f"{self.hub.repository}{config}{revision}" + (f":{self.split}" if self.split else "")


def load_hub_data(
    setting: str,
    name: str,
    default_split: str,
    *,
    optional: bool = False,
    needs_prompt: bool = True,
) -> Records | None:
    """Loads a split of a hub data set through `datasets`.

    The files are downloaded first: without a network, `datasets` would take whichever revision it
    loaded last.

    **Arguments:**

    - `setting`, `name`: the setting, and its value.
    - `default_split`: the split to take if the name has none.
    - `optional`: whether to return `None` for a data set without the default split.
    - `needs_prompt`: whether problems must have a question or a prompt.

    Raises `UserError` if the data set cannot be loaded, or its configuration or split is unknown.
    """
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    # Each retry would print a line. The final error is reported below.
    hub_logging.set_verbosity_error()
    data = HubData.parse(setting, name)
    try:
        folder = str(download("dataset", data.hub))
    except Exception as error:  # from the hub, or from its HTTP library
        raise UserError(
            f"{setting} {name!r} is not a local file and could not be loaded from the Hugging Face "
            f"hub ({type(error).__name__}: {first_line(error)}): check its name and the network, "
            f"or give a file."
        ) from error
    try:
        configs = datasets.get_dataset_config_names(folder)
        default = datasets.get_dataset_default_config_name(folder)
        config = _config(setting, data, configs, default)
        splits = datasets.get_dataset_split_names(folder, config)  # reads no rows
        if optional and default_split not in splits:
            return None
        wanted = data._replace(split=data.split or default_split)
        _check_names(setting, name, wanted, splits)
        parts = _parts(setting, name, wanted, datasets.load_dataset(folder, config))
    except UserError:
        raise
    except Exception as error:  # datasets raises errors of fsspec and pyarrow, too
        raise UserError(
            f"{setting} {name!r} has files or a card that datasets cannot read "
            f"({type(error).__name__}: {first_line(error)}): load it in a script, and pass its "
            f"rows to GRPOTrainer, or give a file."
        ) from error
    taken = data._replace(config=config if len(configs) > 1 else data.config, split=None)
    title = f"{taken} ({wanted.split})"
    rows = itertools.chain.from_iterable(parts)
    numbered = ((f"{title}, problem {i}", row) for i, row in enumerate(rows, start=1))
    return Records.of(numbered, title, needs_prompt=needs_prompt)


def _config(setting: str, data: HubData, configs: Sequence[str], default: str | None) -> str:
    """Returns the configuration to use; raises `UserError` if it is unknown."""
    usual = _USUAL_CONFIG if _USUAL_CONFIG in configs else None
    config = data.config or default or usual
    if config in configs:
        return str(config)
    fault = "none of them the default"
    if config is not None:
        fault = f"and no {config!r}{did_you_mean(config, configs)}"
    raise UserError(
        f"{setting} {str(data)!r} has the {_some('configuration', configs)}, {fault}: name one, as "
        f"in {data._replace(config=configs[0])}."
    )


def _check_names(setting: str, name: str, data: HubData, splits: Sequence[str]) -> None:
    """Raises `UserError` for a split expression, such as `train[:100]+test`, with unknown splits.

    **Arguments:**

    - `setting`, `name`: the setting, and its value.
    - `data`: the parsed name, with the expression.
    - `splits`: the known splits.
    """
    named = re.findall(r"(?:^|\+)\s*([^\s[\]+]+)", data.split or "")
    if unknown := [each for each in named if each not in (*splits, "all")]:
        raise UserError(
            f"{setting} {name!r} has the {_some('split', splits)}, and no {unknown[0]!r}"
            f"{did_you_mean(unknown[0], splits)}: name one, as in {data._replace(split=splits[0])}."
        )


def _parts(setting: str, name: str, data: HubData, splits: Mapping[str, Any]) -> list[Any]:
    """Returns the parts of a data set that a split expression names, in its order.

    **Arguments:**

    - `setting`, `name`: the setting, and its value.
    - `data`: the parsed name, with the expression.
    - `splits`: all splits, as `datasets.Dataset`.

    Raises `UserError` for an invalid expression, and for parts without rows.
    """
    from datasets import ReadInstruction

    expression = data.split or ""
    if expression == "all":
        return list(splits.values())
    sizes = {split: len(rows) for split, rows in splits.items()}
    try:
        parts = ReadInstruction.from_spec(expression).to_absolute(sizes)
        empty = next((part.splitname for part in parts if part.from_ >= part.to), None)
        fault = None if empty is None else f"takes no rows of {empty}"
    except Exception as error:  # for an expression that datasets cannot read
        fault = f"cannot be read ({first_line(error)})"
    if fault is not None:
        counts = listed([f"{split} has {count:,}" for split, count in sizes.items()])
        raise UserError(
            f"{setting} {name!r}: the part {expression!r} {fault}: {counts}; give a first and a "
            f"last row, as in {data._replace(split=f'{next(iter(sizes))}[:100]')}."
        )
    return [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]


def _some(noun: str, names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    some = listed(names) if more < 1 else f"{', '.join(names[:_MOST_NAMES])} and {more} others"
    return f"{noun}{'s' if len(names) > 1 else ''} {some}"


def repository_of(name: str) -> str:
    """Returns `owner/name` or `owner/name@revision` from the name of a data set."""
    path, at, revision = name.partition(":")[0].partition("@")
    return f"{'/'.join(path.split('/')[:2])}{at}{revision}"
