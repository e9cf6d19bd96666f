"""How a csv is written, by its first rows: delimiter, decimal point, and whether names stand on top."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.decoding import CURRENCY
from shardkeep.workers.data.conversion.rules import COMMA_NUMBER, number_of
from shardkeep.workers.data.sources.csv_files import csv_of
from shardkeep.workers.data.sources.text_files import first_bytes
from shardkeep.workers.data_config import DataConfig

DELIMITERS = (",", "\t", ";", "|", "::", " ")
ROWS = 200


def dialect_of(path: Path, config: DataConfig) -> dict[str, Any]:
    """The keys of `data` that say how a file is written, beside those that the config sets. Raises DataError where the
    text leaves a choice."""
    text = first_bytes(path).decode("latin-1")
    given = config.model_fields_set
    if "delimiter" in given:
        fitting = {config.delimiter: _rows(text, config.delimiter, config)}
    else:
        fitting = {mark: rows for mark in DELIMITERS if len((rows := _rows(text, mark, config) or [[""]])[0]) > 1}
    if len(fitting) > 1:
        fitting.pop(" ", None)
    if len(fitting) != 1:
        choices = " or ".join(f"{mark!r} ({len(rows[0])} columns)" for mark, rows in fitting.items())
        why = f"may be {choices}" if fitting else f"is none of {' '.join(map(repr, DELIMITERS))}"
        why += "; if \\ stands before quotes: --set 'data.escape=\\'" if '\\"' in text and not config.escape else ""
        raise DataError(f"{path}: the delimiter is unclear, it {why}; say it by --set data.delimiter=';' (or tab)")
    ((mark, (top, *below)),) = ((mark, rows or [[]]) for mark, rows in fitting.items())
    columns = list(zip(*(below if top == (config.columns or top) else [top, *below]), strict=False))
    if "columns" not in given and (like := _like_a_row(top, columns)):
        raise DataError(
            f"{path}: the first line may be names or a row ({', '.join(top)[:60]}: {like}); name the {len(top)} "
            "columns by --set 'data.columns=[NAME, NAME, ...]'"
        )
    commas = mark != "," and "decimal" not in given and any(_with_commas(each, whole=mark == ";") for each in columns)
    return ({"delimiter": mark} if mark != config.delimiter else {}) | ({"decimal": ","} if commas else {})


def _rows(text: str, mark: str, config: DataConfig) -> list[list[str]]:
    """The first rows without blank ones; none where their lengths differ."""
    form = replace(csv_of(config), delimiter=mark).dialect()
    reader = csv.reader(io.StringIO(text.replace(mark, form["delimiter"]), newline=""), **form)
    try:
        rows = [[field.strip() for field in row] for row in islice(reader, ROWS + 1) if any(map(str.strip, row))]
    except csv.Error:
        return []
    rows = rows[:-1] if len(rows) > ROWS else rows
    return rows if len(set(map(len, rows))) == 1 else []


def _like_a_row(top: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Why the first line may be a row; "" = it has the names."""
    if number := next((field for field in top if number_of(field.encode()) is not None), None):
        return f"{number} is a number"
    again = (field for field, column in zip(top, columns, strict=False) if field and field in column)
    return f"{field} stands below, too" if (field := next(again, None)) else ""


def _with_commas(column: Sequence[str], *, whole: bool) -> bool:
    """Whether all fields have a decimal comma; of amounts, and with `whole` of numbers, some may have none."""
    fields = [field.encode("latin-1") for field in column if field]
    texts = [CURRENCY.sub(b"", field).strip(b" \xc2\xa0\xe2\x80\xaf") for field in fields]
    commas = [text for text in texts if not (whole or texts != fields) or not text.translate(None, b"-.").isdigit()]
    return bool(commas) and all(map(COMMA_NUMBER.fullmatch, commas))
