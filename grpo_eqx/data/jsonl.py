"""Problems from a JSONL file: one `{"question": ..., "answer": ...}` per line."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import FileError, UserError
from grpo_eqx.common.read_files import read_bytes, value_of
from grpo_eqx.data.records import PROMPT, QUESTION, Records, is_list_of_rows

_GZIP = b"\x1f\x8b"
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_FIX = "write one object on each line, without commas between them"
ARGUMENTS = {"data": "train_data", "eval_data": "eval_data"}
"""Arguments of `GRPOTrainer` that take data in place of settings, for messages."""
_OTHER_FORMATS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def read_jsonl(path: str | Path, setting: str = "data", *, needs_prompt: bool = True) -> Records:
    """Reads a JSONL file; raises `UserError` if it is unreadable, empty or (in some line) invalid.

    **Arguments:**

    - `path`: the file.
    - `setting`: the setting that names it, for messages.
    - `needs_prompt`: whether problems must have a question or a prompt.
    """
    path = Path(path)
    given = f"{setting} {str(path)!r}"
    if (builder := _OTHER_FORMATS.get(path.suffix)) is not None:
        raise UserError(
            f"{given} is not a JSONL file: load it in a script, and pass it on as "
            f"GRPOTrainer({ARGUMENTS[setting]}=datasets.load_dataset({builder!r}, data_files=..., "
            f"split='train'))."
        )
    content = read_bytes(path, given, pipe=True).removeprefix(codecs.BOM_UTF8)
    if content.startswith(_GZIP):
        raise UserError(f"{given} is compressed: unpack it with gunzip.")
    if content.startswith(_UTF16):
        raise UserError(f"{given} is encoded in UTF-16: save it in UTF-8.")
    if content.lstrip().startswith(b"["):
        raise UserError(
            f"{given} is a JSON list: write one object per line, as "
            f"jq -c '.[]' FILE.json > FILE.jsonl does."
        )
    try:
        records = Records.of(_rows(content, path), path.name, needs_prompt=needs_prompt)
    except UserError as error:
        if (key := _key_of_rows(content)) is None:
            raise
        raise UserError(
            f"{given} is one JSON object with the problems under {key!r}: write one object per "
            f"line, as jq -c '.{key}[]' FILE.json > FILE.jsonl does, or pass that list to "
            f"GRPOTrainer."
        ) from error
    if not records.rows:
        raise UserError(f"{given} is empty: it needs one JSON object per line.")
    return records


def _key_of_rows(content: bytes) -> str | None:
    """Returns the key of the problems in a file that is one JSON object; `None` for other files."""
    try:
        whole = value_of(content, "")
    except FileError:
        return None
    if not isinstance(whole, dict) or whole.keys() & {QUESTION, PROMPT}:
        return None
    return next((key for key, value in whole.items() if is_list_of_rows(value)), None)


def _rows(content: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path}, line {number}"
        if line.strip():
            yield where, value_of(line, where, _FIX, unique=True)
