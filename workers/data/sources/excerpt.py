"""Excerpts: rows from all over files, in bounded time and memory. Nothing is converted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.rules import is_list
from shardkeep.workers.data.input_files import partition_of
from shardkeep.workers.data.sources.csv_files import csv_of
from shardkeep.workers.data.sources.forms import form_of
from shardkeep.workers.data.sources.parquet_files import group_sizes, read_within
from shardkeep.workers.data.sources.text_files import compression_of
from shardkeep.workers.data_config import DataConfig

MOST_ROWS, MOST_BYTES = 1 << 17, 1 << 27
PARTS, PART_BYTES = 16, 1 << 20
"""Places at which rows are read, and the text of a csv that is read at each."""
MOST_FILES = 64
READ_BYTES, MOST_READ = 1 << 27, 1 << 30
"""Of what must be read to come to a place: parquet decodes a row group from its start, compressed text unpacks."""
T = TypeVar("T")


@dataclass(frozen=True)
class Excerpt:
    """Rows in the order of the files. `num_rows`: of all files; estimated, unless the excerpt is `whole`. `differ`:
    whether some files lack columns of others."""

    table: pa.Table
    num_rows: int
    whole: bool
    differ: bool = False

    def chunk(self, origin: str, decimal: str) -> Chunk:
        """The rows as those of one file, in whose place messages have `origin`."""
        arrays = {name: self.table.column(name).combine_chunks() for name in self.table.column_names}
        return Chunk(origin, np.arange(1, len(self.table) + 1), arrays, decimal)


def excerpt_of(config: DataConfig, paths: Sequence[Path]) -> Excerpt:
    """At most 131,072 rows of files of one kind. Raises DataError for what cannot be read, and for a column that holds
    one kind of values in one file and another kind in the next."""
    chosen = _spread(paths, MOST_FILES)
    parts = list(_of_parquet(chosen) if config.source == "parquet" else _of_others(config, chosen))
    held, num_rows = sum(len(table) for _, table, _ in parts), sum(share for _, _, share in parts)
    if not held:
        raise DataError(f"{paths[0]}: has no rows")
    whole = len(chosen) == len(paths) and held == num_rows
    differ = len({frozenset(form_of(config).schema(path).names) for path in chosen}) > 1
    table = _joined([(path, table) for path, table, _ in parts])
    return Excerpt(table, round(num_rows * len(paths) / len(chosen)), whole, differ)


def _of_parquet(paths: Sequence[Path]) -> Iterator[tuple[Path, pa.Table, float]]:
    """Rows, and how many rows of all files they represent."""
    groups = [(path, *group) for path in paths for group in group_sizes(path)]
    chosen = _spread(groups, PARTS)
    more = sum(rows for _, _, rows, _ in groups) / max(1, sum(rows for _, _, rows, _ in chosen))
    for path, group, num_rows, size in chosen:
        row_bytes = max(1.0, size / max(1, num_rows))
        rows = int(min(MOST_ROWS, MOST_BYTES / row_bytes) / len(chosen)) or 1
        reach = min(num_rows, int(READ_BYTES / row_bytes / len(chosen)))
        yield path, read_within(path, group, rows=rows, reach=reach), num_rows * more


def _of_others(config: DataConfig, paths: Sequence[Path]) -> Iterator[tuple[Path, pa.Table, float]]:
    """As `_of_parquet`. The rows at the start of a file are read as in training, which finds what is wrong."""
    form, count, most = form_of(config), max(1, PARTS // len(paths)), max(1, MOST_ROWS // len(paths))
    for path in paths:
        names, size, shares = form.names(path), path.stat().st_size, [0.0]
        chunks = form.read(path, names, shares.append)
        if config.source == "csv" and compression_of(path) is None and size > PART_BYTES * count:
            texts = list(_at_places(path, size, count))
            within = csv_of(config).rows_within
            tables = [within(text.partition(b"\n")[2].rpartition(b"\n")[0], names) for text in texts]
            rows = size * sum(map(len, tables)) / sum(map(len, texts))
            tables = [pa.table(dict(chunk.columns)) for chunk in itertools.islice(chunks, 1)] + tables
            yield from ((path, table.slice(0, most // count), rows / len(tables)) for table in tables)
            continue
        found, rows, step, read = list[pa.Table](), 0, 1, 0
        for chunk in chunks:  # in order: compressed text cannot be entered in the middle
            table = pa.table(dict(chunk.columns))
            rows, read = rows + len(table), read + table.nbytes
            found.append(_every(step, table))
            if sum(map(len, found)) > 2 * most:
                found, step = [_every(2, pa.concat_tables(found))], 2 * step
            if read > MOST_READ:
                break
        table = pa.concat_tables(found) if found else pa.table({name: pa.array([]) for name in names})
        yield path, _every(-(-len(table) // most), table), rows / (1.0 if next(chunks, None) is None else shares[-1])


def _at_places(path: Path, size: int, count: int) -> Iterator[bytes]:
    """Texts from places all over a file."""
    with path.open("rb") as file:
        for place in range(1, count + 1):
            file.seek((size - PART_BYTES) * place // count)
            yield file.read(PART_BYTES)


def _every(step: int, table: pa.Table) -> pa.Table:
    return table if step <= 1 else table.take(list(range(0, len(table), step)))


def _joined(parts: Sequence[tuple[Path, pa.Table]]) -> pa.Table:
    """All rows, with the columns in the names of the folders of partitions."""
    tables, (origin, start) = list[pa.Table](), parts[0]
    for path, table in parts:
        for field in table.schema:
            kinds = [start.field(field.name).type, field.type] if field.name in start.column_names else []
            if kinds and is_list(kinds[0]) != is_list(kinds[1]) and not any(map(pa.types.is_null, kinds)):
                place = f"{path}, column {field.name}"
                raise DataError(f"{place}: holds {kinds[1]}, and {kinds[0]} in {origin}; write one kind")
        for name, value in partition_of(path).items():
            if name not in table.column_names:
                table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(table)))
        tables.append(table)
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"{origin} and others: columns of one name hold values of several kinds ({error})") from error


def _spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
