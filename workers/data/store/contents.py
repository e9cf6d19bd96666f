"""What is in the folders of the store, and the removal of what is of no use. Converts nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardkeep.workers.data.input_files import Identity, find_files, identity
from shardkeep.workers.data.store.folders import (
    BESIDE_DATA,
    META,
    files_of_folder,
    is_columns,
    own_folders,
    remove as removed,
    store_folders,
)
from shardkeep.workers.data_config import DataConfig

DAY_S = 86_400.0


@dataclass(frozen=True)
class StoredFiles:
    """The columns of a set of files.

    Attributes:
        used: When a job has read them, in seconds since 1970.
        useless: Why no job will read them; empty = one may."""

    path: Path
    size_bytes: int
    num_columns: int
    files: tuple[str, ...] = ()
    used: float | None = None
    useless: str = ""


def folders_of(config: DataConfig) -> list[Path]:
    """The folders that a job with this config may use. Raises DataError where its files are not there."""
    root, kind = Path(config.root), config.source
    sets = [find_files(root, e, key="data", kind=kind) for e in (config.train, config.eval) if e]
    return list(dict.fromkeys(folder for files in sets for folder in store_folders(config, files[0])))


def folders_at(place: Path | None) -> list[Path]:
    """The folders at `place`: itself, or one beside the data in it; None = here, and the user's own ones."""
    if place is None:
        return [Path(BESIDE_DATA).absolute(), *own_folders()]
    return [place, place / BESIDE_DATA]


def contents(folder: Path) -> list[StoredFiles]:
    """The columns in a folder, by set of files; empty where there is no such folder."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                if is_columns(path):
                    found.append(_described(path))
    return found


def remove(entries: list[StoredFiles], *, unused_days: float | None = None) -> Iterator[StoredFiles]:
    """Removes what is useless, and with `unused_days` what no job has read for so long; yields what is gone.

    Jobs that have columns open keep them. What is being converted stays."""
    oldest = None if unused_days is None else time.time() - unused_days * DAY_S
    for entry in entries:
        unused = oldest is not None and entry.used is not None and entry.used <= oldest
        if (entry.useless or unused) and removed(entry.path):
            yield entry


def _described(path: Path) -> StoredFiles:
    entries = list(os.scandir(path))
    size, count = sum(each.stat().st_size for each in entries), sum(each.name.endswith(".column") for each in entries)
    if (files := files_of_folder(path)) is None:
        return StoredFiles(path, size, count, useless="damaged, or of another version")
    names = tuple(str(each[0]) for each in files)
    return StoredFiles(path, size, count, names, (path / META).stat().st_mtime, _changed(files))


def _changed(files: list[Identity]) -> str:
    for known in files:
        try:
            if identity(Path(str(known[0])), of=len(files)) != known:
                return f"{known[0]} has changed"
        except FileNotFoundError:
            return f"{known[0]} is gone"
        except OSError:
            continue  # who cannot read the file cannot tell
    return ""
