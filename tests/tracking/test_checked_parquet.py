"""Tables in which any changed bit of what is read is noticed."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_eqx.tracking.checked_parquet import read_parquet, to_parquet
from grpo_eqx.tracking.completions_table import write_completions

COLUMNS = {
    "step": [1] * 8,
    "prompt": ["How many pens?", "How many cakes?"] * 4,
    "rewards/a.b": [0.0, 1.0, float("nan"), 0.5] * 2,
    "truncated": [True, False] * 4,
    "tokens": [["a", "<end>"], []] * 4,
    "token_logps": [np.array([-1.5, -0.1], np.float32), np.array([], np.float32)] * 4,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_completions(tmp_path / "table.parquet", COLUMNS)
    return tmp_path / "table.parquet"


def read(path: Path) -> str:
    """The whole table as text, in which NaN equals NaN."""
    return repr(read_parquet(path, lambda names: names).to_pydict())


def spoilt(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_is_noticed_or_changes_nothing(path: Path) -> None:
    """Random bits, and all of the last 64 bytes, where the footer ends."""
    whole, content = read(path), path.read_bytes()
    bits, noticed = 8 * len(content), 0
    chosen = [*random.Random(0).sample(range(bits), 300), *range(bits - 8 * 64, bits)]
    for bit in chosen:
        path.write_bytes(spoilt(content, bit))
        try:
            assert read(path) == whole, bit
        except ValueError:
            noticed += 1
    assert noticed > 0.9 * len(chosen)


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "folder", "gone", "text", "swapped"])
def test_any_other_damage_is_one_error_in_a_line(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.unlink()
    half = len(content) // 2
    other = {
        "cut": content[:half], "zeros": bytes(len(content)), "empty": b"", "text": b"PAR1 PAR1",
        "swapped": content[:8] + content[12:16] + content[8:12] + content[16:],
    }  # fmt: skip
    if damage in other:
        path.write_bytes(other[damage])
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(ValueError, match=r"\S") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_only_columns_that_are_read_count(path: Path) -> None:
    """Tokens take most of a table, and few read them."""
    content = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(4)
    path.write_bytes(spoilt(content, 8 * (column.data_page_offset + 2)))
    assert read_parquet(path, lambda _: ["prompt"])["prompt"].to_pylist() == COLUMNS["prompt"]
    with pytest.raises(ValueError, match="the column tokens is not as it was written"):
        read(path)


def test_tables_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have no checksums."""
    pq.write_table(pa.table({"step": [1, 2]}), tmp_path / "old.parquet")
    assert read(tmp_path / "old.parquet") == "{'step': [1, 2]}"


def test_an_empty_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty.parquet").write_bytes(to_parquet(pa.table({"step": pa.array([], "int64")})))
    assert read(tmp_path / "empty.parquet") == "{'step': []}"


def test_others_read_the_table_as_any(path: Path) -> None:
    assert pq.read_table(path)["prompt"].to_pylist() == COLUMNS["prompt"]
