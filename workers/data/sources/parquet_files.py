"""The source `parquet`: row groups read in batches, the named columns only, with their own types."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.workers.data.conversion.chunk import MOST_ROWS, check_columns, plain
from shardkeep.workers.data.sources.forms import readable

BUFFER_BYTES = 1 << 20
"""Read at once of each column."""
_OPTIONS = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": BUFFER_BYTES}
"""pre_buffer, pyarrow's default, keeps the bytes of all columns that were read until the file is closed."""


def schema(path: Path) -> pa.Schema:
    """The columns of a file. Raises what pyarrow raises."""
    return pq.read_schema(path)


def batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Batches of at most `MOST_ROWS` rows, and the share of the file that is read. Raises what pyarrow raises."""
    with pq.ParquetFile(path, **_OPTIONS) as file:
        done, total = 0, file.metadata.num_rows or 1
        for batch in file.iter_batches(MOST_ROWS, columns=list(columns), use_threads=False):
            done += len(batch)
            yield batch, done / total


def group_sizes(path: Path) -> list[tuple[int, int, int]]:
    """Of each row group its number, its rows and its bytes before compression."""
    with readable(path, "parquet"):
        found = pq.read_metadata(path)
    groups = ((number, found.row_group(number)) for number in range(found.num_row_groups))
    return [(number, group.num_rows, group.total_byte_size) for number, group in groups]


def read_within(path: Path, group: int, *, rows: int, reach: int) -> pa.Table:
    """At most `rows` rows of a row group, in eight slices all over its first `reach` rows."""
    options = _OPTIONS | {"buffer_size": 1 << 16}
    with readable(path, "parquet"), pa.OSFile(str(path)) as source, pq.ParquetFile(source, **options) as file:
        if hasattr(os, "posix_fadvise"):  # otherwise some disks read 8 MB ahead, of each column
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        check_columns(str(path), file.schema_arrow.names, file.schema_arrow)
        size, step, found = max(1, rows // 8), max(1, -(-reach // rows)), list[pa.Table]()
        for number, batch in enumerate(file.iter_batches(size, row_groups=[group], use_threads=False)):
            if number * size >= reach:
                break
            if number % step == 0:
                found.append(pa.table([plain(values) for values in batch.columns], batch.schema.names))
        return pa.concat_tables(found) if found else file.schema_arrow.empty_table()
