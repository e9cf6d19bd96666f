"""The source `parquet`: row groups read in batches, the named columns only, with their own types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import MOST_ROWS, Chunk, check_columns, plain
from shardkeep.workers.data.input_files import columns_of_folders, first_file
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data_config import DIALECT, DataConfig, refuse
from shardkeep.workers.model_config import RetrievalSettings

BUFFER_BYTES = 1 << 20
"""Read at once of each column."""
_OPTIONS = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": BUFFER_BYTES}
"""pre_buffer, pyarrow's default, keeps the bytes of all columns that were read until the file is closed."""


def open_parquet(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `parquet`. Raises DataError for what is wrong with the files, ConfigError for the settings."""
    # here: an excerpt of files is read without kernels
    from shardkeep.workers.data.cache.cache import open_cached
    from shardkeep.workers.data.conversion.layout import layout_of

    refuse(config, ("synthetic", "options", *DIALECT))
    config = named_columns(config, lambda: header(config))
    layout, reading = layout_of(config, labelled=items is None), {"form": "parquet"}
    return open_cached(config, layout, read_parquet, reading=reading, seed=seed, progress=progress, items=items)


def header(config: DataConfig) -> list[str]:
    """Names of all columns of the first file."""
    return column_names(first_file(config))


def column_names(path: Path) -> list[str]:
    """Names of all columns of a file."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def group_sizes(path: Path) -> list[tuple[int, int, int]]:
    """Of each row group its number, its rows and its bytes before compression."""
    try:
        found = pq.read_metadata(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    groups = ((number, found.row_group(number)) for number in range(found.num_row_groups))
    return [(number, group.num_rows, group.total_byte_size) for number, group in groups]


def read_within(path: Path, group: int, *, rows: int, reach: int) -> pa.Table:
    """At most `rows` rows of a row group, in eight slices all over its first `reach` rows."""
    try:
        with pa.OSFile(str(path)) as source, pq.ParquetFile(source, **_OPTIONS | {"buffer_size": 1 << 16}) as file:
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
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def read_parquet(path: Path, columns: Sequence[str], progress: Callable[[float], None]) -> Iterator[Chunk]:
    """Yields the file's rows in batches of at most `MOST_ROWS`, the named columns only."""
    try:
        with pq.ParquetFile(path, **_OPTIONS) as file:
            placed = columns_of_folders(path, columns, file.schema_arrow.names)
            columns = [name for name in columns if name not in placed]
            check_columns(str(path), columns, file.schema_arrow)
            done, total = 0, file.metadata.num_rows or 1
            for batch in file.iter_batches(MOST_ROWS, columns=columns, use_threads=False):
                rows_N = np.arange(done + 1, done + 1 + len(batch), dtype=np.int64)
                done += len(batch)
                progress(done / total)
                values = dict(zip(batch.schema.names, map(plain, batch.columns), strict=True))
                yield Chunk(str(path), rows_N, values | {k: pa.repeat(v, len(batch)) for k, v in placed.items()})
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    if path.stat().st_size == 0:
        return DataError(f"{path}: is empty")
    return DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})")
