"""The cache folder: converts input files once, then maps the result. Every process of a machine shares it.

One entry per set of input files and relevant settings: train.arrow, maybe eval.arrow, and meta.json, which is
written last and says which files, at which size and time, the entry was made from.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.errors import DataError
from shardkeep.base.files import atomic_write, file_lock
from shardkeep.workers.config import DataConfig
from shardkeep.workers.data.columnar import ColumnarDataset, ColumnarWriter
from shardkeep.workers.data.conversion import Converter, Layout
from shardkeep.workers.data.decoding import Chunk
from shardkeep.workers.data.fingerprint import content_fingerprint
from shardkeep.workers.data.input_files import find_files, identity
from shardkeep.workers.data.samples import Data, Progress
from shardkeep.workers.data.scaling import from_json, to_json

FORMAT = 3  # a new number makes every older entry a stranger

Read = Callable[[Path, Sequence[str], Callable[[float], None]], Iterable[Chunk]]
"""Reads the named columns of one file; calls back with the share of the file that is read, in [0, 1]."""


@dataclass(frozen=True)
class Job:
    """What is to be converted: input files, layout, split. `read` must depend on nothing but `reading`."""

    config: DataConfig
    layout: Layout
    read: Read
    reading: dict[str, Any]
    train: list[Path]
    held: list[Path]
    seed: int

    def settings(self) -> dict[str, Any]:
        """All that the converted bytes depend on, but the files' content."""
        layout = self.layout
        split = [self.config.eval_fraction, self.seed] if self.config.eval_fraction else []
        return {
            "format": FORMAT,
            "reading": self.reading,
            "label": layout.label.model_dump(),
            "dense": [c.model_dump() for c in layout.dense],
            "sparse": [c.model_dump(exclude={"table", "pooling"}) for c in layout.sparse],
            "scale": layout.scale,
            "missing": layout.missing,
            "split": split,
        }

    def inputs(self) -> list[list[list[str | int]]]:
        """The identities of the input files."""
        return [[identity(path) for path in paths] for paths in (self.train, self.held)]


def open_cached(
    config: DataConfig, layout: Layout, read: Read, *, reading: dict[str, Any], seed: int, progress: Progress | None
) -> Data:
    """The samples of input files, converted if the cache does not hold them yet.

    Blocks while this or another process converts. Raises DataError for what is wrong with the input.
    """
    train, held = _input_files(config)
    job = Job(config, layout, read, reading, train, held, seed)
    folders, name = _cache_folders(config, train[0]), _entry_name(job)
    for folder in folders:  # one that somebody else made may be read where nothing can be written
        if (data := _open_entry(folder / name, job)) is not None:
            return data
    entry = _writable(folders) / name
    with _locked(entry, progress or (lambda _text, _share: None)) as told:
        data = _open_entry(entry, job)
        if data is None:
            _convert(entry, job, told)
            data = _open_entry(entry, job)
    if data is None:
        raise DataError(f"{entry}: the cache cannot be read back; delete the folder, or set data.cache")
    return data


def first_file(config: DataConfig) -> Path:
    """The first training file: the one that says which columns there are."""
    return _input_files(config)[0][0]


def _input_files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    root = Path(config.root)
    if config.eval and config.eval_fraction:
        raise DataError("data.eval_fraction: has no effect with data.eval; leave one of the two out")
    kind = config.source
    train = find_files(root, config.train, key="data.train", kind=kind)
    return train, find_files(root, config.eval, key="data.eval", kind=kind) if config.eval else []


