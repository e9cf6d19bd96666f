"""From input files to samples by way of the cache: converts files once, then maps the result.

The training files and the evaluation files have an entry each. So jobs that differ in one of them share the other.
Every process of a machine shares an entry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.base.sizes import size_text
from shardkeep.workers.data.beginnings import known_targets
from shardkeep.workers.data.cache.catalogues import obtain_catalogue
from shardkeep.workers.data.cache.entry import BESIDE, CacheEntry, Content, FileSet, read_entry
from shardkeep.workers.data.cache.obtaining import found, obtained
from shardkeep.workers.data.cache.sharing import Other, link, others, parted, with_checksums
from shardkeep.workers.data.columnar import ColumnarWriter, by_time
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import Converter, Split
from shardkeep.workers.data.conversion.inputs import Inputs, prior_fit
from shardkeep.workers.data.conversion.item_values import item_values
from shardkeep.workers.data.conversion.labels import check_matched, left_out
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit, check_pooling
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.conversion.scaling import to_json
from shardkeep.workers.data.input_files import files_of, partition_of
from shardkeep.workers.data.items import checked
from shardkeep.workers.data.samples import Data, Dataset, Progress, content_fingerprint
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import RetrievalSettings
from shardkeep.workers.split_config import RANDOM, TIME

TRAIN, EVAL, TEST = PARTS = "train.arrow", "eval.arrow", "test.arrow"
"""The file of each side."""
LARGE_BYTES = 1 << 28  # an entry of this size is worth a word

Read = Callable[[Path, Sequence[str], Callable[[float], None]], Iterable[Chunk]]
"""Reads the named columns of one file; calls back with the share of the file that is read, in [0, 1]."""


@dataclass(frozen=True)
class Conversion:
    """How files are converted. `read` must depend on nothing but `reading`."""

    config: DataConfig
    layout: ColumnLayout
    read: Read
    reading: dict[str, Any]
    seed: int
    prior: PriorFit | None

    def training(self, paths: Sequence[Path], *, prior: bool = False) -> FileSet:
        """The entry of the training files, with the rows that are held out. `prior`: read as the model with which the
        job continues."""
        record, settings = self.config.held_out(self.seed), self._settings(paths)
        _, features, labels = parted(settings)
        chosen = {RANDOM: [*sorted(features), labels], TIME: self.layout.time}  # by which columns
        split = [] if record is None else [record.model_dump(mode="json"), chosen.get(record.by)]
        marked = {"kept": self.prior.to_json()} if prior and self.prior is not None else {}
        return FileSet(paths, settings | {"split": split} | marked)

    def evaluation(self, paths: Sequence[Path], fitted: Fitted) -> FileSet:
        """The entry of the evaluation files. Their scaling is not part of it, except the origins of stored numbers."""
        return FileSet(paths, self._settings(paths, PriorFit.of(self.layout, fitted)))

    def _settings(self, paths: Sequence[Path], known: PriorFit | None = None) -> dict[str, Any]:
        """`known`: what decides, beside the settings of a column, how it is read."""
        layout, read = self.layout, (lambda *_: []) if known is None else known.of_columns
        labels = [label.model_dump(exclude={"loss", "weight"}) for label in layout.labels]
        pads = {name: [pad] for name, pad in layout.pads.items()}
        # max_length and newest change nothing that is stored; a table says of which columns the ids are read alike
        groups = [
            {"ids": {name: layout.sharing[name] for name in group.ids}, "separator": group.separator}
            | {"numbers": [number.model_dump() for number in group.numbers], "read": read(*group.columns)}
            | {name: pads[name] for name in group.ids if name in pads}
            for group in layout.sequences.values()
        ]
        return {
            "folders": [partition_of(path) for path in paths],
            "form": FORM,
            "reading": self.reading,
            "labels": labels,
            "weight": layout.weight,
            "time": layout.time,
            "skipping": labels if any(label.missing == "skip" for label in layout.labels) else [],
            "dense": [[c.model_dump(), read(*(n.column for n in c.numbers()))] for c in layout.dense],
            "sparse": [
                [c.model_dump(exclude={"table", "pooling", "pad"}), read(c.column), *pads.get(c.column, ())]
                for c in layout.sparse
            ],
            "scale": layout.scale,
            "missing": layout.missing,
            "sequences": groups,
            **({"time_format": layout.time_format} if layout.time_format else {}),
        }


def open_cached(
    config: DataConfig,
    layout: ColumnLayout,
    read: Read,
    *,
    reading: dict[str, Any],
    seed: int,
    progress: Progress | None,
    items: RetrievalSettings | None = None,
) -> Data:
    """The samples of input files, converted if the cache does not hold them yet. `items`: the model of a retrieval job,
    which needs a catalogue.

    Blocks while this or another process converts. Raises DataError for what is wrong with the input.
    """
    files, held = files_of(config)
    prior = prior_fit(config)
    job = Conversion(config, layout, read, reading, seed, prior)
    report = progress or (lambda _text, _share: None)
    training, entry = _training(job, files, report)
    entries, trained, fitted = [entry], entry.content, entry.content.inputs.fitted
    if held:
        entries.append(_obtain(job, job.evaluation(held, fitted), fitted, report))
    absent = {value: held for value, held in trained.absent.items() if all(value in e.content.absent for e in entries)}
    check_matched(absent, "the data", layout.labels)
    parts = {name: part for entry in entries for name, part in entry.parts.items()}
    checksums = {name: checksum for entry in entries for name, checksum in entry.content.checksums.items()}
    own = [checksums[name] for name in (TRAIN, EVAL) if name in parts]
    mark = content_fingerprint(layout.schema, own, to_json(fitted.transform))
    check_pooling(layout.sparse, fitted.lists)
    inputs, notes = Inputs(layout, fitted, reading), tuple(note for _, note in trained.notes)
    train: Dataset = parts[TRAIN] if layout.time is None else by_time(parts[TRAIN])
    source = _described(entries) + parts[TRAIN].histories()
    data = Data(train, parts.get(EVAL), source, mark, inputs.to_json(), notes, test=parts.get(TEST))
    return data if items is None else _with_catalogue(data, items, job, training, inputs, report)


def _with_catalogue(
    data: Data, model: RetrievalSettings, job: Conversion, files: FileSet, inputs: Inputs, report: Progress
) -> Data:
    """The samples with the catalogue of the training files, which are told of by `files`."""
    sides = sides_of_model(model, data.train.schema)
    columns = sides.named_by

    def values_of(ids_M: Ints) -> pa.Array:
        return item_values(_read_all(job, files.paths, report, columns), columns, job.layout, inputs.fitted, ids_M)

    catalogue = obtain_catalogue(job.config, files, inputs, data.train, sides, values_of, report)
    notes = (*data.notes, *known_targets(data.train, data.eval, sides))
    return checked(replace(data, catalogue=catalogue, notes=notes), sides)


def _described(entries: Sequence[CacheEntry]) -> str:
    """Where the samples lie, how large that is, and how many rows have been left out."""
    size = sum(entry.size_bytes for entry in entries)
    held = f" ({size_text(size)}; `shardkeep cache` shows and cleans it)" if size >= LARGE_BYTES else ""
    first, *more = [entry.folder for entry in entries]
    beside = [folder.name if folder.parent == first.parent else str(folder) for folder in more]
    text = f"cached in {' and '.join([str(first), *beside])}{held}"
    return text + left_out(sum(entry.content.skipped for entry in entries))


def _training(job: Conversion, paths: Sequence[Path], report: Progress) -> tuple[FileSet, CacheEntry]:
    """What the entry of the training files is made from, and the entry: the one that they alone decide, unless the
    model of before decided otherwise."""
    files = job.training(paths)
    if job.prior is not None:
        entry = found(job.config, files, lambda folder: read_entry(folder, files, job.layout.schema, None))
        if entry is None or not job.prior.agrees(entry.content.inputs.fitted, job.layout):
            files = job.training(paths, prior=True)
    return files, _obtain(job, files, None, report)


def _obtain(job: Conversion, files: FileSet, fitted: Fitted | None, report: Progress) -> CacheEntry:
    """The entry of `files`; made where there is none. `fitted`: of evaluation files, what the training rows decided."""
    return obtained(
        job.config,
        files,
        lambda folder: read_entry(folder, files, job.layout.schema, fitted),
        lambda folder: _write_parts(folder, job, files, fitted, report),
        report,
    )


def _write_parts(folder: Path, job: Conversion, files: FileSet, fitted: Fitted | None, progress: Progress) -> Content:
    """Shares the columns of another entry where one has them, else converts all."""
    for other in others(job.config, files):
        try:
            return _share(folder, other, job, files, fitted, progress)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged, or on another disk
            for path in folder.iterdir():
                path.unlink()
    return _convert(folder, job, files, fitted, progress)


def _share(at: Path, other: Other, job: Conversion, files: FileSet, fitted: Fitted | None, report: Progress) -> Content:
    """Links the files of another entry, and converts labels, weights and times where they are other ones."""
    content = link(other, job.layout.schema, at)
    inputs = replace(content.inputs, layout=job.layout, fitted=fitted or content.inputs.fitted)
    if other[0]:
        bare = replace(job.layout, dense=(), sparse=(), sequences={})
        own = None if fitted is None else inputs.only(bare.schema).fitted
        fresh = _convert(at, replace(job, layout=bare), files, own, report, BESIDE)
        content = replace(content, skipped=fresh.skipped, absent=fresh.absent)
    return with_checksums(replace(content, inputs=inputs), job.layout.schema, at)


def _convert(
    folder: Path, job: Conversion, files: FileSet, fitted: Fitted | None, progress: Progress, end: str = ""
) -> Content:
    """Converts all files of an entry. `end`: of the names of what is written."""
    record = job.config.held_out(job.seed)
    split = Split(record, job.layout) if record is not None and fitted is None else None
    columns = job.layout.raw_columns()
    if split is not None:
        split.fit(lambda columns: _read_all(job, files.paths, progress, columns))
        columns = list(dict.fromkeys([*columns, *split.columns]))
    sides = split.sides if split is not None else [0 if fitted is None else 1]
    converter = Converter(job.layout, fitted, job.prior, split)
    with contextlib.ExitStack() as sinks:
        paths = {side: str(folder / f"{PARTS[side]}{end}") for side in sides}
        writers = {side: ColumnarWriter(sinks.enter_context(pa.OSFile(path, "wb"))) for side, path in paths.items()}
        chunks = _read_all(job, files.paths, progress, columns)
        converter.convert(chunks, writers, origin=_named(files.paths))
        for writer in writers.values():
            writer.close()
    checksums = {PARTS[side]: writer.checksum() for side, writer in writers.items()}
    reader, inputs, schema = converter.reader, Inputs(job.layout, converter.fitted, job.reading), job.layout.schema
    stored = {"dense": schema.dense, "single": [f.name for f in schema.features if f.name not in reader.lists]}
    return Content(inputs, checksums, stored, converter.skipped, reader.notes(), converter.absent)


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _read_all(job: Conversion, paths: Sequence[Path], progress: Progress, columns: Sequence[str]) -> Iterable[Chunk]:
    total = sum(path.stat().st_size for path in paths) or 1
    done = 0
    of = f" of {size_text(total)}" if total >= LARGE_BYTES else ""
    for path in paths:
        size = path.stat().st_size

        def report(share: float, path: Path = path, size: int = size, before: int = done) -> None:
            progress(f"reading {path.name}{of}", min(1.0, (before + share * size) / total))

        yield from job.read(path, columns, report)
        done += size
        report(1.0)
