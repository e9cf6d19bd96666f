"""Where the columns of input files lie: a private folder, or the one that the user names, and in it a folder for each
set of files. Knows nothing of what a column holds."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from shardkeep.base.errors import DataError
from shardkeep.base.files import atomic_write, file_lock
from shardkeep.workers.data.columns.column import FORMAT
from shardkeep.workers.data.input_files import Identity, partition_of, snapshot
from shardkeep.workers.data.samples import Progress
from shardkeep.workers.data_config import DataConfig

BESIDE_DATA, META, LOCK = ".shardkeep-cache", "files.json", "lock"
NAME = re.compile(r"[^/]*-[0-9a-f]{16}")
SUFFIXES = (".column", ".json", ".arrow", ".partial", LOCK)
"""The ends of the names of files in a folder of columns."""


def store_folders(config: DataConfig, first: Path) -> list[Path]:
    """Folders for the columns of the files that begin with `first`, the preferred one first. Makes none."""
    if config.cache is not None:
        return [Path(config.root) / Path(config.cache).expanduser()]
    return [first.resolve().parent / BESIDE_DATA, *own_folders()]


def own_folders() -> list[Path]:
    """The user's own folders, for data beside which nothing can be written."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is no home
    folders = [path / "shardkeep" / "data" for path in (xdg, home / ".cache") if path.is_absolute()][:1]
    return [*folders, Path(tempfile.gettempdir()) / f"shardkeep-data-{os.geteuid()}"]


def store_folder(config: DataConfig, first: Path) -> Path:
    """The folder for the columns of files; it is there afterwards. Raises DataError where none can be made."""
    *others, last = store_folders(config, first)
    for folder in others:
        with contextlib.suppress(OSError, RuntimeError):
            if _is_private(folder):
                return folder
    try:
        if config.cache is not None:
            last.mkdir(parents=True, exist_ok=True)
        elif not _is_private(last):
            raise PermissionError(None, "another user made it, or it cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        reason = getattr(error, "strerror", None) or "a link that leads to itself, or too many folders in one another"
        raise DataError(f"{str(last)[:300]}: the cache folder cannot be made ({reason}); set data.cache") from error
    return last


def _is_private(folder: Path) -> bool:
    """Whether a folder is ours alone; made where there is none, and closed to others where it is ours. A folder without
    a write bit is left alone even by root."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.stat().st_mode & 0o222:
        return False
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    folder.chmod(0o700)
    return True


class FileSet:
    """The folder of the columns of some files, which is named by the files' names, sizes, times and content.

    Raises DataError where a file cannot be read."""

    def __init__(self, config: DataConfig, paths: Sequence[Path]) -> None:
        self.paths, self.states = paths, snapshot(paths)
        self.identities = [state.identity for state in self.states]
        self.folder = store_folder(config, paths[0]) / self._name()

    def path(self, name: str, rule: str, suffix: str = ".column") -> Path:
        """The file of what `rule` decides."""
        readable = re.sub(r"[^A-Za-z0-9_.=-]+", "_", name)[:60]
        return self.folder / f"{readable}-{xxhash.xxh3_64_hexdigest(rule.encode())}{suffix}"

    @contextlib.contextmanager
    def writing(self, report: Progress) -> Iterator[None]:
        """Holds the folder's lock among processes; what one that died has left of it is removed, and what is stored of
        an earlier state of the files. Raises DataError where nothing can be written."""
        try:
            waiting = "waiting for another process that converts the data"
            with file_lock(self.folder / LOCK, waiting=lambda: report(waiting, 0.0)):
                for path in self.folder.glob(".*.partial"):
                    path.unlink()
                if not (self.folder / META).exists():
                    atomic_write(self.folder / META, json.dumps({"format": FORMAT, "files": self.identities}))
                    self._remove_earlier()
                yield
        except OSError as error:
            if isinstance(error, DataError):
                raise
            why = os.strerror(error.errno) if error.errno else str(error)
            raise DataError(f"{self.folder}: the cache cannot be written ({why}); set data.cache") from error

    def used(self) -> None:
        """Makes now the time of last use."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / META)

    def _name(self) -> str:
        first = self.paths[0].name.split(".")[0].encode("utf-8", "ignore")[:200].decode(errors="ignore")
        named = self.identities, [partition_of(path) for path in self.paths]  # a link has the folders of its own name
        return f"{first}-{xxhash.xxh3_64_hexdigest(json.dumps([FORMAT, *named]).encode())}"

    def _remove_earlier(self) -> None:
        paths = [each[0] for each in self.identities]
        for folder in self.folder.parent.glob(f"{glob.escape(self._name()[:-16])}*"):
            if folder != self.folder and [each[0] for each in files_of_folder(folder) or []] == paths:
                remove(folder)


def files_of_folder(folder: Path) -> list[Identity] | None:
    """The files whose columns are in a folder; None = they are not known. Raises nothing."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        files = [[str(each[0]), *each[1:]] for each in meta["files"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return files if meta["format"] == FORMAT else None


def is_columns(folder: Path) -> bool:
    """Whether a folder is one of columns, and nothing else is in it. Raises OSError."""
    if NAME.fullmatch(folder.name) is None or folder.is_symlink() or not folder.is_dir():
        return False
    return all(name.endswith(SUFFIXES) for name in os.listdir(folder))  # noqa: PTH208 - names only


def remove(folder: Path) -> bool:
    """Removes a folder of columns, unless somebody writes to it. Processes that have mapped its files keep them."""

    def busy() -> None:
        raise BlockingIOError

    try:
        if not is_columns(folder):
            return False
        with file_lock(folder / LOCK, waiting=busy):
            shutil.rmtree(folder)
    except OSError:
        return False
    return True
