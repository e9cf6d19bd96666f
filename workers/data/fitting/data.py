"""From stored columns to a job's samples, with their checks and their fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkeep.workers.data.columns.dataset import LABEL
from shardkeep.workers.data.conversion.labels import check_matched, check_side
from shardkeep.workers.data.conversion.layout import ColumnLayout, check_pooling
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.fitting.rows import FittedRows, kept_rows, samples_of
from shardkeep.workers.data.fitting.split import EVAL, SIDES, TEST, TRAIN, Columns, rows_of_sides
from shardkeep.workers.data.samples import Data, content_fingerprint


def data_of(
    layout: ColumnLayout,
    columns: Columns,
    found: FittedRows,
    held: Columns | None,
    reading: Mapping[str, Any],
    place: str,
) -> Data:
    """A job's samples.

    Args:
        columns: Of the training files.
        held: Of the evaluation files; None = there are none.
        reading: The form of the training files.
        place: Where they come from, in words.

    Raises DataError, and ConfigError for settings that have no effect."""
    fitted, skipped, labels = found.fitted, found.skipped, [columns[LABEL].facts]
    parts = {side: samples_of(layout, columns, fitted, rows_N) for side, rows_N in found.rows.items()}
    if held is not None:
        kept_N, left = kept_rows(layout.labels, held[LABEL])
        rows_N = rows_of_sides(None, kept_N, [EVAL])[EVAL]
        check_side(SIDES[EVAL], layout.labels, held[LABEL], rows_N, "")
        parts[EVAL], skipped = samples_of(layout, held, fitted, rows_N), skipped + left
        labels.append(held[LABEL].facts)
    check_matched(layout.labels, labels)
    check_pooling(layout.sparse, fitted.lists)
    marks = [parts[side].checksums() for side in (TRAIN, EVAL) if side in parts]
    mark = content_fingerprint(layout.schema, marks, [list(scale) for _, scale in fitted.transform(layout)])
    inputs = Inputs(layout, fitted, reading).to_json()
    left_out = f"; {skipped:,} rows left out, their label is missing" if skipped else ""
    text = f"{place}{left_out}{parts[TRAIN].histories}"
    return Data(parts[TRAIN], parts.get(EVAL), text, mark, inputs, tuple(found.notes), test=parts.get(TEST))
