"""Lines of delimited text: their number, and the check of rows that span several of them."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.errors import DataError
from shardkeep.workers.data.sources.text_files import BOM, compression_of

LONGEST_FIELD = 1 << 24  # characters; Python's limit is 131,072
PART_BYTES = 1 << 16  # the caches of a core hold so much


_OPEN = "a quote is opened and never closed before a delimiter"


class CountedLines:
    """A stream of text that counts its lines as they are read; blank ones, of no character, are left out. `spoiled`:
    within so many lines a quote does not close at the end of its field; inf = all do so far."""

    closed = False

    def __init__(self, stream: Any, dialect: dict[str, Any]) -> None:
        quote = None if dialect["quoting"] == csv.QUOTE_NONE else dialect["quotechar"]
        marks = (dialect["delimiter"], quote, dialect["escapechar"])
        self.lines, self.spoiled = 0, math.inf
        self._stream, self._marks = stream, [-1 if mark is None else ord(mark) for mark in marks]
        self._first, self._between, self._state = True, True, 0

    def read(self, size: int) -> pa.Buffer:
        """At most `size` bytes; none at the end only."""
        block = self._stream.read_buffer(size)
        text_N = np.frombuffer(block, np.uint8)
        text_N, self._first = text_N[len(BOM) * (self._first and text_N[: len(BOM)].tobytes() == BOM) :], False
        for part_N in np.split(text_N, range(PART_BYTES, text_N.size, PART_BYTES)):
            if part_N.size:
                end_N = (part_N == ord("\n")) | (part_N == ord("\r"))
                self.lines += int(np.count_nonzero(end_N[:-1] > end_N[1:])) + int(self._between > end_N[0])
                self._between = bool(end_N[-1])
            self._follow_quotes(part_N, at_end=not block.size)
        return block

    def _follow_quotes(self, part_N: NDArray[np.uint8], *, at_end: bool) -> None:
        delimiter, quote, escape = self._marks
        if self._state in (0, 1) and escape < 0 and not (part_N == quote).any():
            self._state = int(not self._between and part_N[-1] != delimiter) if part_N.size else self._state
        elif self._state >= 0:
            from shardkeep.workers.data.sources.csv_kernels import quote_state  # here: init reads most files without

            self._state = quote_state(part_N, self._state, delimiter, quote, escape, at_end)
            self.spoiled = self.lines if self._state < 0 else self.spoiled

    def close(self) -> None:
        self.closed = True


def check_lines(
    path: Path, dialect: dict[str, Any], delimiter: str, num_fields: int, header: int, *, spoiled: bool
) -> tuple[int, int]:
    """The number of rows behind the lines of the header, from 1, and of rows that span lines; (0, 0) of a file that
    cannot be read to its end.

    Raises DataError for a row with too many or too few fields, and for one whose quote is not closed before a
    delimiter (`spoiled`: of one line, too). Also for lines in quotes that each have a row's fields, as a quote that is
    part of a text joins them, unless another row shows that texts of this file do span lines."""
    rows, spanning, others, doubt = 0, 0, False, None
    unreadable = contextlib.suppress(OSError, ValueError, csv.Error)
    with contextlib.ExitStack() as after, unreadable, path.open("rb") as raw:
        after.callback(csv.field_size_limit, csv.field_size_limit(LONGEST_FIELD))
        stream = pa.input_stream(raw, compression=compression_of(path))
        for fields, lines, number in _rows(stream, dialect, delimiter.encode().decode("latin-1")):
            right, whole = len(fields) == num_fields, "".join(lines).encode("latin-1")
            odd = (len(lines) > 1 or spoiled) and _is_spoiled(whole, dialect)
            text = "" if right and len(lines) == 1 and not odd else whole.decode("utf-8", "replace").strip()
            rows += number > header and (right or text != "")
            if not text:
                continue
            place, shown = f"{path}, row {rows}" if rows else f"{path}, the header", f"({text[:60]!r})"
            if odd or len(lines) > 1:
                spanning, shown = spanning + 1, f"{shown}; if quotes are part of the texts: data.quote: none"
                escape = ", or if \\ stands before them: data.escape: '\\'" if '\\"' in text else ""
                if odd:
                    over = f", over {len(lines)} lines" if lines[1:] else ""
                    raise DataError(f"{place}: {_OPEN}{over} {shown}{escape}")
                if not all(_could_be_row(line, dialect, num_fields) for line in lines if line.strip()):
                    others = True
                elif doubt is None:
                    what = f"a quote joins {len(lines)} lines, and each has the {num_fields} fields of a row"
                    shown += f"{escape}; if the text is right, store the data as parquet"
                    doubt = DataError(f"{place}: {what} {shown}")
            if not right and rows:
                raise DataError(f"{place}: has {len(fields)} fields, expected {num_fields} {shown}")
        if doubt is not None and not others:
            raise doubt
        return rows, spanning
    return 0, 0


def _rows(stream: Any, dialect: dict[str, Any], delimiter: str) -> Iterator[tuple[list[str], list[str], int]]:
    """The fields of each row, its lines, and how many lines end with it. A byte is a character."""
    lines: list[str] = []

    def recorded() -> Iterator[str]:
        for line in io.TextIOWrapper(stream, encoding="latin-1", newline=""):
            lines.append(line.removeprefix(BOM.decode("latin-1")).replace(delimiter, dialect["delimiter"]))
            yield lines[-1]

    for fields in (reader := csv.reader(recorded(), **dialect)):
        yield fields, lines, reader.line_num
        lines.clear()


def _is_spoiled(row: bytes, dialect: dict[str, Any]) -> bool:
    stream = CountedLines(pa.BufferReader(row), dialect)
    while stream.read(LONGEST_FIELD).size:
        pass
    return stream.spoiled < math.inf


def _could_be_row(line: str, dialect: dict[str, Any], num_fields: int) -> bool:
    r"""Whether a line alone has a row's number of delimiters: all, those outside quotes, or outside closed ones; or
    outside quotes that have \ before those of their texts."""
    fields, delimiter = next(csv.reader([line], **dialect), [""]), dialect["delimiter"]
    escaped = next(csv.reader([line], **dialect | {"escapechar": dialect["escapechar"] or "\\"}), [""])
    counts = 1 + line.count(delimiter), len(fields), len(fields) + fields[-1].count(delimiter), len(escaped)
    return num_fields in counts
