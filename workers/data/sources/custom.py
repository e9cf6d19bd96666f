"""The source `module:function`: samples from the user's own code, by a contract that docs/guide/data.md states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.plugging.modules import load_named
from shardkeep.workers.data.conversion.chunk import Chunk, missing_column
from shardkeep.workers.data.conversion.conversion import convert
from shardkeep.workers.data.conversion.item_values import item_values
from shardkeep.workers.data.conversion.layout import ColumnLayout, layout_of
from shardkeep.workers.data.conversion.reader import distinct, readers_of
from shardkeep.workers.data.conversion.typing import facts_of
from shardkeep.workers.data.fitting.data import data_of
from shardkeep.workers.data.fitting.inputs import prior_fit
from shardkeep.workers.data.fitting.rows import evaluation_readers, fit_rows
from shardkeep.workers.data.fitting.split import Split
from shardkeep.workers.data.frames import array_of
from shardkeep.workers.data.items import catalogued
from shardkeep.workers.data.samples import Data, Dataset, Progress, fingerprint
from shardkeep.workers.data.schema import sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data_config import DIALECT, DataConfig, DenseColumn, LabelColumn, SparseColumn, refuse
from shardkeep.workers.model_config import RetrievalSettings


def open_custom(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """Calls the user's function for "train" and "eval" (None or no rows = no evaluation data).

    Arrays are held in memory, in every worker; an object with `schema`, `__len__` and `gather` is used as it is.
    `items`: the model of a retrieval job, which needs a catalogue: the ids of an object's items are their names.
    Raises ConfigError where the function cannot be found, DataError for what it returns.
    """
    refuse(config, ("synthetic", "train", "eval", *DIALECT, "absent", "cache", "weight"))
    function = load_named(config.source, setting="data.source", folder=Path(config.root))
    parts = [_call(function, config, split) for split in ("train", "eval")]
    if isinstance(parts[0], Dataset):
        return _own(config, parts, items)
    if parts[1] is not None and config.held_out(seed) is not None:
        raise ConfigError(f"data.split: has no effect, {config.source} returns evaluation data of its own")
    arrays = [_arrays(config, part, items) for part in parts if part is not None]
    return _convert(config, arrays, seed, items)


def _call(function: Any, config: DataConfig, split: str) -> Any:
    try:
        return function(split=split, **config.options)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # raised by the call itself
            raise ConfigError(f"data.options: {config.source}: {error}") from error
        raise


def _own(config: DataConfig, parts: list[Any], items: RetrievalSettings | None) -> Data:
    refuse(config, ("label", "labels", "dense", "sparse", "sequences", "scale", "missing", "split"))
    refuse(config, ("time", "time_format"))
    train, held = parts
    if held is not None and not isinstance(held, Dataset):
        raise DataError(f"{config.source}: returned a dataset for train and {type(held).__name__} for eval")
    for split, part in (("train", train), ("eval", held)):
        if part is not None and not len(part):
            raise DataError(f"{config.source}: the {split} data has no rows")
    marks = [_stated(config, part) for part in parts if part is not None]
    inputs = sample_inputs(train.schema, frozenset(feature.name for feature in train.schema.features))
    data = Data(train, held, config.source, fingerprint(*marks), inputs)
    return data if items is None else catalogued(data, sides_of_model(items, train.schema))


def _stated(config: DataConfig, part: Dataset) -> dict[str, Any]:
    """What is known of a dataset of the user's own: its `fingerprint` if it has one, else its length and columns."""
    own = getattr(part, "fingerprint", None)
    own = own() if callable(own) else own
    if own is not None:
        if not isinstance(own, str | int):
            raise ConfigError(
                f"{config.source}: fingerprint is a {type(own).__name__}; allowed: a text or whole number"
            )
        return {"own": own}
    columns = [*part.schema.dense, *(f.name for f in part.schema.looked_up)]
    return {"source": config.source, "options": config.options, "columns": columns, "rows": len(part)}


