"""The source `csv`: delimited text, plain or compressed, streamed in blocks. Columns come out as bytes, unparsed."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]

from shardkeep.base.errors import ConfigError, DataError, first_line
from shardkeep.base.logs.log import EventLog
from shardkeep.workers.data.conversion.chunk import Chunk, missing_column
from shardkeep.workers.data.input_files import columns_of_folders, first_file
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data.sources.csv_lines import CountedLines, check_lines
from shardkeep.workers.data_config import DataConfig, refuse
from shardkeep.workers.model_config import RetrievalSettings

BLOCK_BYTES = 1 << 24  # a row must fit; also what one read holds in memory
UNIT = b"\x1f"  # ASCII's unit separator represents a delimiter of several characters
COMPRESSIONS = {
    ".gz": ("gzip", b"\x1f\x8b"),
    ".bz2": ("bz2", b"BZh"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
    ".lz4": ("lz4", b"\x04\x22\x4d\x18"),
}
_log = EventLog("data")
_OnWrong = Callable[[Any], str]
"""Says of a row with too many or too few fields whether it is an error or skipped."""


def open_csv(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The source `csv`. Raises DataError for what is wrong with the files, ConfigError for the settings."""
    # here: an excerpt of files is read without kernels
    from shardkeep.workers.data.cache.cache import open_cached
    from shardkeep.workers.data.conversion.layout import layout_of

    refuse(config, ("synthetic", "options"))
    form, config = form_of(config), named_columns(config, lambda: header(config))
    layout = layout_of(config, labelled=items is None)
    return open_cached(config, layout, form.read, reading=form.reading(), seed=seed, progress=progress, items=items)


def header(config: DataConfig) -> list[str]:
    """Names of all columns of the first file."""
    return form_of(config).names(first_file(config))


def form_of(config: DataConfig) -> CsvForm:
    """Raises ConfigError for characters that do not go together."""
    delimiter, quote, escape = config.delimiter, config.quote, config.escape
    if len(delimiter) > 1:
        if (quote, escape) != ('"', None):
            raise ConfigError("data.quote and data.escape: have no effect with a data.delimiter of several characters")
        quote = None
    if len({delimiter, quote, escape}) < 3 and (quote, escape) != (None, None):
        raise ConfigError("data.delimiter, data.quote and data.escape: are not three characters")
    return CsvForm(delimiter, tuple(config.columns) if config.columns else None, quote, escape, config.decimal)


