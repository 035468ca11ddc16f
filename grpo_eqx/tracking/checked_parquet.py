"""Parquet files with checksums, so that any changed bit of what is read is noticed.

Parquet's own checksums leave out the headers of pages and the footer. So the metadata in a file's
footer holds a CRC-32 of each column, and a CRC-32 of the footer itself, computed with its own
digits as zeros.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_eqx.common.read_files import opened

_NAME, _MARK = "grpo_eqx.checksums", b"crc32:"
_DIGITS = 8
_SUMS = re.compile(re.escape(_MARK) + rb"((?:[0-9a-f]{%d})+)" % _DIGITS)
_TAIL = 8
"""Bytes at a file's end: the length of the footer, and the name of the format."""


def to_parquet(table: Any, **options: Any) -> bytes:
    """Returns the content of a file with a table.

    **Arguments:**

    - `table`: a `pyarrow.Table` without struct columns.
    - `options`: options of `pyarrow.parquet.ParquetWriter`.
    """
    import pyarrow.parquet as pq

    written = io.BytesIO()
    blank = b"0" * _DIGITS * (table.num_columns + 1)
    with pq.ParquetWriter(written, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata({_NAME: (_MARK + blank).decode()})
    content = bytearray(written.getvalue())
    start = content.rindex(_MARK + blank) + len(_MARK)
    sums = [zlib.crc32(content[at:end]) for at, end in _chunks(pq.read_metadata(written))]
    sums.append(0)
    content[start : start + len(blank)] = _hex(sums)  # with 0 for the footer's own
    sums[-1] = zlib.crc32(content[_footer_start(written) :])
    content[start : start + len(blank)] = _hex(sums)
    return bytes(content)


def read_parquet(path: Path, choose: Callable[[Sequence[str]], Sequence[str]]) -> Any:
    """Reads some columns of a table.

    **Arguments:**

    - `path`: the file.
    - `choose`: called with the names of all columns; returns the names of the columns to read.

    Raises `ValueError`, with the reason, for whatever is wrong with the file. Files without
    checksums, from another writer, are read as they are.
    """
    import pyarrow.parquet as pq

    try:
        with opened(path) as file:
            sums = _checked_sums(file)
            table = pq.ParquetFile(file)
            names = table.schema_arrow.names
            chosen = list(choose(names))
            for i, (start, end) in enumerate(_chunks(table.metadata) if sums else ()):
                if names[i % len(names)] in chosen and _crc(file, start, end) != sums[i]:
                    raise ValueError(f"the column {names[i]} is not as it was written")
            return table.read(chosen)
    except FileNotFoundError as error:
        raise ValueError("it is gone: the run may have been started anew") from error
    except Exception as error:  # whatever pyarrow finds wrong with it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(reason) from error


def _checked_sums(file: io.BufferedIOBase) -> list[int]:
    """Returns the checksums of the columns; an empty list for a file without checksums.

    Raises `ValueError` if the footer has changed.
    """
    file.seek(_footer_start(file))
    footer = file.read()
    found = list(_SUMS.finditer(footer))
    if not found:
        return []
    digits = found[-1][1]
    sums = [int(digits[i : i + _DIGITS], 16) for i in range(0, len(digits), _DIGITS)]
    at = found[-1].end()
    if zlib.crc32(footer[: at - _DIGITS] + _hex([0]) + footer[at:]) != sums[-1]:
        raise ValueError("its footer is not as it was written")
    return sums[:-1]


def _footer_start(file: io.BufferedIOBase) -> int:
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _TAIL))
    return max(0, end - _TAIL - int.from_bytes(file.read(4), "little"))


def _chunks(metadata: Any) -> Iterator[tuple[int, int]]:
    """Yields the first byte of each column, and the byte after its last."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            starts = column.dictionary_page_offset, column.data_page_offset
            start = min(at for at in starts if at is not None)
            yield start, start + column.total_compressed_size


def _crc(file: io.BufferedIOBase, start: int, end: int) -> int:
    file.seek(start)
    return zlib.crc32(file.read(end - start))


def _hex(sums: Sequence[int]) -> bytes:
    return b"".join(b"%08x" % each for each in sums)
