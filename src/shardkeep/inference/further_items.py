"""Further items: what files add to the items of a retrieval model, by their columns alone. No row of theirs is needed
in training."""

# M = items, E = width of a vector

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.inference.files import Told, chunks_of_files
from shardkeep.inference.finding import Finder
from shardkeep.inference.trained import Trained
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.conversion.categories import named_ids
from shardkeep.workers.evaluation.retrieval import Ranking
from shardkeep.workers.retrieval.ranking import ItemIndex


def with_items(trained: Trained, files: Sequence[Path], told: Told) -> Finder:
    """The finder of a model with the items of files behind its own. An item that it has already gets the vector of its
    last row in the files. Raises DataError."""
    assert trained.sides is not None and trained.labelled_inputs is not None
    before, item = trained.finder, trained.sides.item.name
    inputs = trained.labelled_inputs.only(trained.sides.items)
    known = before.ranking.catalogue
    ids, values, vectors = [known.ids_M], [known.values], [before.index.vectors_ME]
    for chunk in chunks_of_files(files, inputs, told):
        samples = inputs.samples(chunk)
        batch = trained.sides.items_of(samples.gather(np.arange(len(samples))))
        column = chunk.column(item)
        with column.named():
            names = named_ids(column, inputs.fitted.kinds.get(item), inputs.layout.rules)[1]
            values.append(names.cast(known.values.type))
        ids.append(batch.ids[item].values_N)
        vectors.append(trained.item_vectors(batch))
    ids_M = np.concatenate(ids)
    _, first_M, own_M = np.unique(ids_M, return_index=True, return_inverse=True)
    last_M = np.zeros(len(first_M), np.int64)
    np.maximum.at(last_M, own_M, np.arange(len(ids_M)))
    order_M = np.argsort(first_M)
    first_M, last_M = first_M[order_M], last_M[order_M]
    counts_M = np.zeros(len(first_M), np.int64)
    counts_M[: len(known)] = known.counts_M
    nothing = Batch(np.empty((len(first_M), 0), np.float32), {}, np.empty((len(first_M), 0), np.float32))
    catalogue = Catalogue(ids_M[first_M], counts_M, nothing, pa.concat_arrays(values).take(pa.array(first_M)))
    index = ItemIndex(np.concatenate(vectors)[last_M])
    return Finder(Ranking(before.ranking.sides, catalogue, before.ranking.asked), index)
