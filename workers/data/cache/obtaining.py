"""An entry of the cache: found, or written once by one of all processes. Knows nothing of what is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardkeep.base.errors import DataError
from shardkeep.base.files import use_newest
from shardkeep.workers.data.cache.entry import Content, FileSet, write_entry
from shardkeep.workers.data.cache.folders import (
    cache_folders,
    entry_paths,
    locked,
    place_for,
    remove_abandoned,
    temporary_folder,
    trusted,
)
from shardkeep.workers.data.input_files import State, changed_since, snapshot
from shardkeep.workers.data.samples import Progress
from shardkeep.workers.data_config import DataConfig

TRIES = 3  # to read files that change while they are read
E = TypeVar("E")


def found(config: DataConfig, files: FileSet, read: Callable[[Path], E | None]) -> E | None:
    """What `read` returns for the first folder that holds the entry; None where none does."""
    for folder in cache_folders(config, files.paths[0]):  # root's may be read where nothing can be written
        for path in entry_paths(folder, files.name) if trusted(folder) else ():
            if (entry := read(path)) is not None:
                return entry
    return None


def obtained(
    config: DataConfig,
    files: FileSet,
    read: Callable[[Path], E | None],
    write: Callable[[Path], Content],
    report: Progress,
) -> E:
    """The entry of `files`; written where there is none. Blocks while another process writes it.

    Args:
        read: Reads the entry in a folder; None = it is not there.
        write: Writes the files of the entry into an empty folder, all but what describes them.

    Raises DataError where it cannot be written or read back, or where a file changes all the time."""
    if (entry := found(config, files, read)) is not None:
        return entry
    path = place_for(cache_folders(config, files.paths[0]), files.name)
    remove_abandoned(path.parent)
    with locked(path, report):
        entry = read(path)
        if entry is None:
            use_newest(
                lambda: snapshot(files.paths),
                lambda before: _write(path, files, write, before),
                DataError,
                attempts=TRIES,
            )
            entry = read(path)
    if entry is None:
        raise DataError(f"{path}: the cache cannot be read back; delete the folder, or set data.cache")
    return entry


def _write(path: Path, files: FileSet, write: Callable[[Path], Content], before: Sequence[State]) -> None:
    """Writes the entry beside its place and renames it, so that it is there entirely or not at all.

    Raises DataError, and nothing is there, where a file is another one than `before`.
    """
    fresh: Path | None = None
    try:
        fresh = temporary_folder(path)
        content = write(fresh)
        if (changed := changed_since(before)) is not None:
            raise DataError(f"{changed}: changed while it was read, {TRIES} times; wait until it is written")
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
