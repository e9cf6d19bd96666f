"""How many ids of a row file the training data have. A file of numbers fits no data of texts, and the reverse.

Looks at samples spread over the data and at the first rows of the file, so that it takes seconds at most.
"""
# N = rows of a chunk, V = distinct ids of the data

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ids
from shardkeep.base.errors import DataError
from shardkeep.row_files.form import RowFile
from shardkeep.workers.data.conversion.hashing import hash_texts
from shardkeep.workers.data.samples import Dataset, gathered

MOST_SAMPLES, MOST_ROWS = 1 << 20, 1 << 20
BLOCK = 1 << 14
"""Samples that are read at once."""


@dataclass(frozen=True, slots=True)
class IdMatches:
    """What a look at a file and the data has found."""

    rows: int
    """Rows of the file whose ids were looked up."""
    known: int
    """Those whose id is in the data as it is."""
    as_texts: int
    """Those whose id is a number, and a text in the data."""
    as_numbers: int
    """Those whose id is a text, and a number in the data."""
    samples: int | None
    """Samples that were looked at; None = all."""

    def text(self) -> str:
        """One clause for the user."""
        where = "the training data" if self.samples is None else f"{self.samples:,} training samples"
        return f"{self.known:,} of {self.rows:,} ids are in {where}"

    def check(self, source: str) -> None:
        """Raises DataError if the ids match in the other kind alone. `source`: the setting and the file."""
        if self.known or not (self.as_texts or self.as_numbers):
            return
        there, store = "texts, as every value of a CSV is", "texts in a Parquet file"
        if self.as_numbers:
            there, store = "numbers", "int64"
        raise DataError(
            f"{source}: {self.text()}; {self.as_texts or self.as_numbers:,} of them are there as {there}: "
            f"store the ids as {store}"
        )


def id_matches(file: RowFile, table: str, dataset: Dataset) -> IdMatches:
    """Looks up the ids of a file among those of a table's features. Raises DataError for a damaged file."""
    samples_N = _spread(len(dataset))
    data_V = _ids_of(dataset, table, samples_N)
    rows = known = as_texts = as_numbers = 0
    texts_V: Ids | None = None
    for ids_N, _ in file.chunks():
        rows += ids_N.size
        known += _count(ids_N, data_V)
        if not known:
            texts_V = _of_texts(data_V) if texts_V is None else texts_V
            as_texts += _count(_of_texts(ids_N), data_V)
            as_numbers += _count(ids_N, texts_V)
        if rows >= MOST_ROWS:
            break
    return IdMatches(rows, known, as_texts, as_numbers, None if samples_N.size == len(dataset) else samples_N.size)


def _spread(length: int) -> Ids:
    """Numbers of samples: all of them, or blocks at equal distances."""
    if length <= MOST_SAMPLES:
        return np.arange(length)
    starts = np.linspace(0, length - BLOCK, MOST_SAMPLES // BLOCK).astype(np.int64)
    return (starts[:, None] + np.arange(BLOCK)).reshape(-1)


def _ids_of(dataset: Dataset, table: str, samples_N: Ids) -> Ids:
    """The distinct ids (V,) of a table's features in some samples."""
    names = [feature.name for feature in dataset.schema.looked_up if feature.table == table]
    found: list[Ids] = [np.empty(0, np.int64)]
    for begin in range(0, samples_N.size, BLOCK):
        batch = gathered(dataset, samples_N[begin : begin + BLOCK])
        found += [np.unique(batch.ids[name].values_N) for name in names]
    return np.unique(np.concatenate(found))


def _of_texts(ids_N: Ids) -> Ids:
    """What ids would be if their decimal form were a text."""
    return hash_texts(pa.array(ids_N).cast(pa.string()))


def _count(ids_N: Ids, data_V: Ids) -> int:
    return int(np.isin(ids_N, data_V).sum())