def _open_entry(entry: Path, job: Job) -> Data | None:
    """The entry's samples; None where it is absent, of other inputs, truncated or not ours."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if meta["settings"] != json.loads(json.dumps(job.settings())) or meta["inputs"] != job.inputs():
            return None
        transform, lists = from_json(meta["transform"]), frozenset(meta["lists"])
        parts: dict[str, ColumnarDataset] = {}
        for name, size in meta["sizes"].items():
            content = pa.memory_map(str(entry / name)).read_buffer()
            if content.size != size:
                return None
            parts[name] = ColumnarDataset(content, schema=job.layout.schema, lists=lists, transform=transform)
        checksums = [meta["checksums"][name] for name in ("train.arrow", "eval.arrow") if name in parts]
        mark = content_fingerprint(job.layout.schema, checksums, to_json(transform))
        return Data(parts["train.arrow"], parts.get("eval.arrow"), None, f"cached in {entry}", mark)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # pa.ArrowInvalid is a ValueError


def _convert(entry: Path, job: Job, progress: Progress) -> None:
    """Writes the entry beside its place and renames it, so that it is there entirely or not at all."""
    fresh = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        converter = Converter(job.layout)
        sizes, checksums = _write_parts(fresh, job, converter, progress)
        meta = {
            "settings": job.settings(),
            "inputs": job.inputs(),
            "sizes": sizes,
            "checksums": checksums,
            "lists": sorted(converter.lists or ()),
            "transform": to_json(converter.scaler.transform()),
        }
        atomic_write(fresh / "meta.json", json.dumps(meta, indent=1))
        fresh.chmod(entry.parent.stat().st_mode & 0o777)  # mkdtemp's is for one user only
        shutil.rmtree(entry, ignore_errors=True)  # processes that mapped the old files keep them
        fresh.rename(entry)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise DataError(f"{entry}: the cache cannot be written ({reason}); set data.cache to another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_parts(
    folder: Path, job: Job, converter: Converter, progress: Progress
) -> tuple[dict[str, int], dict[str, str]]:
    """Converts all parts; their sizes in bytes and the checksums of their content, by file name."""
    share = job.config.eval_fraction
    steps: list[tuple[list[Path], tuple[str | None, str | None]]] = [
        (job.train, ("train.arrow", "eval.arrow" if share else None))
    ]
    if job.held:
        steps.append((job.held, (None, "eval.arrow")))
    sizes: dict[str, int] = {}
    checksums: dict[str, str] = {}
    for paths, names in steps:
        sinks = [pa.OSFile(str(folder / name), "wb") if name else None for name in names]
        writers = [ColumnarWriter(sink) if sink else None for sink in sinks]
        try:
            chunks = _read_all(job, paths, progress)
            converter.convert(chunks, writers[0], writers[1], share=share, seed=job.seed, origin=_named(paths))
            for name, writer in zip(names, writers, strict=True):
                if name is not None and writer is not None:
                    writer.close()
                    checksums[name] = writer.checksum()
        finally:
            for sink in sinks:
                if sink is not None:
                    sink.close()
        sizes |= {name: (folder / name).stat().st_size for name in names if name}
    return sizes, checksums


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _read_all(job: Job, paths: Sequence[Path], progress: Progress) -> Iterable[Chunk]:
    total = sum(path.stat().st_size for path in paths) or 1
    done = 0
    columns = job.layout.raw_columns()
    for path in paths:
        size = path.stat().st_size

        def told(share: float, path: Path = path, size: int = size, before: int = done) -> None:
            progress(f"reading {path.name}", (before + share * size) / total)

        yield from job.read(path, columns, told)
        done += size
        told(1.0)


def _entry_name(job: Job) -> str:
    """The same for the same files and settings, so that changed files replace their old entry."""
    paths = [[str(p.resolve()) for p in part] for part in (job.train, job.held)]
    text = json.dumps([job.settings(), paths], sort_keys=True)
    return f"{job.train[0].name.split('.')[0]}-{xxhash.xxh3_64_hexdigest(text.encode())}"


def _cache_folders(config: DataConfig, first: Path) -> list[Path]:
    """Where entries may lie, the preferred place first."""
    if config.cache is not None:
        return [Path(config.root) / Path(config.cache).expanduser()]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folders = [first.resolve().parent / ".shardkeep-cache", home / "shardkeep" / "data"]
    temporary = Path(tempfile.gettempdir()) / f"shardkeep-data-{os.getuid()}"
    return [*folders, temporary] if _ours_or_absent(temporary) else folders


def _ours_or_absent(folder: Path) -> bool:
    """Whether nobody else can have put entries there: anyone can make a folder of that name in the temporary one."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        folder.mkdir(mode=0o700)
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _writable(folders: Sequence[Path]) -> Path:
    """The first folder that can be written, made; the last one is not asked."""
    folder = next((f for f in folders[:-1] if _usable(f)), folders[-1])
    _make(folder)
    return folder


def _usable(folder: Path) -> bool:
    """Whether files can be made there. A folder without a write bit is left alone even by root."""
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        if not nearest.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return False
        folder.mkdir(exist_ok=True, parents=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: the cache folder cannot be made ({error.strerror}); set data.cache") from error


@contextlib.contextmanager
def _locked(entry: Path, progress: Progress) -> Iterator[Progress]:
    """Holds the entry's lock among processes."""
    path = entry.parent / f".{entry.name}.lock"
    waiting = "waiting for another process that converts the data"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(path, waiting=lambda: progress(waiting, 0.0)))
        except OSError as error:
            raise DataError(f"{path}: the cache cannot be written ({error.strerror}); set data.cache") from error
        yield progress
