"""How a csv is written, by its first rows: delimiter, decimal point, and whether names stand on top."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.decoding import COMMA_NUMBER
from shardkeep.workers.data.conversion.rules import number_of
from shardkeep.workers.data.sources.csv_files import UNIT, compression_of, first_bytes
from shardkeep.workers.data_config import DataConfig

DELIMITERS = (",", "\t", ";", "|", "::", " ")
ROWS = 200
Rows = Sequence[Sequence[str]]


def dialect_of(path: Path, config: DataConfig) -> dict[str, Any]:
    """The keys of `data` that say how a file is written, beside those that the config sets. Raises DataError where the
    text leaves a choice."""
    text = first_bytes(path, compression_of(path)).removeprefix(b"\xef\xbb\xbf").decode("latin-1")
    given, found = config.model_fields_set, dict[str, Any]()
    rows_by = {}
    for mark in [config.delimiter] if "delimiter" in given else DELIMITERS:
        rows = _rows(text, mark, config)
        if len(widths := {len(row) for row in rows}) == 1 and (widths != {1} or "delimiter" in given):
            rows_by[mark] = rows
    if len(rows_by) > 1:
        rows_by.pop(" ", None)
    if "delimiter" in given and not rows_by:
        return found  # reading names the row with too many or too few fields
    if len(rows_by) != 1:
        choices = " or ".join(f"{mark!r} ({len(rows[0])} columns)" for mark, rows in rows_by.items())
        why = f"may be {choices}" if rows_by else f"is none of {' '.join(map(repr, DELIMITERS))}"
        raise DataError(f"{path}: the delimiter is unclear, it {why}; say it by --set data.delimiter=';' (or tab)")
    (mark,) = rows_by
    if mark != config.delimiter:
        found["delimiter"] = mark
    top, *below = rows_by[mark]
    columns = list(zip(*below, strict=False))
    if "columns" not in given and (like := _like_a_row(top, columns)):
        shown = ", ".join(top[:4])
        raise DataError(
            f"{path}: the first line may be names or a row ({shown[:60]}: {like}); name the {len(top)} columns by "
            "--set 'data.columns=[NAME, NAME, ...]'"
        )
    if mark != "," and "decimal" not in given and any(map(_with_commas, columns)):
        found["decimal"] = ","
    return found


def _rows(text: str, mark: str, config: DataConfig) -> list[list[str]]:
    """The first rows, without blank ones and without the last of a text that is cut."""
    one = mark if len(mark) == 1 else UNIT.decode()
    quoting = csv.QUOTE_NONE if config.quote is None else csv.QUOTE_MINIMAL
    form: Any = {"delimiter": one, "quotechar": config.quote or '"', "escapechar": config.escape, "quoting": quoting}
    reader = csv.reader(io.StringIO(text.replace(mark, one), newline=""), **form)
    try:
        rows = [[field.strip() for field in row] for row in islice(reader, ROWS + 1) if any(map(str.strip, row))]
    except csv.Error:
        return []
    return rows[:-1] if len(rows) > ROWS else rows


def _like_a_row(top: Sequence[str], columns: Rows) -> str:
    """Why the first line may be a row; "" = it has the names."""
    if number := next((field for field in top if number_of(field.encode()) is not None), None):
        return f"{number} is a number"
    again = (field for field, column in zip(top, columns, strict=False) if field and field in column)
    return f"{field} stands below, too" if (field := next(again, None)) else ""


def _with_commas(column: Sequence[str]) -> bool:
    fields = [field for field in column if field]
    return bool(fields) and all(COMMA_NUMBER.fullmatch(field.encode("latin-1")) for field in fields)
