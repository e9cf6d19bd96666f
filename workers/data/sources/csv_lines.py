"""Lines of delimited text: their number, and the check of rows that span several of them."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError

LONGEST_FIELD = 1 << 24  # characters; Python's limit is 131,072


class CountedLines:
    """A stream of text that counts its lines as they are read; blank ones, of no character, are left out."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self.lines = 0
        self._stream, self._between = stream, True

    def read(self, size: int) -> pa.Buffer:
        """At most `size` bytes; none at the end only."""
        block = self._stream.read_buffer(size)
        text_N = np.frombuffer(block, np.uint8)
        if text_N.size:
            end_N = (text_N == ord("\n")) | (text_N == ord("\r"))
            self.lines += int(np.count_nonzero(end_N[:-1] > end_N[1:])) + int(self._between > end_N[0])
            self._between = bool(end_N[-1])
        return block

    def close(self) -> None:
        self.closed = True


def check_lines(
    name: str, stream: Any, dialect: dict[str, Any], *, delimiter: str, num_fields: int, header_lines: int
) -> tuple[int, int]:
    """The number of rows behind the header, and of rows that span lines. Row numbers count from 1.

    A quote that is part of a text joins all lines up to the next quote, and each of them has the fields of a row. Lines
    of a quoted text seldom have. Raises DataError for a row with too many or too few fields, and for one whose quote is
    not closed before a delimiter. Also for lines in quotes that each have a row's fields, unless another row shows that
    texts of this file do span lines.
    """
    rows, spanning, others = 0, 0, False
    doubt: DataError | None = None
    with contextlib.ExitStack() as after:
        after.callback(csv.field_size_limit, csv.field_size_limit(LONGEST_FIELD))
        for fields, lines, number in _rows(stream, dialect, delimiter):
            right = len(fields) == num_fields
            text = (
                "" if right and len(lines) == 1 else "".join(lines).encode("latin-1").decode("utf-8", "replace").strip()
            )
            rows += number > header_lines and (right or text != "")
            if len(lines) == 1 and (right or not text):
                continue
            place, shown = f"{name}, row {rows}" if rows else f"{name}, the header", f"({text[:60]!r})"
            if len(lines) > 1:
                spanning, shown = spanning + 1, f"{shown}; if quotes are part of the texts: data.quote: none"
                if not _is_well_quoted(lines, dialect):
                    what = f"a quote is opened and never closed before a delimiter, over {len(lines)} lines"
                    raise DataError(f"{place}: {what} {shown}")
                if not all(_could_be_row(line, dialect, num_fields) for line in lines if line.strip()):
                    others = True
                elif doubt is None:
                    what = f"a quote joins {len(lines)} lines, and each has the {num_fields} fields of a row"
                    doubt = DataError(f"{place}: {what} {shown}; if the text is right, store the data as parquet")
            if not right and rows:
                raise DataError(f"{place}: has {len(fields)} fields, expected {num_fields} {shown}")
    if doubt is not None and not others:
        raise doubt
    return rows, spanning


def _rows(stream: Any, dialect: dict[str, Any], delimiter: str) -> Iterator[tuple[list[str], list[str], int]]:
    """The fields of each row, its lines, and how many lines end with it. A byte is a character."""
    lines: list[str] = []

    def recorded() -> Iterator[str]:
        for line in io.TextIOWrapper(stream, encoding="latin-1", newline=""):
            lines.append(line.replace(delimiter, dialect["delimiter"]))
            yield lines[-1]

    for fields in (reader := csv.reader(recorded(), **dialect)):
        yield fields, lines, reader.line_num
        lines.clear()


def _could_be_row(line: str, dialect: dict[str, Any], num_fields: int) -> bool:
    """Whether a line alone has a row's number of delimiters: all, those outside quotes, or outside closed ones."""
    fields, delimiter = next(csv.reader([line], **dialect), [""]), dialect["delimiter"]
    return num_fields in (1 + line.count(delimiter), len(fields), len(fields) + fields[-1].count(delimiter))


def _is_well_quoted(lines: Sequence[str], dialect: dict[str, Any]) -> bool:
    try:
        return bool(list(csv.reader(lines, strict=True, **dialect)))
    except csv.Error:
        return False
