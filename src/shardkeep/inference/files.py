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

from shardkeep.base.errors import ConfigError, DataError, JobError, UserError, first_line
from shardkeep.base.files import check_out, replacing
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig, parse_config
from shardkeep.config.overrides import Override
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.rules import is_text
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.fitting.split import Split
from shardkeep.workers.data.input_files import PARQUET, find_files, own_files
from shardkeep.workers.data.sources.csv_files import csv_of
from shardkeep.workers.data.sources.forms import absences, form_of_file
from shardkeep.workers.data_config import DIALECT
from shardkeep.workers.file_kinds import kind_of

_log = EventLog("data")
Told = Callable[[str, float], None]
"""Called with what is read and the share that is done, in [0, 1]."""
Side = Literal["train", "eval", "test"]


def input_files(entries: Sequence[str]) -> list[Path]:
    """The files that `--data` names: files, folders or glob patterns. Raises DataError."""
    return find_files(Path.cwd(), entries, key="--data", kind="") if entries else []


def in_dialect(inputs: Inputs, files: Sequence[Path], settings: Sequence[str]) -> Inputs:
    """The inputs for CSV files that are written in another way than those of training.

    Args:
        settings: Keys of `data`, as `data.delimiter=;`.

    Raises ConfigError."""
    if not settings:
        return inputs
    keys = [Override.parse(text).keys for text in settings]
    for text, (group, *key) in zip(settings, keys, strict=True):
        if group != "data" or key not in [[name] for name in DIALECT]:
            raise ConfigError(f"--set {text}: allowed: {', '.join(f'data.{name}' for name in DIALECT)}")
    if not any(kind_of(path) in ("", "csv") for path in files):
        raise ConfigError(f"--set {settings[0]}: has no effect, no file is a CSV")
    data = parse_config("", settings, judged="nothing").data
    csv_of(data)
    return replace(inputs, reading={**inputs.reading, **{name: getattr(data, name) for _, name in keys}})


def chunks_of_files(files: Sequence[Path], inputs: Inputs, told: Told, *, extra: Sequence[str] = ()) -> Iterator[Chunk]:
    """The rows of files, in order, in chunks of at most some 100,000 rows. Raises DataError.

    Args:
        extra: Columns besides those that the model reads."""
    columns = list(dict.fromkeys([*(own := inputs.columns()), *extra]))
    forms = {path: form_of_file(path, inputs.reading, _unread(inputs, columns)) for path in files}
    for note in absences(forms, columns, [name for name in extra if name not in own]):
        _log.warning(note)
    sizes, done = [path.stat().st_size for path in forms], 0
    for (path, form), size in zip(forms.items(), sizes, strict=True):

        def share(part: float, name: str = path.name, before: int = done, size: int = size) -> None:
            told(name, min(1.0, (before + part * size) / (sum(sizes) or 1)))

        yield from form.read(path, columns, share)
        done += size


def _unread(inputs: Inputs, columns: Sequence[str]) -> list[str]:
    """The columns of a label or weight that are not read, and that files may lack."""
    return [n for n in (*inputs.layout.label_columns, inputs.layout.weight) if n is not None and n not in columns]


def own_rows(
    config: JobConfig, side: Side, inputs: Inputs, told: Told, *, extra: Sequence[str] = ()
) -> tuple[list[Path], Iterator[Chunk]]:
    """The files of a run's own data that have the rows of a side, and these rows, in order: all rows of the side's own
    files, or those of the training files that are on that side and have a label.

    Args:
        inputs: How the model's columns are read, its label included.
        extra: Columns besides those of a sample.

    Raises UserError where there are no such files or rows."""
    data, record, number = config.data, inputs.fitted.split, ("train", "eval", "test").index(side)
    parted = record is not None and (side == "train" or not getattr(data, side))
    own: Side = "train" if parted else side
    files = own_files(data, own) if getattr(data, own) else []
    split = Split(record, replace(inputs.layout, time=data.time)) if parted and record is not None else None
    if not files or (split is not None and number not in split.sides):
        raise UserError(f"--split {side}: the job has no files of such rows; allowed: --data FILE, or another side")
    decided = [] if split is None else [name for reader in split.readers(inputs.fitted) for name in reader.columns]
    columns = [*inputs.layout.raw_columns(), *decided, *extra]
    chunks = chunks_of_files(files, inputs, told, extra=columns)
    return files, chunks if split is None else _on_side(chunks, inputs, split, number)


def _on_side(chunks: Iterator[Chunk], inputs: Inputs, split: Split, side: int) -> Iterator[Chunk]:
    for whole in chunks:
        chunk, _ = inputs.labelled(whole)
        if len(chunk) and (own_N := split.parted([chunk], inputs.fitted) == side).any():
            yield chunk.filter(own_N)


def weigh(files: Sequence[Path], inputs: Inputs) -> Inputs:
    """The same inputs; without the column of weights where no file has it. Raises DataError where only some have it."""
    weight, unread = inputs.layout.weight, _unread(inputs, [*inputs.columns(), *inputs.layout.label_columns])
    if weight is None:
        return inputs
    forms = {path: form_of_file(path, inputs.reading, unread) for path in files}
    lacking = [path for path, form in forms.items() if weight not in form.schema(path).names]
    if 0 < len(lacking) < len(forms):
        advice = "the model's metrics are weighted by it (data.weight); a column of 1 weighs all rows alike"
        raise DataError(f"{lacking[0]}: has no column {weight}, which other files have; {advice}")
    return replace(inputs, layout=replace(inputs.layout, weight=None)) if lacking else inputs


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
            is_csv = kind_of(Path(column.path)) in ("", "csv")
            return column.values.cast(_large(pa.string() if is_csv else column.values.type))
        except pa.ArrowInvalid as error:
            raise column.wrong_type("texts in UTF-8, or --out FILE.csv, which keeps all bytes") from error

    def _write(self, batch: pa.RecordBatch, path: str) -> None:
        first = self._schema is None
        if first:  # a column that is null so far is one of texts
            kinds = zip(batch.schema.names, batch.schema.types, strict=True)
            self._schema = pa.schema([(n, pa.large_string() if kind == pa.null() else kind) for n, kind in kinds])
        if not self._parquet:
            pacsv.write_csv(batch, self._file, pacsv.WriteOptions(include_header=first))
            return
        for now, then in zip(batch.schema, self._schema, strict=True):
            if now.type not in (then.type, pa.null()):
                what = f"holds {now.type}, and {then.type} in the files before"
                raise DataError(f"{path}, column {now.name}: {what}; allowed: one type, or --out FILE.csv")
        self._writer = self._writer or pq.ParquetWriter(self._file, self._schema)
        self._writer.write_batch(batch.cast(self._schema))
