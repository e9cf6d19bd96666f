"""The source `csv`: delimited text, plain or compressed, streamed in blocks. Columns come out as bytes, unparsed."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.logs.log import EventLog
from shardkeep.workers.data.sources import text_files
from shardkeep.workers.data.sources.csv_lines import CountedLines, check_lines
from shardkeep.workers.data.sources.text_files import compression_of, first_bytes, reason
from shardkeep.workers.data_config import DataConfig

UNIT = b"\x1f"  # ASCII's unit separator represents a delimiter of several characters
_log = EventLog("data")


def csv_of(config: DataConfig) -> CsvFiles:
    """Raises ConfigError for characters that do not go together."""
    delimiter, quote, escape = config.delimiter, config.quote, config.escape
    if len(delimiter) > 1:
        if (quote or '"', escape) != ('"', None):
            raise ConfigError("data.quote and data.escape: have no effect with a data.delimiter of several characters")
        quote = None
    if len({delimiter, quote, escape}) < 3 and (quote, escape) != (None, None):
        raise ConfigError("data.delimiter, data.quote and data.escape: are not three characters")
    return CsvFiles(delimiter, tuple(config.columns) if config.columns else None, quote, escape, config.decimal)


@dataclass(frozen=True)
class CsvFiles:
    """What the files look like. `columns`: names of all columns; None = the first line has them."""

    delimiter: str
    columns: tuple[str, ...] | None
    quote: str | None = '"'
    escape: str | None = None
    decimal: str = "."

    def schema(self, path: Path) -> pa.Schema:
        """The columns of a file, all of bytes. Raises DataError."""
        names, _ = self._header(path)
        return pa.schema([(name, pa.binary()) for name in names])

    def batches(self, path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
        """Yields the file's rows, the named columns only, as bytes, and the share of it that is read; blank lines are
        no rows. Raises DataError."""
        names, lines = self._header(path)
        check = functools.partial(check_lines, path, self.dialect(), self.delimiter, len(names), lines)
        size, done, blank, marked = path.stat().st_size, 0, BlankRows(), self.quote or self.escape
        with path.open("rb") as raw:
            try:
                stream = pa.input_stream(raw, compression=compression_of(path))
                stream = CountedLines(stream, self.dialect()) if marked else stream
                for batch in _quietly(self._batches, blank, stream, columns, names, lines):
                    if marked and stream.spoiled <= done + len(batch):  # Arrow may have read further
                        check(spoiled=True)
                    done += len(batch)
                    yield batch, min(1.0, raw.tell() / max(1, size))
            except (pa.ArrowInvalid, OSError) as error:
                if not str(error).startswith(("Empty CSV", "Could not skip initial")):  # nothing after the header
                    check(spoiled=bool(marked))
                    raise DataError(f"{path}, after row {done}: {reason(error)}") from error
        if marked and ((held := stream.lines - blank.count - (lines > 0)) != done or stream.spoiled < math.inf):
            rows, spanning = check(spoiled=stream.spoiled < math.inf)
            if rows != done:
                raise DataError(f"{path}: has {rows:,} rows, and {done:,} were read; is a quote in the wrong place?")
            if spanning:
                _log.warning(f"{path}: {held:,} lines are {rows:,} rows (rows of several lines: {spanning:,})")

    def rows_within(self, text: bytes, names: list[str]) -> pa.Table:
        """The rows of some lines of a file, as bytes; those with too many or too few fields are left out."""
        with contextlib.suppress(pa.ArrowInvalid):
            stream = pa.BufferReader(text)
            return pa.Table.from_batches(list(_quietly(self._batches, lambda _: "skip", stream, names, names, 0)))
        return pa.table({name: pa.array([], pa.binary()) for name in names})

    def dialect(self) -> dict[str, Any]:
        """As Python's csv has it; one byte represents a delimiter of several characters."""
        delimiter = self.delimiter if len(self.delimiter) == 1 else UNIT.decode()
        quoting = csv.QUOTE_NONE if self.quote is None else csv.QUOTE_MINIMAL
        return {"delimiter": delimiter, "quotechar": self.quote or '"', "escapechar": self.escape, "quoting": quoting}

    def _batches(
        self, bad: Callable[[Any], str], stream: Any, columns: Sequence[str], names: list[str], lines: int
    ) -> Any:
        unique = [name if names.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(names)]
        if len(self.delimiter) > 1:
            stream = OneByteDelimiter(stream, self.delimiter.encode())
        return pacsv.open_csv(
            stream,
            read_options=pacsv.ReadOptions(
                use_threads=False, block_size=text_files.BLOCK_BYTES, column_names=unique, skip_rows=lines
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=self.dialect()["delimiter"],
                quote_char=self.quote or False,
                escape_char=self.escape or False,
                newlines_in_values=bool(self.quote or self.escape),
                invalid_row_handler=bad,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.binary()),
                include_columns=list(columns),
                strings_can_be_null=False,
            ),
        )

    def _header(self, path: Path) -> tuple[list[str], int]:
        """The names of all columns, and how many lines at the top are no data."""
        dialect = self.dialect()
        text = first_bytes(path).replace(self.delimiter.encode(), dialect["delimiter"].encode()).decode("latin-1")
        reader = csv.reader(io.StringIO(text, newline=""), **dialect)
        try:
            first = next(([_name(f) for f in row] for row in reader if any(f.strip() for f in row)), [])
        except csv.Error as error:
            raise DataError(f"{path}: the first line cannot be read ({error})") from error
        if self.columns is None or list(self.columns) == first:
            return first, reader.line_num
        if len(first) != len(self.columns):
            held = f"has {len(first)} fields with delimiter {self.delimiter!r}, expected {len(self.columns)}"
            raise DataError(f"{path}, row 1: {held}{self.advice(first)}")
        return list(self.columns), 0

    def advice(self, names: Sequence[str]) -> str:
        """What a message about a missing column adds, where the delimiter may be another one."""
        near = [c for c in (",", ";", "\t", "|") if c != self.delimiter and c in "".join(names)]
        return f"; is data.delimiter {near[0]!r}, not {self.delimiter!r}?" if near and len(names) == 1 else ""


