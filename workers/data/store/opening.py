"""From input files to samples by way of the store: columns that it lacks are converted once, then all are mapped.

A column is stored for all rows of a set of files. So jobs share the columns that they read alike, and every process of
a machine shares all. Which rows are samples of which side, and how numbers are scaled, follows from stored columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import DataError
from shardkeep.base.files import atomic_write, use_newest
from shardkeep.base.sizes import size_text
from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.beginnings import known_targets
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.columns.column import ColumnWriter, StoredColumn
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import convert
from shardkeep.workers.data.conversion.item_values import item_values
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.reader import Reader, distinct, readers_of
from shardkeep.workers.data.conversion.typing import facts_of
from shardkeep.workers.data.fitting.data import data_of
from shardkeep.workers.data.fitting.inputs import Inputs, prior_fit
from shardkeep.workers.data.fitting.rows import FittedRows, evaluation_readers, fit_rows
from shardkeep.workers.data.fitting.split import Split
from shardkeep.workers.data.input_files import changed_since, files_of, snapshot
from shardkeep.workers.data.items import checked, make_catalogue
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data.store.folders import FileSet
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import RetrievalSettings

LARGE_BYTES = 1 << 28
"""Columns of this size are worth a word."""
TRIES = 3
"""To read files that change while they are read."""


class FileForm(Protocol):
    """How files are read, as sources/forms.py has it."""

    @property
    def reading(self) -> Mapping[str, Any]:
        """All that decides what is read of a file, as JSON types."""
        ...

    def schema(self, path: Path) -> pa.Schema:
        """The columns of a file with their types. Raises DataError."""
        ...

    def read(self, path: Path, columns: Sequence[str], progress: Callable[[float], None]) -> Iterable[Chunk]:
        """The rows of a file, the named columns only. `progress` receives the share that is read, in [0, 1]."""
        ...


@dataclass(frozen=True)
class Columns:
    """The columns of a set of files, which are read in one form."""

    files: FileSet
    form: FileForm
    report: Progress

    def obtain(self, readers: Sequence[Reader]) -> tuple[dict[str, StoredColumn], str]:
        """All that the readers read, by name, and a text that names them. Converts what is not stored yet, and what is
        damaged. Blocks while this or another process does. Raises DataError."""
        paths = {name: self._path(name, reader) for reader in readers for name in reader.kinds}
        listed = json.dumps(sorted(path.name for path in paths.values()))
        record = self.files.path("columns", listed, ".json")
        columns, lacking = self._stored(readers, paths)
        if lacking or _read_json(record) != _states(paths.values()):
            with self.files.writing(self.report):
                columns, lacking = self._stored(readers, paths, verified=True)
                if lacking:
                    columns |= self._convert(lacking, paths)
                atomic_write(record, json.dumps(_states(paths.values())))
        self.files.used()
        return columns, listed

    def chosen(self, plain: Reader, decided: Reader, facts: Fitted, known: Fitted) -> Reader:
        """The reader by which the files alone decide, where what it has stored agrees with what is `known`."""
        try:
            stored = {name: StoredColumn.open(self._path(name, plain)) for name in plain.kinds}
        except (OSError, ValueError):
            return decided
        found, wanted = (each.found(stored).of(*plain.columns) for each in (facts, known))
        return plain if found == wanted else decided

    def chunks(self, columns: Sequence[str]) -> Iterable[Chunk]:
        """The rows of all files, some columns of them."""
        sizes = [path.stat().st_size for path in self.files.paths]
        total, done = sum(sizes) or 1, 0
        of = f" of {size_text(total)}" if total >= LARGE_BYTES else ""
        for path, size in zip(self.files.paths, sizes, strict=True):

            def report(share: float, path: Path = path, size: int = size, before: int = done) -> None:
                self.report(f"reading {path.name}{of}", min(1.0, (before + share * size) / total))

            yield from self.form.read(path, columns, report)
            done += size
            report(1.0)

    def _path(self, name: str, reader: Reader) -> Path:
        return self.files.path(
            name.replace(":", "-"), json.dumps([dict(self.form.reading), name, reader.rule], sort_keys=True)
        )

    def _stored(
        self, readers: Sequence[Reader], paths: Mapping[str, Path], *, verified: bool = False
    ) -> tuple[dict[str, StoredColumn], list[Reader]]:
        """The columns that are stored, and the readers of those that are not. `verified`: reads all of each column."""
        columns, lacking = dict[str, StoredColumn](), list[Reader]()
        for reader in readers:
            try:
                own = {name: StoredColumn.open(paths[name]) for name in reader.kinds}
                for column in own.values() if verified else ():
                    column.verify()
                columns |= own
            except (OSError, ValueError):
                lacking.append(reader)
        return columns, lacking

    def _convert(self, readers: Sequence[Reader], paths: Mapping[str, Path]) -> dict[str, StoredColumn]:
        names, files = list(dict.fromkeys(name for reader in readers for name in reader.columns)), self.files.paths

        def check() -> None:
            if (changed := changed_since(self.files.states)) is not None:
                raise DataError(f"{changed}: changed while it was read, {TRIES} times; wait until it is written")

        origin = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        return convert(self.chunks(names), readers, paths=paths, origin=origin, check=check)


def _states(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Size and time of change of files, by name; of those that are there."""
    found = ((path.name, path.stat()) for path in paths if path.exists())
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found}