@dataclass(frozen=True)
class CsvForm:
    """What the files look like. `columns`: names of all columns; None = the first line has them."""

    delimiter: str
    columns: tuple[str, ...] | None
    quote: str | None = '"'
    escape: str | None = None
    decimal: str = "."

    def reading(self) -> dict[str, Any]:
        """What the cache is keyed by."""
        return {"form": "csv", **asdict(self)}

    def names(self, path: Path) -> list[str]:
        """Names of all columns of a file."""
        return self._header(path, first_bytes(path, compression_of(path)))[0]

    def read(self, path: Path, columns: Sequence[str], progress: Callable[[float], None]) -> Iterator[Chunk]:
        """Yields the file's rows, the named columns only, as bytes; blank lines are no rows."""
        compression = compression_of(path)
        names, lines = self._header(path, first_bytes(path, compression))
        placed = columns_of_folders(path, columns, names)
        columns = [name for name in columns if name not in placed]
        for column in columns:
            if column not in names:
                raise missing_column(str(path), column, names, self._delimiter_hint(names))
            if (times := names.count(column)) > 1:
                raise DataError(f"{path}: {times} columns are called {column}; give all columns names in data.columns")
        size, done, blank, marked = path.stat().st_size, 0, BlankRows(), self.quote or self.escape
        with path.open("rb") as raw:
            try:
                stream = pa.input_stream(raw, compression=compression)
                stream = CountedLines(stream, self.dialect()) if marked else stream
                for batch in _quietly(self._batches, blank, stream, columns, names, lines):
                    if marked and stream.spoiled <= done + len(batch):  # Arrow may have read further
                        self._check_lines(path, len(names), lines, spoiled=True)
                    rows_N = np.arange(done + 1, done + 1 + len(batch), dtype=np.int64)
                    done += len(batch)
                    progress(min(1.0, raw.tell() / max(1, size)))
                    values = dict(zip(batch.schema.names, batch.columns, strict=True))
                    values |= {name: pa.repeat(value, len(batch)) for name, value in placed.items()}
                    yield Chunk(str(path), rows_N, values, self.decimal)
            except (pa.ArrowInvalid, OSError) as error:
                if not str(error).startswith(("Empty CSV", "Could not skip initial")):  # nothing after the header
                    self._check_lines(path, len(names), lines, spoiled=bool(marked))
                    raise DataError(f"{path}, after row {done}: {_reason(error)}") from error
        if marked and ((held := stream.lines - blank.count - (lines > 0)) != done or stream.spoiled < math.inf):
            rows, spanning = self._check_lines(path, len(names), lines, spoiled=stream.spoiled < math.inf)
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

    def _check_lines(self, path: Path, num_fields: int, header_lines: int, *, spoiled: bool) -> tuple[int, int]:
        """As of `check_lines`; none of a file that cannot be read to its end. Raises DataError."""
        delimiter = self.delimiter.encode().decode("latin-1")
        form: dict[str, Any] = {"delimiter": delimiter, "num_fields": num_fields, "header": header_lines}
        with contextlib.suppress(OSError, ValueError, csv.Error), path.open("rb") as raw:
            stream = pa.input_stream(raw, compression=compression_of(path))
            return check_lines(str(path), stream, self.dialect(), spoiled=spoiled, **form)
        return 0, 0

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
                use_threads=False, block_size=BLOCK_BYTES, column_names=unique, skip_rows=lines
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

    def _header(self, path: Path, start: bytes) -> tuple[list[str], int]:
        """The names of all columns, and how many lines at the top are no data."""
        if not start.strip():
            raise DataError(f"{path}: is empty")
        start = start.removeprefix(b"\xef\xbb\xbf")
        dialect = self.dialect()
        text = start.replace(self.delimiter.encode(), dialect["delimiter"].encode()).decode("latin-1")
        reader = csv.reader(io.StringIO(text, newline=""), **dialect)
        try:
            first = next(([_name(f) for f in row] for row in reader if any(f.strip() for f in row)), [])
        except csv.Error as error:
            raise DataError(f"{path}: the first line cannot be read ({error})") from error
        if self.columns is None or list(self.columns) == first:
            return first, reader.line_num
        if len(first) != len(self.columns):
            held = f"has {len(first)} fields with delimiter {self.delimiter!r}, expected {len(self.columns)}"
            raise DataError(f"{path}, row 1: {held}{self._delimiter_hint(first)}")
        return list(self.columns), 0

    def _delimiter_hint(self, names: list[str]) -> str:
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


def _quietly(open_batches: Callable[..., Any], bad: _OnWrong, *args: Any) -> Iterator[pa.RecordBatch]:
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


def _reason(error: Exception) -> str:
    text = first_line(error)
    if "straddling" in text:
        return f"a row is longer than {BLOCK_BYTES >> 20} MB, or a quote is opened and never closed"
    if any(word in text for word in ("runcated", "inflate", "EOF", "decompress")):
        return f"the compressed file is truncated or damaged ({text})"
    return f"cannot be read ({text})"


def compression_of(path: Path) -> str | None:
    """How a file is compressed; None = it is not. Raises DataError."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    for suffix, (name, magic) in COMPRESSIONS.items():
        if start.startswith(magic):
            return name
        if path.suffix == suffix and start:
            raise DataError(f"{path}: ends in {suffix} but does not hold {name} data")
    return None


def first_bytes(path: Path, compression: str | None) -> bytes:
    """The first MB of the text, unpacked. Raises DataError where it is not text."""
    try:
        with path.open("rb") as raw:
            start = bytes(pa.input_stream(raw, compression=compression).read(1 << 20))
    except OSError as error:
        raise DataError(f"{path}: {_reason(error)}") from error
    if start[:4] == b"PAR1":
        raise DataError(f"{path}: is a parquet file; use data.source: parquet")
    if start[:4] == b"PK\x03\x04":
        raise DataError(f"{path}: is a zip archive or a spreadsheet; unpack it, or save it as csv")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: is text in UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if b"\0" in start:
        raise DataError(f"{path}: is binary, not delimited text (byte {start.index(0)} is 0)")
    return start
