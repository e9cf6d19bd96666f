"""From input files to samples by way of the cache: converts files once, then maps the result.

The training files and the evaluation files have an entry each. So jobs that differ in one of them share the other.
Every process of a machine shares an entry.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.base.sizes import size_text
from shardkeep.workers.data.cache.entry import Content, Entry, FileSet, read_entry, write_entry
from shardkeep.workers.data.cache.folders import (
    cache_folders,
    entry_paths,
    locked,
    place_for,
    remove_abandoned,
    temporary_folder,
    trusted,
)
from shardkeep.workers.data.columnar import ColumnarWriter
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import Converter, Fitted, Kept, Layout, left_out
from shardkeep.workers.data.conversion.inputs import Inputs, kept_of
from shardkeep.workers.data.conversion.labels import check_matched
from shardkeep.workers.data.conversion.scaling import to_json
from shardkeep.workers.data.fingerprint import content_fingerprint
from shardkeep.workers.data.input_files import State, changed_since, check_once, find_files, snapshot
from shardkeep.workers.data.order import by_time
from shardkeep.workers.data.partitions import place_of
from shardkeep.workers.data.samples import Data, Dataset, Progress
from shardkeep.workers.data_config import DataConfig

TRAIN, EVAL = "train.arrow", "eval.arrow"
LARGE_BYTES = 1 << 28  # an entry of this size is worth a word
TRIES = 3  # to read files that change while they are read

Read = Callable[[Path, Sequence[str], Callable[[float], None]], Iterable[Chunk]]
"""Reads the named columns of one file; calls back with the share of the file that is read, in [0, 1]."""


@dataclass(frozen=True)
class Job:
    """How files are converted. `read` must depend on nothing but `reading`."""

    config: DataConfig
    layout: Layout
    read: Read
    reading: dict[str, Any]
    seed: int
    kept: Kept | None

    def training(self, paths: Sequence[Path], *, kept: bool = False) -> FileSet:
        """The entry of the training files, with the rows that `eval_fraction` holds out. `kept`: read as the model with
        which the job continues."""
        split = [self.config.eval_fraction, self.seed] if self.config.eval_fraction else []
        marked = {"kept": self.kept.to_json()} if kept and self.kept is not None else {}
        return FileSet(paths, self._settings(paths) | {"split": split} | marked)

    def evaluation(self, paths: Sequence[Path], fitted: Fitted) -> FileSet:
        """The entry of the evaluation files. Their scaling is not part of it, except the origins of stored numbers."""
        known = {
            "lists": sorted(fitted.lists),
            "kinds": dict(fitted.kinds),
            "times": sorted(fitted.times),
            "origins": fitted.origins,
        }
        return FileSet(paths, self._settings(paths) | known)

    def _settings(self, paths: Sequence[Path]) -> dict[str, Any]:
        layout = self.layout
        scalars = {"weight": layout.weight, "time": layout.time}
        return {key: name for key, name in scalars.items() if name is not None} | {
            "places": [place_of(path) for path in paths],
            "form": layout.form,
            "reading": self.reading,
            "label": layout.label.model_dump(exclude={"kind"} if layout.label.kind == "class" else None),
            "dense": [c.model_dump() for c in layout.dense],
            "sparse": [c.model_dump(exclude={"table", "pooling"}) for c in layout.sparse],
            "scale": layout.scale,
            "missing": layout.missing,
        }


def open_cached(
    config: DataConfig, layout: Layout, read: Read, *, reading: dict[str, Any], seed: int, progress: Progress | None
) -> Data:
    """The samples of input files, converted if the cache does not hold them yet.

    Blocks while this or another process converts. Raises DataError for what is wrong with the input.
    """
    files, held = _input_files(config)
    kept = kept_of(config)
    layout = layout if kept is None else replace(layout, form=kept.form)
    job = Job(config, layout, read, reading, seed, kept)
    entries = [_training(job, files, progress)]
    if held:
        fitted = entries[0].fitted
        entries.append(_obtain(job, job.evaluation(held, fitted), fitted, progress))
    check_matched([value for value in entries[0].absent if all(value in e.absent for e in entries)], "the data")
    parts = {name: part for entry in entries for name, part in entry.parts.items()}
    checksums = {name: checksum for entry in entries for name, checksum in entry.checksums.items()}
    mark = content_fingerprint(
        layout.schema,
        [checksums[name] for name in (TRAIN, EVAL) if name in parts],
        to_json(entries[0].fitted.transform),
    )
    inputs = Inputs(layout, entries[0].fitted, reading).to_json()
    train: Dataset = parts[TRAIN] if layout.time is None else by_time(parts[TRAIN])
    return Data(train, parts.get(EVAL), None, _described(entries), mark, inputs, tuple(entries[0].notes))


def first_file(config: DataConfig) -> Path:
    """The first training file: the one that says which columns there are."""
    return _input_files(config)[0][0]


def _input_files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    root = Path(config.root)
    if config.eval and config.eval_fraction:
        raise DataError("data.eval_fraction: has no effect with data.eval; leave one of the two out")
    kind = config.source
    roles = {"data.train": config.train, "data.eval": config.eval, "data.test": config.test}
    files = {
        key: find_files(root, entries, key=key, kind=kind)
        for key, entries in roles.items()
        if entries or key == "data.train"
    }
    check_once(files)  # those of data.test are read after training; a wrong name ends the job before it
    return files["data.train"], files.get("data.eval", [])


def _described(entries: Sequence[Entry]) -> str:
    """Where the samples lie, how large that is, and how many rows have been left out."""
    size = sum(entry.size_bytes for entry in entries)
    held = f" ({size_text(size)}; `shardkeep cache` shows and cleans it)" if size >= LARGE_BYTES else ""
    first, *more = [entry.folder for entry in entries]
    beside = [folder.name if folder.parent == first.parent else str(folder) for folder in more]
    text = f"cached in {' and '.join([str(first), *beside])}{held}"
    return text + left_out(sum(entry.skipped for entry in entries))


def _training(job: Job, paths: Sequence[Path], progress: Progress | None) -> Entry:
    """The entry of the training files: the one that they alone decide, unless the model of before decided otherwise."""
    files = job.training(paths)
    if job.kept is not None:
        found = _found(job, files, None)
        if found is None or not job.kept.agrees(found.fitted, job.layout):
            files = job.training(paths, kept=True)
    return _obtain(job, files, None, progress)


def _found(job: Job, files: FileSet, fitted: Fitted | None) -> Entry | None:
    for folder in cache_folders(job.config, files.paths[0]):  # root's may be read where nothing can be written
        for path in entry_paths(folder, files.name) if trusted(folder) else ():
            if (entry := read_entry(path, files, job.layout.schema, fitted)) is not None:
                return entry
    return None


def _obtain(job: Job, files: FileSet, fitted: Fitted | None, progress: Progress | None) -> Entry:
    """The entry of `files`; made where there is none. `fitted`: of evaluation files, what the training rows decided."""
    if (entry := _found(job, files, fitted)) is not None:
        return entry
    schema, path = job.layout.schema, place_for(cache_folders(job.config, files.paths[0]), files.name)
    told = progress or (lambda _text, _share: None)
    remove_abandoned(path.parent)
    with locked(path, told):
        entry = read_entry(path, files, schema, fitted)
        if entry is None:
            _make(path, job, files, fitted, told)
            entry = read_entry(path, files, schema, fitted)
    if entry is None:
        raise DataError(f"{path}: the cache cannot be read back; delete the folder, or set data.cache")
    return entry


def _make(path: Path, job: Job, files: FileSet, fitted: Fitted | None, progress: Progress) -> None:
    """Converts the files; again where one changed meanwhile. Raises DataError where that does not end."""
    for attempt in range(TRIES):
        before = snapshot(files.paths)
        try:
            if _converted(path, job, files, fitted, progress, before):
                return
        except DataError:
            if attempt == TRIES - 1 or changed_since(before) is None:
                raise
    changed = changed_since(before) or files.paths[0]
    raise DataError(f"{changed}: changed while it was read, {TRIES} times; wait until it is written")


def _converted(
    path: Path, job: Job, files: FileSet, fitted: Fitted | None, progress: Progress, before: Sequence[State]
) -> bool:
    """Writes the entry beside its place and renames it, so that it is there entirely or not at all.

    False, and nothing is there, where a file is another one than `before`.
    """
    fresh: Path | None = None
    try:
        fresh = temporary_folder(path)
        content = _write_parts(fresh, job, files, fitted, progress)
        if changed_since(before) is not None:
            return False
        write_entry(fresh, files, [state.identity for state in before], content)
        shutil.rmtree(path, ignore_errors=True)  # processes that mapped the old files keep them
        fresh.rename(path)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise DataError(f"{path}: the cache cannot be written ({reason}); set data.cache to another folder") from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
    return True


def _write_parts(folder: Path, job: Job, files: FileSet, fitted: Fitted | None, progress: Progress) -> Content:
    """Converts all files of an entry."""
    share = job.config.eval_fraction
    names = (TRAIN, EVAL if share else None) if fitted is None else (None, EVAL)
    sinks = [pa.OSFile(str(folder / name), "wb") if name else None for name in names]
    writers = [ColumnarWriter(sink) if sink else None for sink in sinks]
    converter = Converter(job.layout, fitted, job.kept)
    try:
        chunks = _read_all(job, files.paths, progress)
        origin, places = _named(files.paths), {str(path): place_of(path) for path in files.paths}
        converter.convert(chunks, *writers, share=share, seed=job.seed, origin=origin, places=places)
        for writer in writers:
            if writer is not None:
                writer.close()
    finally:
        for sink in sinks:
            if sink is not None:
                sink.close()
    checksums = {name: w.checksum() for name, w in zip(names, writers, strict=True) if name and w}
    return Content(checksums, converter.fitted(), converter.skipped, converter.notes(), converter.absent)


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _read_all(job: Job, paths: Sequence[Path], progress: Progress) -> Iterable[Chunk]:
    total = sum(path.stat().st_size for path in paths) or 1
    done = 0
    columns = job.layout.raw_columns()
    of = f" of {size_text(total)}" if total >= LARGE_BYTES else ""
    for path in paths:
        size = path.stat().st_size

        def told(share: float, path: Path = path, size: int = size, before: int = done) -> None:
            progress(f"reading {path.name}{of}", min(1.0, (before + share * size) / total))

        yield from job.read(path, columns, told)
        done += size
        told(1.0)
