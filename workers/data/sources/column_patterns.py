"""Patterns among the config's columns: `f*` becomes all columns of the first file that match. Reads no file itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardkeep.base.errors import DataError
from shardkeep.workers.data_config import DataConfig, DenseColumn, SparseColumn

C = TypeVar("C", DenseColumn, SparseColumn)


def named_columns(config: DataConfig, names: Callable[[], Sequence[str]]) -> DataConfig:
    """The config with every pattern in `dense` and `sparse` replaced by the columns it represents, in file order.

    A pattern leaves out the label, columns of weights, of time and of sequences, and every column that `dense` or
    `sparse` names in full. `names` is called only where there is a pattern. Raises DataError where one matches nothing.
    """
    named = [c.column for c in config.dense] + [c.column for c in config.sparse]
    entries = [name for group in config.sequences.values() for name in group.columns]
    if not any("*" in name for name in named):
        return config
    known = list(dict.fromkeys(names()))
    taken: set[str | None] = {*named, *entries, config.weight, config.time, *(c.weights for c in config.sparse)}
    taken |= {label.column for label in config.targets}
    free = [name for name in known if name not in taken]
    dense = _expand("dense", config.dense, known, free)
    sparse = _expand("sparse", config.sparse, known, free)
    return config.model_copy(update={"dense": dense, "sparse": sparse})


def _expand(key: str, columns: Sequence[C], known: Sequence[str], free: Sequence[str]) -> list[C]:
    expanded: dict[str, C] = {}
    for column in columns:
        if "*" not in column.column or column.column in known:
            expanded[column.column] = column
            continue
        pattern = re.compile(".*".join(map(re.escape, column.column.split("*"))))
        matching = [name for name in free if pattern.fullmatch(name)]
        if "" in matching:
            raise DataError(
                f"data.{key}: {column.column} matches column {known.index('') + 1} of the first file, which has no "
                "name (pandas writes its index so); name the columns in full, or write it without one (index=False)"
            )
        if not matching:
            shown = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
            raise DataError(f"data.{key}: no column matches {column.column}; there are: {shown}")
        expanded |= {name: column.model_copy(update={"column": name}) for name in matching if name not in expanded}
    return list(expanded.values())
