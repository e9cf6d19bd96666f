"""The source `parquet`: row groups read in batches, the named columns only, with their own types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.cache.cache import first_file, open_cached
from shardkeep.workers.data.conversion.conversion import layout_of, refuse
from shardkeep.workers.data.conversion.decoding import Chunk, missing_column
from shardkeep.workers.data.gather_kernels import CHUNK_ROWS
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data_config import DataConfig

BUFFER_BYTES = 1 << 20
"""Read at once of each column."""


def open_parquet(config: DataConfig, *, seed: int, progress: Progress | None) -> Data:
    """The source `parquet`. Raises DataError for what is wrong with the files, ConfigError for the settings."""
    refuse(config, ("synthetic", "options", "columns", "delimiter", "decimal"))
    config = named_columns(config, lambda: header(config))
    return open_cached(
        config, layout_of(config), read_parquet, reading={"form": "parquet"}, seed=seed, progress=progress
    )


def header(config: DataConfig) -> list[str]:
    """Names of all columns of the first file."""
    path = first_file(config)
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def read_parquet(path: Path, columns: Sequence[str], progress: Callable[[float], None]) -> Iterator[Chunk]:
    """Yields the file's rows in batches of at most 65,536, the named columns only."""
    try:
        # pre_buffer, pyarrow's default, keeps the bytes of all columns that were read until the file is closed
        options = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": BUFFER_BYTES}
        with pq.ParquetFile(path, **options) as file:
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise missing_column(str(path), column, names)
                if (times := names.count(column)) > 1:
                    raise DataError(f"{path}: {times} columns are called {column}; give each a name of its own")
            done, total = 0, file.metadata.num_rows or 1
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(columns), use_threads=False):
                rows_N = np.arange(done + 1, done + 1 + len(batch), dtype=np.int64)
                done += len(batch)
                progress(done / total)
                values = map(_plain, batch.columns)
                yield Chunk(str(path), rows_N, dict(zip(batch.schema.names, values, strict=True)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _plain(values: pa.Array) -> pa.Array:
    """The same values in a type that pyarrow has all its functions for: no views, no extensions."""
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    kind = values.type
    if pa.types.is_string_view(kind):
        return values.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return values.cast(pa.large_binary())
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return values.cast(pa.large_list(kind.value_type))
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return values.cast(pa.decimal128(kind.precision, kind.scale))
    return values


def _unreadable(path: Path, error: Exception) -> DataError:
    if path.stat().st_size == 0:
        return DataError(f"{path}: is empty")
    return DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})")
