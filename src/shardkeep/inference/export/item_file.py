"""The items of an exported retrieval model, writer and reader: one Parquet file, which other systems read too.

items.parquet   value: the item's name as in the training files; id int64: its id in its table; vector: float32,
                whose dot product with a user's vector is the score, so that those of cosines have length 1
"""

# M = items, E = width of a vector

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import CheckpointError, first_line
from shardkeep.base.files import naming
from shardkeep.inference.finding import Finder, Items
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue


def write_items(path: Path, finder: Finder) -> None:
    """Writes all items in the order of the catalogue. Raises OSError."""
    catalogue, vectors_ME = finder.ranking.catalogue, finder.index.vectors_ME
    width = vectors_ME.shape[1]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(vectors_ME.reshape(-1)), width)
    with naming(path):
        pq.write_table(pa.table({"value": catalogue.values, "id": catalogue.ids_M, "vector": vectors}), path)


def read_items(path: Path) -> Items:
    """The items, without the columns that training has of them. Raises CheckpointError."""
    try:
        table = pq.read_table(path, columns=["value", "id", "vector"]).combine_chunks()
        value, ids, vectors = (column.combine_chunks() for column in table.columns)
        width = vectors.type.list_size
        vectors_ME = np.array(vectors.flatten(), np.float32).reshape(len(table), width)
        ids_M = np.array(ids, np.int64)
    except (OSError, pa.ArrowException, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)}); export the model again") from error
    nothing = Batch(np.empty((len(ids_M), 0), np.float32), {}, np.empty((len(ids_M), 0), np.float32))
    return Items(Catalogue(ids_M, np.zeros(len(ids_M), np.int64), nothing, value), vectors_ME)
