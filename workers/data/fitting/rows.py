"""Fitting: from stored columns to the samples of each side: which rows they have, and what the training rows decide.
split.py chooses the side of a row.

N = rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.columns.column import StoredColumn
from shardkeep.workers.data.columns.dataset import LABEL, TIME, WEIGHT, StoredDataset
from shardkeep.workers.data.columns.scaling import Scale, chunks_of_rows, fit, has_log
from shardkeep.workers.data.conversion.labels import AnyLabel, check_side
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.reader import Reader, readers_of
from shardkeep.workers.data.conversion.teaching import idle_line
from shardkeep.workers.data.fitting.split import SIDES, TRAIN, Columns, Split, rows_of_sides
from shardkeep.workers.data_config import DenseColumn, SequenceNumber


@dataclass(frozen=True)
class FittedRows:
    """What follows from stored columns.

    Attributes:
        fitted: What the training rows decide.
        rows: Of each side its rows in their order; None = all, in the order of the files.
        skipped: Rows left out because their label is missing.
        notes: What a person should know of the columns.
    """

    fitted: Fitted
    rows: Mapping[int, Ints | None]
    skipped: int = 0
    notes: Sequence[str] = field(default_factory=list)


def names_of(layout: ColumnLayout) -> list[str]:
    """The names of the columns of a sample."""
    ids = [c.column for c in layout.sparse] + [name for group in layout.sequences.values() for name in group.ids]
    scalars = [LABEL, *([WEIGHT] if layout.weight is not None else [])]
    return [*scalars, *(f"ids:{name}" for name in ids), *(f"numbers:{c.column}" for c in layout.of_numbers)]


def fit_rows(layout: ColumnLayout, columns: Columns, known: Fitted, split: Split | None) -> FittedRows:
    """The sides of the training files' rows.

    Args:
        known: What is decided of the columns; the scales are those that are kept of an earlier model.

    Raises:
        DataError: A side has no rows or one class; a number cannot be an input.
        ConfigError: `data.time_format` has no effect.
    """
    known = known.found(columns)
    kept_N, skipped = kept_rows(layout.labels, columns[LABEL])
    side_N = None if split is None else split.sides_of(columns, known)
    rows = rows_of_sides(side_N, kept_N, [TRAIN] if split is None else split.sides)
    advice = "" if split is None else split.advice
    for side, rows_N in rows.items():
        check_side(SIDES[side], layout.labels, columns[LABEL], rows_N, advice)
    fitted_scales, notes = dict[str, Scale](), [note for c in columns.values() for note in c.facts.get("notes", ())]
    for sparse in layout.sparse:
        column = columns[f"ids:{sparse.column}"]
        if column.offsets is None:
            notes += idle_line(sparse.column, column, rows[TRAIN])
    notes += [] if split is None else split.notes
    notes += _removed(columns)
    for number, chunks in _numbers(layout, columns, rows[TRAIN]):
        if number.column in known.scales:
            fitted_scales[number.column] = known.scales[number.column]
            continue
        fitted_scales[number.column], why = fit(number, layout.scale, chunks)
        if why is not None:
            notes.append(f"column {number.column}: {why}; it counts as 0")
    if layout.time_format and layout.time is None and not any(known.times.values()):
        raise ConfigError("data.time_format: has no effect: no dense column holds times, and data.time is not set")
    if layout.time is not None:
        rows[TRAIN] = _by_time(columns[TIME], rows[TRAIN])
    record = None if split is None else split.record
    held = {name: are for name, are in known.times.items() if name in fitted_scales}
    fitted = replace(known, times=held, scales=fitted_scales, split=record)
    return FittedRows(fitted, rows, skipped, list(dict.fromkeys(notes)))


def _removed(columns: Columns) -> list[str]:
    """A line about the values that marks of `data.missing` have removed."""
    removed = dict[str, int]()
    for each in columns.values():
        removed |= {name: max(count, removed.get(name, 0)) for name, count in each.facts.get("removed", {}).items()}
    counts = [f"{count:,} of {name}" for name, count in removed.items()]
    return [f"data.missing: marks removed values: {', '.join(counts)}"] if counts else []


def evaluation_readers(layout: ColumnLayout, fitted: Fitted) -> list[Reader]:
    """The readers of evaluation files, whose columns are read as those of training."""
    return readers_of(replace(layout, time=None), fitted)


def samples_of(layout: ColumnLayout, columns: Columns, fitted: Fitted, rows_N: Ints | None = None) -> StoredDataset:
    """The samples of some rows, None = of all. Raises DataError and ValueError where the columns are no inputs."""
    for column in layout.of_numbers:
        beyond = columns[f"numbers:{column.column}"].facts.get("beyond", {}).get(column.column, "")
        if beyond and not has_log(column, layout.scale):
            raise DataError(beyond)
    kept = {name: columns[name] for name in names_of(layout)}
    return StoredDataset(layout.schema, layout.dense, kept, fitted.transform(layout), rows_N)


def kept_rows(labels: Sequence[AnyLabel], column: StoredColumn) -> tuple[NDArray[np.bool_], int]:
    """Which rows have the label whose rows are skipped without it, and how many have none."""
    kept_N = np.ones(len(column), np.bool_)
    for t, label in enumerate(labels):
        if label.missing == "skip":
            kept_N &= ~np.isnan(column.values if column.values.ndim == 1 else column.values[:, t])
    return kept_N, len(kept_N) - int(kept_N.sum())


def _numbers(
    layout: ColumnLayout, columns: Columns, rows_N: Ints | None
) -> Iterator[tuple[DenseColumn | SequenceNumber, Iterable[Float64s]]]:
    """All columns of numbers in the order of `layout.scaled`, and their training values."""
    for column in layout.of_numbers:
        numbers: Sequence[DenseColumn | SequenceNumber] = (
            column.numbers() if isinstance(column, DenseColumn) else [column]
        )
        for at, number in enumerate(numbers):
            yield number, chunks_of_rows(columns[f"numbers:{column.column}"], rows_N, at)


def _by_time(column: StoredColumn, rows_N: Ints | None) -> Ints | None:
    """The rows in the order of their times; those of one time stay in their order."""
    time_N = column.values if rows_N is None else column.values[rows_N]
    if (time_N[1:] >= time_N[:-1]).all():
        return rows_N
    order_N = np.argsort(time_N, kind="stable")
    return order_N if rows_N is None else rows_N[order_N]
