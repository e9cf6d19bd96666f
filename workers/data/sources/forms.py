"""FileForm: the one way to read data files of any kind: names, schema, and rows in chunks.

It keeps raw values. The form of a value is in conversion/rules.py."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, first_line
from shardkeep.workers.data.conversion.chunk import MOST_ROWS, Chunk, check_columns, missing_column, plain
from shardkeep.workers.data.input_files import files_of, partition_of
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sources.column_patterns import named_columns
from shardkeep.workers.data.sources.csv_files import CsvFiles, csv_of
from shardkeep.workers.data_config import DIALECT, DataConfig, refuse
from shardkeep.workers.file_kinds import kind_of
from shardkeep.workers.model_config import RetrievalSettings


class FileKind(Protocol):
    """Reads files of one kind. Raises DataError, or what pyarrow raises."""

    def schema(self, path: Path) -> pa.Schema:
        """The columns of a file."""
        ...

    def batches(self, path: Path, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
        """The rows of a file in order, at least the named columns, and the share of it that is read, in [0, 1]."""
        ...


@dataclass(frozen=True)
class FileForm:
    """How files are read.

    Attributes:
        reading: What a model stores of it, in JSON: the kind, how a CSV is written, and `absent: missing` where columns
            may be absent."""

    kind: FileKind
    reading: Mapping[str, Any]

    @property
    def fills(self) -> bool:
        """Whether a column that a file lacks is missing values there."""
        return self.reading.get("absent") == "missing"

    def names(self, path: Path) -> list[str]:
        """Names of all columns of a file, without those of its folders. Raises DataError."""
        return list(self._own(path).names)

    def schema(self, path: Path) -> pa.Schema:
        """The columns of a file with their types, and those of its folders, which are texts; all columns of a CSV are
        bytes. Raises DataError."""
        own = self._own(path)
        for name in partition_of(path):
            own = own if name in own.names else own.append(pa.field(name, pa.string()))
        return own

    def read(self, path: Path, columns: Sequence[str], progress: Callable[[float], None]) -> Iterator[Chunk]:
        """Yields a file's rows, the named columns only. A column that it lacks is null, or refused: see `fills`.

        `progress` receives the share of the file that is read, in [0, 1]. Raises DataError."""
        schema, done = self._own(path), 0
        folders = {name: pa.scalar(value, pa.string()) for name, value in partition_of(path).items()}
        placed = {name: folders[name] for name in columns if name in folders and name not in schema.names}
        lacking = [name for name in columns if self.fills and name not in placed and name not in schema.names]
        own = [name for name in columns if name not in placed and name not in lacking]
        check_columns(str(path), own, schema, self.advice(schema.names))
        with readable(path, self.reading["form"]):
            for batch, share in self.kind.batches(path, own or schema.names[:1]):
                rows_N = np.arange(done + 1, done + 1 + len(batch), dtype=np.int64)
                done += len(batch)
                progress(share)
                values = {name: plain(batch.column(name)) for name in own}
                values |= {name: pa.repeat(value, len(batch)) for name, value in placed.items()}
                values |= {name: pa.nulls(len(batch)) for name in lacking}
                yield Chunk(str(path), rows_N, values, self.reading.get("decimal", "."))

    def _own(self, path: Path) -> pa.Schema:
        with readable(path, self.reading["form"]):
            return self.kind.schema(path)

    def advice(self, names: Sequence[str]) -> str:
        """What a message about a missing column adds, by the names of all."""
        return self.kind.advice(names) if isinstance(self.kind, CsvFiles) else ""


def form_of(config: DataConfig) -> FileForm:
    """How the files of a job are read. Raises ConfigError for characters of a CSV that do not go together."""
    absent = {} if config.absent == "error" else {"absent": config.absent}
    return csv_form(csv_of(config), absent) if config.source == "csv" else _typed_form(config.source, absent)


def form_of_file(path: Path, reading: Mapping[str, Any], unread: Sequence[str] = ()) -> FileForm:
    """How a file is read for a model: as its training files, or by its own kind. The dialect of a CSV is found where
    those were of another kind. Raises DataError.

    Args:
        reading: As of the training files, or with another dialect.
        unread: Columns that a file without a header may lack."""
    kind, absent = kind_of(path), {key: value for key, value in reading.items() if key == "absent" and value}
    if kind not in ("", "csv"):
        return _typed_form(kind, absent)
    own: dict[str, Any] = {key: value for key, value in reading.items() if key in DIALECT}
    if reading["form"] != "csv":
        from shardkeep.workers.data.sources.csv_dialect import dialect_of

        own = ({"delimiter": "\t"} if ".tsv" in path.suffixes else {}) | own
        with contextlib.suppress(DataError):  # where it is not clear, the columns show it
            own |= dialect_of(path, DataConfig(source="csv", **own))
    files = csv_of(DataConfig(source="csv", **own))
    if files.columns is not None and unread:
        lacks = len(files.columns) - len(replace(files, columns=None).schema(path))
        left_out = unread[: max(0, lacks)]
        files = replace(files, columns=tuple(name for name in files.columns if name not in left_out))
    return csv_form(files, absent)


def csv_form(files: CsvFiles, more: Mapping[str, Any] = {}) -> FileForm:
    """How CSV files that are written so are read."""
    return FileForm(files, {"form": "csv", **asdict(files), **more})


def _typed_form(kind: str, more: Mapping[str, Any]) -> FileForm:
    module = importlib.import_module(f"shardkeep.workers.data.sources.{kind}_files")
    return FileForm(cast(FileKind, module), {"form": kind, **more})


def absences(forms: Mapping[Path, FileForm], columns: Sequence[str], needed: Sequence[str]) -> list[str]:
    """A line for each column that some of the files lack, where that is allowed. Raises DataError for one of `needed`
    that all lack, and for a file with none of the columns."""
    names = {path: {*form.schema(path).names} for path, form in forms.items() if form.fills}
    for path, own in names.items():
        if own.isdisjoint(columns):
            raise missing_column(str(path), columns[0], sorted(own), forms[path].advice(sorted(own)))
    lines = []
    for column in columns:
        without = [path for path, own in names.items() if column not in own]
        if without and len(without) == len(names) and column in needed:
            place = f"{without[0]}{f' and {len(without) - 1} more' if without[1:] else ''}"
            raise missing_column(place, column, sorted(set[str]().union(*names.values())))
        if without:
            lack = f"{len(without):,} of {len(names):,} files lack it, such as {without[0].name}"
            lines.append(f"column {column}: {lack}; its values there are missing (data.absent)")
    return lines


def open_files(
    config: DataConfig, *, seed: int, progress: Progress | None, items: RetrievalSettings | None = None
) -> Data:
    """The sources of files. Raises DataError for what is wrong with the files, ConfigError for the settings."""
    # here: an excerpt of files is read without kernels
    from shardkeep.workers.data.conversion.layout import layout_of
    from shardkeep.workers.data.store.opening import open_stored

    refuse(config, ("synthetic", "options", *(() if config.source == "csv" else DIALECT)))
    form = form_of(config)
    config = named_columns(config, lambda: header(config))
    layout = layout_of(config, labelled=items is None)
    columns, (paths, held) = layout.raw_columns(), files_of(config)
    notes = absences(dict.fromkeys(paths, form), columns, columns)
    notes += absences(dict.fromkeys(held, form), columns, layout.label_columns)
    data = open_stored(config, layout, form, seed=seed, progress=progress, items=items)
    return replace(data, notes=(*data.notes, *notes))


def header(config: DataConfig) -> list[str]:
    """Names of all columns: those of the first file, or of all training files where they may differ."""
    form, (paths, _) = form_of(config), files_of(config)
    return list(dict.fromkeys(name for path in paths[: None if form.fills else 1] for name in form.names(path)))


@contextlib.contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Puts the file before what pyarrow raises while it is read, as a DataError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if path.exists() and path.stat().st_size == 0:
            raise DataError(f"{path}: is empty") from error
        raise DataError(f"{path}: cannot be read as {kind} ({first_line(error)})") from error


def sized(batches: Iterable[tuple[pa.RecordBatch, float]]) -> Iterator[tuple[pa.RecordBatch, float]]:
    """The same rows in batches of about `MOST_ROWS`: some writers make batches of 1,000 rows, others of all."""
    held, rows = list[pa.RecordBatch](), 0
    for batch, share in batches:
        held.append(pa.record_batch([plain(values) for values in batch.columns], batch.schema.names))
        rows += len(batch)
        if rows >= MOST_ROWS:
            yield from ((one, share) for one in _cut(held))
            held, rows = [], 0
    yield from ((one, 1.0) for one in _cut(held))


def _cut(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return pa.Table.from_batches(batches).combine_chunks().to_batches(MOST_ROWS) if batches else []
