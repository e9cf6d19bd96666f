"""Files: reads files of any size in chunks, in the form that the training files had, and writes scores."""

# N = rows of a chunk, T = labels

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, JobError, UserError, first_line
from shardkeep.base.files import check_out, replacing
from shardkeep.config import JobConfig
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.conversion import Split
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.rules import is_text
from shardkeep.workers.data.input_files import PARQUET, find_files, partition_of
from shardkeep.workers.data.sources.csv_files import CsvForm
from shardkeep.workers.data.sources.parquet_files import column_names, read_parquet

Told = Callable[[str, float], None]
"""Called with what is read and the share that is done, in [0, 1]."""
Side = Literal["train", "eval", "test"]
_SIDES: tuple[Side, ...] = ("train", "eval", "test")
"""By their number in a split."""


def input_files(entries: Sequence[str]) -> list[Path]:
    """The files that `--data` names: files, folders or glob patterns. Raises DataError."""
    return find_files(Path.cwd(), entries, key="--data", kind="") if entries else []


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

        read = read_parquet if path.suffix in PARQUET else _csv_form(path, inputs, columns).read
        yield from read(path, columns, share)
        done += size


def own_rows(
    config: JobConfig, side: Side, inputs: Inputs, told: Told, *, extra: Sequence[str] = ()
) -> tuple[list[Path], Iterator[Chunk]]:
    """The files of a run's own data that have the rows of a side, and these rows, in order: all rows of the side's own
    files, or those of the training files that are on that side and have a label.

    Args:
        inputs: How the model's columns are read, its label included.
        extra: Columns besides those of a sample.

    Raises UserError where there are no such files or rows."""
    data, record, number = config.data, inputs.fitted.split, _SIDES.index(side)
    entries: list[str] = getattr(data, side) or (data.train if record is not None else [])
    files = find_files(Path(data.root), entries, key=f"data.{side}", kind=data.source) if entries else []
    layout = replace(inputs.layout, time=data.time)
    split = Split(record, layout) if record is not None and entries is data.train else None
    if not files or (split is not None and number not in split.sides):
        raise UserError(f"--split {side}: the job has no files of such rows; allowed: --data FILE, or another side")
    columns = [*layout.raw_columns(), *(split.columns if split is not None else []), *extra]
    chunks = chunks_of_files(files, inputs, told, extra=columns)
    return files, chunks if split is None else _on_side(chunks, inputs, split, number)


def _on_side(chunks: Iterator[Chunk], inputs: Inputs, split: Split, side: int) -> Iterator[Chunk]:
    for whole in chunks:
        chunk, label_N = inputs.labelled(whole)
        if len(chunk) and (own_N := split.sides_of(chunk, label_N) == side).any():
            yield chunk.filter(own_N)


def weigh(files: Sequence[Path], inputs: Inputs) -> Inputs:
    """The same inputs; without the column of weights where no file has it. Raises DataError where only some have it."""
    weight, columns = inputs.layout.weight, [*inputs.columns(), *inputs.layout.label_columns]
    if weight is None:
        return inputs
    lacking = [path for path in files if weight not in _column_names(path, inputs, columns)]
    if 0 < len(lacking) < len(files):
        advice = "the model's metrics are weighted by it (data.weight); a column of 1 weighs all rows alike"
        raise DataError(f"{lacking[0]}: has no column {weight}, which other files have; {advice}")
    return replace(inputs, layout=replace(inputs.layout, weight=None)) if lacking else inputs


def _column_names(path: Path, inputs: Inputs, columns: Sequence[str]) -> list[str]:
    names = column_names(path) if path.suffix in PARQUET else _csv_form(path, inputs, columns).names(path)
    return [*names, *partition_of(path)]


def _csv_form(path: Path, inputs: Inputs, columns: Sequence[str]) -> CsvForm:
    """What a CSV file looks like. `columns`: those that are read of it; it may lack others."""
    form = dict(inputs.reading)
    if form.pop("form", "") != "csv":
        return CsvForm("\t" if ".tsv" in path.suffixes else ",", None)
    names = form.pop("columns")
    if names is not None:  # the files have no header; the label may be left out, or the label and the weight
        lacks = len(names) - len(CsvForm(columns=None, **form).names(path))
        unread = [n for n in (*inputs.layout.label_columns, inputs.layout.weight) if n not in columns]
        names = [n for n in names if n not in unread[: max(0, lacks)]]
    return CsvForm(columns=None if names is None else tuple(names), **form)