def open_stored(
    config: DataConfig,
    layout: ColumnLayout,
    form: FileForm,
    *,
    seed: int,
    progress: Progress | None,
    items: RetrievalSettings | None = None,
) -> Data:
    """The samples of input files, all columns of one state of the files. `items`: the model of a retrieval job, which
    needs a catalogue.

    Blocks while this or another process converts. Raises DataError for what is wrong with the input.
    """
    files, held = files_of(config)
    report: Progress = progress or (lambda _text, _share: None)
    prior, record = prior_fit(config), config.held_out(seed)
    split = None if record is None else Split(record, layout)

    def attempt(_: object) -> Data:
        source = Columns(FileSet(config, files), form, report)
        facts = facts_of({str(path): form.schema(path) for path in files}, layout)
        known = facts if prior is None else facts.continued(prior, layout)

        def readers(decided: Fitted) -> list[Reader]:
            return distinct([*readers_of(layout, decided), *(split.readers(decided) if split is not None else ())])

        pairs = zip(readers(facts), readers(known), strict=True)
        columns, listed = source.obtain([source.chosen(*pair, facts, known) for pair in pairs])
        found = _fitted(source, layout, columns, known, split, listed)
        other = Columns(FileSet(config, held), form, report) if held else None
        data = _joined(source, other, layout, columns, found)
        if items is None:
            return data
        return _with_catalogue(data, items, source, Inputs(layout, found.fitted, form.reading), listed)

    return use_newest(lambda: snapshot([*files, *held]), attempt, DataError, attempts=TRIES)[1]


def _joined(
    source: Columns, other: Columns | None, layout: ColumnLayout, columns: Mapping[str, StoredColumn], found: FittedRows
) -> Data:
    """The samples of the training files, and those of evaluation files: `other`."""
    own = None if other is None else other.obtain(evaluation_readers(layout, found.fitted))[0]
    places = [each.files.folder for each in (source, other) if each is not None]
    trained, held = (sum(column.num_bytes for column in each.values()) for each in (columns, own or {}))
    data = data_of(layout, columns, found, own, source.form.reading, _described(places, trained + held))
    return replace(data, stored_bytes=trained)


def _fitted(
    source: Columns,
    layout: ColumnLayout,
    columns: Mapping[str, StoredColumn],
    known: Fitted,
    split: Split | None,
    listed: str,
) -> FittedRows:
    """What follows from the training files' columns; stored, since it takes a pass over many of them."""
    own = Inputs(layout, replace(known, scales={}), {}).to_json()
    record = None if split is None else split.record.model_dump(mode="json")
    scales = {name: list(scale) for name, scale in known.scales.items()}
    rule = json.dumps([listed, own, scales, record, layout.weight, layout.time], sort_keys=True)
    path = source.files.path("sides", rule, ".json")
    try:
        checksum, stored = _read_json(path)
        if checksum != _checksum(stored):
            raise ValueError("damaged")
        rows = {int(side): None if own is None else _rows(source, own) for side, own in stored["files"].items()}
        return FittedRows(Fitted.of_json(stored["fitted"]), rows, stored["skipped"], stored["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        found = fit_rows(layout, columns, known, split)
    with source.files.writing(source.report):
        written = dict[str, str | None]()
        for side, rows_N in found.rows.items():
            if rows_N is None:
                written[str(side)] = None
                continue
            content = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows_N, np.int64).data)
            writer = ColumnWriter("rows", source.files.path("rows", content))  # jobs with the same rows share it
            writer.add(Values(rows_N))
            writer.close({})
            written[str(side)] = content
        kept = {"files": written, "fitted": found.fitted.to_json(), "skipped": found.skipped, "notes": found.notes}
        atomic_write(path, json.dumps([_checksum(kept), kept]))
    return found


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def _rows(source: Columns, content: str) -> Any:
    column = StoredColumn.open(source.files.path("rows", content))
    column.verify()
    return column.values


def _described(places: Sequence[Path], size: int) -> str:
    """Where the samples lie, and how large that is."""
    held = f" ({size_text(size)}; `shardkeep cache` shows and cleans it)" if size >= LARGE_BYTES else ""
    first, *more = places
    beside = [folder.name if folder.parent == first.parent else str(folder) for folder in more]
    return f"cached in {' and '.join([str(first), *beside])}{held}"


def _read_json(path: Path) -> Any:
    """The content of a file; None = there is none, or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _with_catalogue(data: Data, model: RetrievalSettings, source: Columns, inputs: Inputs, listed: str) -> Data:
    """The samples with the catalogue of the training files, which is made where the store has none."""
    sides = sides_of_model(model, data.train.schema)
    group = sides.predicted
    names = [*(feature.name for feature in sides.items.features), *sides.items.dense]
    kept = [] if group is None else [group.ids[0].name, group.max_length, group.newest]
    path = source.files.path("catalogue", json.dumps([listed, data.fingerprint, names, kept]), ".arrow")

    def values_of(ids_M: Ints) -> pa.Array:
        return item_values(source.chunks(sides.named_by), sides.named_by, inputs.layout, inputs.fitted, ids_M)

    try:
        catalogue = Catalogue.read(path)
    except (OSError, ValueError):
        source.report("counting items", 0.0)
        catalogue = make_catalogue(data.train, sides, values_of)
        with source.files.writing(source.report):
            catalogue.write(path)
    notes = (*data.notes, *known_targets(data.train, data.eval, sides))
    return checked(replace(data, catalogue=catalogue, notes=notes), sides)
