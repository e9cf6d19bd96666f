"""Conversion: chunks of raw columns to stored columns, all or none. Knows no file format, and not where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shardkeep.base.errors import DataError
from shardkeep.workers.data.columns.column import ColumnWriter, StoredColumn
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.reader import LabelReader, Reader


def convert(
    chunks: Iterable[Chunk],
    readers: Sequence[Reader],
    *,
    paths: Mapping[str, Path] | None = None,
    origin: str = "the data",
    check: Callable[[], None] = lambda: None,
) -> dict[str, StoredColumn]:
    """The columns of all rows, by name.

    Args:
        readers: Fresh ones; those of labels come first.
        paths: Where each column lies afterwards; None = in memory.
        origin: Names the input where it turns out to be empty.
        check: Raises an error before the columns take their names.

    Raises:
        DataError: A value cannot be read, or there are no rows.
        OSError: A file cannot be written.
    """
    writers = {
        name: ColumnWriter(kind, None if paths is None else paths[name], width=reader.widths.get(name))
        for reader in readers
        for name, kind in reader.kinds.items()
    }
    num_rows = first = 0
    try:
        for chunk in itertools.chain.from_iterable(chunk.parts() for chunk in chunks):
            num_rows, first = num_rows + len(chunk), first or len(chunk)
            _read(chunk, readers, writers)
        if not num_rows:
            raise DataError(f"{origin}: has no rows")
        facts = {name: reader.facts(num_rows) | {"first": first} for reader in readers for name in reader.kinds}
        check()
        return {name: writer.close(facts[name]) for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.discard()


def _read(chunk: Chunk, readers: Sequence[Reader], writers: Mapping[str, ColumnWriter]) -> None:
    for reader in readers:
        for name, values in reader.read(chunk).items():
            writers[name].add(values)
        if isinstance(reader, LabelReader) and reader.failed:
            return  # an error already: only counts