def as_texts(column: Column, allowed: str) -> pa.Array:
    """The values as large strings, whose bytes need not be UTF-8. Raises DataError, which says what is `allowed`."""
    try:
        return pc.cast(column.values, options=pc.CastOptions(target_type=pa.large_string(), allow_invalid_utf8=True))
    except pa.ArrowNotImplementedError as error:
        raise column.wrong_type(allowed) from error


def _large(kind: pa.DataType) -> pa.DataType:
    """The type that takes in the texts and lists of all writers."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_large(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


@contextlib.contextmanager
def score_writer(path: Path, scores: Mapping[str, pa.DataType], keep: Sequence[str] = ()) -> Iterator[ScoreWriter]:
    """Writes to a file beside `path` and renames it at the end; an error leaves `path` as it was. Raises UserError, and
    JobError where the file cannot be written.

    Args:
        path: Ends in .parquet or .csv.
        scores: Names and types of the columns of scores.
        keep: Names of the columns beside them."""
    if path.suffix not in (*PARQUET, ".csv"):
        raise UserError(f"--out {path}: allowed: a name that ends in .parquet or .csv")
    check_out(path)
    if twice := [name for name in keep if [*scores, *keep].count(name) > 1]:
        raise UserError(f"--keep {twice[0]}: is named twice, or is the name of a column of scores")
    try:
        with (
            replacing([path]) as (partial,),
            partial.open("wb") as file,
            contextlib.closing(ScoreWriter(file, scores, keep, parquet=path.suffix in PARQUET)) as writer,
        ):
            yield writer
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise JobError(f"--out {path}: cannot be written ({why})") from error


class ScoreWriter:
    """Writes scores beside the columns `keep`. In a CSV each value is its text, a list is JSON, and types may differ
    between files."""

    def __init__(
        self, file: BinaryIO, scores: Mapping[str, pa.DataType], keep: Sequence[str], *, parquet: bool
    ) -> None:
        self._file, self._scores, self._keep = file, scores, keep
        self._parquet = parquet
        self._schema: Any = None
        self._writer: Any = None

    def add(self, scores: Sequence[pa.RecordBatch], chunk: Chunk) -> None:
        """Writes the rows of a chunk, whose scores are in parts. Raises DataError for a column that the file cannot
        hold."""
        whole = pa.Table.from_batches(scores).combine_chunks()
        if len(whole) != len(chunk):
            raise JobError(f"{chunk.path}: {len(whole):,} scores for {len(chunk):,} rows")
        columns = {name: self._writable(chunk.column(name)) for name in self._keep}
        columns |= {name: self._text(whole.column(name).chunk(0)) for name in self._scores}
        self._write(pa.record_batch(columns), chunk.path)

    def close(self) -> None:
        """Completes the file."""
        if self._schema is None:
            kinds = dict.fromkeys(self._keep, pa.string()) | dict(self._scores)
            if not self._parquet:
                kinds = dict.fromkeys(kinds, pa.string())
            self._write(pa.RecordBatch.from_pylist([], pa.schema(kinds)), "")
        if self._writer is not None:
            self._writer.close()

    def _text(self, values: pa.Array) -> pa.Array:
        """A list as JSON, in a CSV."""
        if self._parquet or not pa.types.is_list(values.type):
            return values
        numbers, flat = pa.types.is_floating(values.type.value_type), values.flatten()
        texts = flat.cast(pa.string()).to_pylist() if numbers else map(json.dumps, flat.to_pylist())
        ends, each = values.offsets.to_pylist(), list(texts)
        return pa.array([f"[{', '.join(each[a:b])}]" for a, b in itertools.pairwise(ends)], pa.string())

    def _writable(self, column: Column) -> pa.Array:
        if not self._parquet:
            texts, kind = as_texts(column, "one value a row, or --out FILE.parquet"), column.values.type
            return texts if is_text(kind) or pa.types.is_fixed_size_binary(kind) else column.values
        try:
            return column.values.cast(_large(column.values.type if column.path.endswith(PARQUET) else pa.string()))
        except pa.ArrowInvalid as error:
            raise column.wrong_type("texts in UTF-8, or --out FILE.csv, which keeps all bytes") from error

    def _write(self, batch: pa.RecordBatch, path: str) -> None:
        first, self._schema = self._schema is None, self._schema or batch.schema
        if not self._parquet:
            pacsv.write_csv(batch, self._file, pacsv.WriteOptions(include_header=first))
            return
        for now, then in zip(batch.schema, self._schema, strict=True):
            if now.type not in (then.type, pa.null()):
                what = f"holds {now.type}, and {then.type} in the files before"
                raise DataError(f"{path}, column {now.name}: {what}; allowed: one type, or --out FILE.csv")
        self._writer = self._writer or pq.ParquetWriter(self._file, self._schema)
        self._writer.write_batch(batch.cast(self._schema))