class OneByteDelimiter:
    """A stream of text whose delimiter of several characters is replaced by one byte as it is read."""

    closed = False

    def __init__(self, stream: Any, delimiter: bytes) -> None:
        self._stream, self._delimiter = stream, delimiter
        self._cut = b""  # what may be the first part of a delimiter

    def read(self, size: int) -> bytes:
        """At most `size` bytes, which must be no fewer than the delimiter has; none at the end only."""
        while True:
            fresh = bytes(self._stream.read(max(1, size - len(self._cut))))
            text = (self._cut + fresh).replace(self._delimiter, UNIT)
            held = range(len(self._delimiter) - 1, 0, -1) if fresh else ()
            kept = next((n for n in held if text.endswith(self._delimiter[:n])), 0)
            text, self._cut = text[: len(text) - kept], text[len(text) - kept :]
            if text or not fresh:
                return text

    def close(self) -> None:
        self.closed = True


@dataclass
class BlankRows:
    """Skips rows of spaces only; any other row with too many or too few fields ends the reading."""

    count: int = 0

    def __call__(self, row: Any) -> str:
        if row.text.strip():
            return "error"
        self.count += 1
        return "skip"


def _quietly(open_batches: Callable[..., Any], bad: Callable[[Any], str], *args: Any) -> Iterator[pa.RecordBatch]:
    """The batches. pyarrow hands a wrong row over as text; where it is no UTF-8, Python prints a traceback and pyarrow
    continues to the error, so nothing is lost by leaving that out."""

    def hook(unraisable: Any) -> None:
        if unraisable.object is not bad:
            before(unraisable)

    batches: Any = None
    while True:
        before, sys.unraisablehook = sys.unraisablehook, hook
        try:
            batches = batches if batches is not None else iter(open_batches(bad, *args))
            batch = next(batches, None)
        finally:
            sys.unraisablehook = before
        if batch is None:
            return
        yield batch


def _name(field: str) -> str:
    """A header's field from its bytes: UTF-8, or else Latin-1."""
    try:
        return field.encode("latin-1").decode("utf-8").strip()
    except UnicodeDecodeError:
        return field.strip()