def _arrays(config: DataConfig, part: Any, items: RetrievalSettings | None) -> Mapping[str, Any]:
    source, key = config.source, "labels" if config.labels else "label"
    needed = items is None or config.label is not None
    if not isinstance(part, Mapping) or (needed and key not in part):
        shown = sorted(part) if isinstance(part, Mapping) else type(part).__name__
        names = "; labels needs data.labels, which describes each" if key == "label" and "labels" in shown else ""
        raise DataError(
            f"{source}: returned {shown}; allowed: a dict of {key}, dense and sparse, or an object with schema, "
            f"__len__ and gather{names}"
        )
    if extra := sorted(set(part) - {key, "dense", "sparse", "sequences"}):
        raise DataError(f"{source}: returned an unknown key {extra[0]}; allowed: {key}, dense, sparse, sequences")
    if config.labels and not isinstance(part[key], Mapping):
        raise DataError(f"{source}: labels is a {type(part[key]).__name__}; allowed: a dict of an array for each label")
    return part


def _convert(config: DataConfig, parts: list[Mapping[str, Any]], seed: int, items: RetrievalSettings | None) -> Data:
    prior, layout, record = prior_fit(config), _layout(config, parts[0]), config.held_out(seed)
    chunks, split = [_chunk(config, part) for part in parts], None if record is None else Split(record, layout)
    known = facts_of({config.source: chunks[0].schema}, layout)
    known = known if prior is None else known.continued(prior, layout)
    columns = convert(chunks[:1], distinct([*readers_of(layout, known), *(split.readers(known) if split else ())]))
    fitted = fit_rows(layout, columns, known, split)
    held = convert(chunks[1:], evaluation_readers(layout, fitted.fitted)) if chunks[1:] else None
    data = data_of(layout, columns, fitted, held, {"form": "columns"}, config.source)
    if items is None:
        return data
    sides = sides_of_model(items, layout.schema)
    return catalogued(data, sides, lambda ids_M: item_values(chunks[:1], sides.named_by, layout, fitted.fitted, ids_M))


def _layout(config: DataConfig, part: Mapping[str, Any]) -> ColumnLayout:
    """The config's columns where it names some, else all that the function returned."""
    label = config.label or (LabelColumn(column="label") if "label" in part else None)
    if label is not None and label.column != "label":
        raise ConfigError(f"data.label.column: {label.column} is not allowed with {config.source}; allowed: label")
    dense = config.dense or [
        DenseColumn(column=name, width=values.shape[1] if getattr(values, "ndim", 1) == 2 else None)
        for name, values in part.get("dense", {}).items()
    ]
    sparse = config.sparse or [SparseColumn(column=name) for name in part.get("sparse", {})]
    return layout_of(config.model_copy(update={"label": label, "dense": dense, "sparse": sparse}), labelled=False)


def _chunk(config: DataConfig, part: Mapping[str, Any]) -> Chunk:
    source, given = config.source, part["labels"] if config.labels else {k: part[k] for k in ("label",) if k in part}
    if absent := next((label.column for label in config.labels if label.column not in given), None):
        raise missing_column(f"{source}: labels", absent, list(given))
    groups = (given, part.get("dense", {}), part.get("sparse", {}), part.get("sequences", {}))
    labels, dense, sparse, lists = ({n: array_of(v, f"{source}: column {n}") for n, v in g.items()} for g in groups)
    columns = (*labels.items(), *dense.items(), *sparse.items(), *lists.items())
    first, count = next((name, len(values)) for name, values in columns)
    for name, values in columns:
        if len(values) != count:
            raise DataError(f"{source}: column {name} has {len(values)} rows, {first} has {count}")
    rows_N = np.arange(1, count + 1, dtype=np.int64)
    if both := next((name for name in dense if name in sparse and not dense[name].equals(sparse[name])), None):
        raise DataError(f"{source}: {both} is in dense and in sparse, with other values; give each a name of its own")
    return Chunk(source, rows_N, {**dense, **sparse, **lists, **labels})
