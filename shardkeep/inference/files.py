"""Files: reads files of any size in chunks, in the form that the training files had, and writes scores."""

# N = rows of a chunk, T = labels

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.arrays import Floats
from shardkeep.base.errors import UserError
from shardkeep.workers.data.conversion.decoding import Chunk, is_text
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.input_files import PARQUET, find_files
from shardkeep.workers.data.sources.csv_files import CsvForm
from shardkeep.workers.data.sources.parquet_files import read_parquet

Told = Callable[[str, float], None]
"""Called with what is read and the share that is done, in [0, 1]."""


def input_files(entries: Sequence[str]) -> list[Path]:
    """The files that `--data` names: files, folders or glob patterns. Raises DataError."""
    return [
        path
        for entry in entries
        for path in find_files(Path.cwd(), [entry], key="--data", kind="parquet" if entry.endswith(PARQUET) else "csv")
    ]


def chunks_of_files(files: Sequence[Path], inputs: Inputs, told: Told, *, extra: Sequence[str] = ()) -> Iterator[Chunk]:
    """The rows of files, in order, in chunks of at most some 100,000 rows. Raises DataError.

    Args:
        extra: Columns besides those that the model reads."""
    columns = list(dict.fromkeys([*inputs.columns(), *extra]))
    total = sum(path.stat().st_size for path in files) or 1
    done = 0
    for path in files:
        size = path.stat().st_size

        def share(part: float, name: str = path.name, before: int = done, size: int = size) -> None:
            told(name, min(1.0, (before + part * size) / total))

        yield from _read(path, inputs)(path, columns, share)
        done += size


def _read(path: Path, inputs: Inputs) -> Any:
    if path.suffix in PARQUET:
        return read_parquet
    form = dict(inputs.reading)
    if form.pop("form", "") != "csv":
        return CsvForm("\t" if ".tsv" in path.suffixes else ",", None).read
    if not form.pop("quoted", True):  # of a model of before `quote`
        form["quote"] = None
    names = form.pop("columns")
    if names is not None:  # the files have no header; the label may be left out
        given = len(CsvForm(columns=None, **form).names(path))
        names = [n for n in names if given == len(names) or n != inputs.layout.label.column]
    return CsvForm(columns=None if names is None else tuple(names), **form).read


class ScoreWriter(Protocol):
    """Writes scores beside kept columns; the file is there when `close` returns."""

    def add(self, scores_NT: Floats, kept: dict[str, pa.Array]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def score_writer(path: Path, labels: Sequence[str], keep: Sequence[str] = ()) -> Iterator[ScoreWriter]:
    """Writes to a file beside `path` and renames it at the end; an error leaves `path` as it was. Raises UserError.

    Args:
        path: Ends in .parquet or .csv.
        labels: One = the column `score`; several = `score_LABEL` for each.
        keep: Names of the columns beside them."""
    if path.suffix not in (*PARQUET, ".csv"):
        raise UserError(f"--out {path}: allowed: a name that ends in .parquet or .csv")
    if path.is_dir() or not path.absolute().parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UserError(f"--out {path}: {wrong}")
    names = ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]
    if twice := [name for name in keep if name in names]:
        raise UserError(f"--keep {twice[0]}: is the name of a column of scores")
    partial = path.with_name(f".{path.name}.partial")
    writer = _Writer(partial, names, parquet=path.suffix in PARQUET)
    try:
        yield writer
        writer.close()
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError, pa.ArrowException):
            writer.close()
        partial.unlink(missing_ok=True)


class _Writer:
    def __init__(self, path: Path, names: Sequence[str], *, parquet: bool) -> None:
        self._path, self._names = path, names
        self._make = pq.ParquetWriter if parquet else pacsv.CSVWriter
        self._writer: Any = None
        self._schema: Any = None

    def add(self, scores_NT: Floats, kept: dict[str, pa.Array]) -> None:
        columns = {name: _writable(values) for name, values in kept.items()}
        columns |= {name: pa.array(scores_NT[:, t]) for t, name in enumerate(self._names)}
        batch = pa.record_batch(columns)
        if self._writer is None:
            self._open(batch.schema)
        self._writer.write_batch(batch if batch.schema.equals(self._schema) else batch.cast(self._schema))

    def close(self) -> None:
        if self._writer is None:
            self._open(pa.schema([(name, pa.float32()) for name in self._names]))
        self._writer.close()

    def _open(self, schema: Any) -> None:
        self._schema = schema
        self._writer = self._make(str(self._path), schema)


def _writable(values: pa.Array) -> pa.Array:
    """Texts of a CSV are read as bytes."""
    if pa.types.is_binary(values.type) and is_text(values.type):
        return values.cast(pa.string())
    return values
