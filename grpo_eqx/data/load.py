"""Prompt sources, from the names of training and held-out data."""

from pathlib import Path

from grpo_eqx.config import EMBEDDED_DATA
from grpo_eqx.data.jsonl import ANSWER, QUESTION, Records, read_jsonl
from grpo_eqx.data.prompts import PromptSource
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.errors import UserError, first_line
from grpo_eqx.models.hub import HubName, download

_HELDOUT_SHARE = 10  # holds out at most one in ten problems of a file without its own eval data


def load_data(data: str, eval_data: str | None, num_eval: int) -> tuple[PromptSource, PromptSource]:
    """Loads training and held-out problems.

    **Arguments:** names or paths as `GRPOConfig.data` and `eval_data` describe them; the number of
    held-out problems that an evaluation uses.

    Without `eval_data`, a file's own last problems are held out: `num_eval` of them, but at most
    a tenth of the file. Raises `UserError` for data that does not exist or cannot be read.
    """
    if eval_data is not None:
        return _load(data, "train"), _load(eval_data, "test")
    train = _load(data, "train")
    if isinstance(train, Records) and not is_hub_name(data):
        return train.split(min(num_eval, max(1, len(train) // _HELDOUT_SHARE)))
    return train, _load(data, "test")


def is_hub_name(name: str) -> bool:
    """Returns whether to look a name up on the Hugging Face hub: no file, nor written as one."""
    repository = name.partition("@")[0]
    return (
        not Path(name).exists()
        and not Path(repository).exists()
        and repository.count("/") == 1
        and not repository.startswith((".", "/", "~"))
        and not repository.endswith((".jsonl", ".json"))
    )


def _load(name: str, split: str) -> PromptSource:
    if name == EMBEDDED_DATA:
        return WordProblems("train" if split == "train" else "heldout")
    if is_hub_name(name):
        return _load_hub(name, split)
    path = Path(name)
    if not path.is_file():
        HubName.parse("data", name, EMBEDDED_DATA)  # refuses a revision of what has none
        raise UserError(
            f"data {name!r} is neither a file, nor {EMBEDDED_DATA!r}, nor a hub name such as "
            f"openai/gsm8k."
        )
    return read_jsonl(path)


def _load_hub(name: str, split: str) -> PromptSource:
    """Loads a split of a hub data set with GSM8K's columns, through `datasets`.

    The files are downloaded first: without a network, `datasets` would take whichever revision it
    loaded last.
    """
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    # Every retry would print a line of its own; the final error is reported below.
    hub_logging.set_verbosity_error()
    of_hub = HubName.parse("data", name, EMBEDDED_DATA)
    try:
        folder = str(download("dataset", of_hub))
        configs = datasets.get_dataset_config_names(folder)
        config = "main" if "main" in configs else configs[0]
        rows = datasets.load_dataset(folder, config, split=split)
    except Exception as error:  # datasets raises its own, fsspec's and the hub's errors alike
        raise UserError(
            f"data {name!r} is not a local file and could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {first_line(error)})."
        ) from error
    for column in (QUESTION, ANSWER):
        if column not in rows.column_names:
            raise UserError(f"data {name!r} has no column {column!r}, only {rows.column_names}.")
    return Records(rows=rows.to_list(), name=f"{name} ({split})")
