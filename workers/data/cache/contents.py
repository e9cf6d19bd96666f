"""What is in cache folders, and the removal of what is of no use. Converts nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.files import file_lock
from shardkeep.workers.data.cache.entry import META, read_meta
from shardkeep.workers.data.cache.folders import (
    BESIDE_DATA,
    abandoned,
    busy,
    cache_folders,
    entry_of,
    lock_path,
    own_folders,
)
from shardkeep.workers.data.input_files import find_files, identity
from shardkeep.workers.data_config import DataConfig

DAY_S = 86_400.0


@dataclass(frozen=True)
class CacheItem:
    """An entry, or a part of one. `useless`: why no job will read it; empty = one may. Times: seconds since 1970."""

    path: Path
    size_bytes: int
    files: tuple[str, ...] = ()
    made: float | None = None
    used: float | None = None
    useless: str = ""
    note: str = ""


def folders_of(config: DataConfig) -> list[Path]:
    """The cache folders that a job with this config may use. Raises DataError where its files are not there."""
    root, kind = Path(config.root), config.source
    sets = [find_files(root, e, key="data", kind=kind) for e in (config.train, config.eval) if e]
    return list(dict.fromkeys(folder for files in sets for folder in cache_folders(config, files[0])))


def folders_at(place: Path | None) -> list[Path]:
    """The cache folders at `place`: itself, or one beside the data in it; None = here, and the user's own ones."""
    if place is None:
        return [Path(BESIDE_DATA).absolute(), *own_folders()]
    return [place, place / BESIDE_DATA]


def contents(folder: Path) -> list[CacheItem]:
    """The entries in a folder and the parts of conversions, by name; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    dead = set(abandoned(folder))
    items = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if (entry := entry_of(path)) is None:
                continue
            if entry == path:
                items.append(_entry(path))
            elif path in dead:
                items.append(CacheItem(path, _size(path), useless="left by a conversion that died"))
            else:
                items.append(CacheItem(path, _size(path), note="being written, or of another user"))
    return items


def remove(entries: list[CacheItem], *, unused_days: float | None = None) -> Iterator[CacheItem]:
    """Removes what is useless, and with `unused_days` what no job has read for so long; yields what is gone.

    Jobs that have an entry open keep its files. What is being converted stays.
    """
    oldest = None if unused_days is None else time.time() - unused_days * DAY_S
    for entry in entries:
        unused = oldest is not None and entry.used is not None and entry.used <= oldest
        if not (entry.useless or unused):
            continue
        lock = lock_path(entry_of(entry.path) or entry.path)
        try:
            with file_lock(lock, waiting=busy):
                shutil.rmtree(entry.path)
                lock.unlink()
        except OSError:
            continue
        yield entry


def _entry(path: Path) -> CacheItem:
    size = _size(path)
    try:
        meta = read_meta(path)
        inputs, made = [list(each) for each in meta["inputs"]], float(meta["made"])
        used = (path / META).stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        if path.lstat().st_uid != os.geteuid():
            return CacheItem(path, size, note="of another user")
        return CacheItem(path, size, useless="damaged, of another version, or others can write it")
    files = tuple(str(each[0]) for each in inputs)
    return CacheItem(path, size, files, made, used, useless=_changed(inputs))


def _changed(inputs: list[list[str | int]]) -> str:
    for known in inputs:
        try:
            if identity(Path(str(known[0])), of=len(inputs)) != known:
                return f"{known[0]} has changed"
        except FileNotFoundError:
            return f"{known[0]} is gone"
        except OSError:
            continue  # who cannot read the file cannot tell
    return ""


def _size(path: Path) -> int:
    files = [p.lstat() for p in path.iterdir()]
    return sum(file.st_size // file.st_nlink for file in files)  # entries share files in equal parts
