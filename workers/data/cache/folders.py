"""Where cache entries may lie, whose the folders are, and the lock of an entry. Knows nothing of an entry's content."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkeep.base.errors import DataError
from shardkeep.base.files import file_lock
from shardkeep.base.machine.owners import lists, why_distrusted
from shardkeep.workers.data.samples import Progress
from shardkeep.workers.data_config import DataConfig

BESIDE_DATA = ".shardkeep-cache"
NAME = re.compile(r"(?P<entry>[^/]*-[0-9a-f]{16}(-[0-9]+)?)")
PART = re.compile(rf"\.{NAME.pattern}\.[a-z0-9_]{{8}}")  # as mkdtemp makes them
FILES = ("meta.json", ".meta.json.", "train.arrow", "eval.arrow", "test.arrow", "catalogue.arrow", ".catalogue.arrow.")


def cache_folders(config: DataConfig, first: Path) -> list[Path]:
    """Folders for the entry of the input files that begin with `first`, the preferred one first. Makes none."""
    if config.cache is not None:
        return [Path(config.root) / Path(config.cache).expanduser()]
    return [first.resolve().parent / BESIDE_DATA, *own_folders()]


def own_folders() -> list[Path]:
    """The user's own folders, for data beside which nothing can be written."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is no home
    folders = [path / "shardkeep" / "data" for path in (xdg, home / ".cache") if path.is_absolute()][:1]
    return [*folders, Path(tempfile.gettempdir()) / f"shardkeep-data-{os.geteuid()}"]


def trusted(path: Path) -> bool:
    """Whether only we, or root, can have put `path` there; False where it is absent."""
    try:
        return why_distrusted(path) is None
    except (OSError, RuntimeError):  # RuntimeError: a link that leads to itself, or a path of thousands of parts
        return False


def entry_paths(folder: Path, name: str) -> list[Path]:
    """Where an entry may be in `folder`: by its name, or by ours too where another user has that name."""
    return [folder / name, folder / f"{name}-{os.geteuid()}"]


def place_for(folders: Sequence[Path], name: str) -> Path:
    """Where to write the entry `name`; its folder is made. Raises DataError where no folder can be used."""
    folder = next((f for f in folders[:-1] if _usable(f)), folders[-1])
    _make(folder)
    for path in entry_paths(folder, name):
        if all(p.lstat().st_uid == os.geteuid() for p in (path, lock_path(path)) if os.path.lexists(p)):
            return path
    raise DataError(f"{path}: belongs to another user; set data.cache to a folder of your own")


def _usable(folder: Path) -> bool:
    """Whether files can be made there, by us alone. A folder without a write bit is left alone even by root."""
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        if not nearest.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return False
        _make_own(folder)
        status = folder.lstat()
        if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022:
            folder.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
        if why_distrusted(folder) is not None:
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, RuntimeError):
        return False


def _make(folder: Path) -> None:
    """Makes the last resort. Raises DataError where that fails, or where others could change what is in it."""
    try:
        _make_own(folder)
        why = why_distrusted(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "a link that leads to itself, or too many folders in one another"
        raise DataError(f"{str(folder)[:300]}: the cache folder cannot be made ({reason}); set data.cache") from error
    if why is not None:
        raise DataError(
            f"data.cache: {why}; allowed: a folder of yours that no one else can write, or with chmod +t; if you trust "
            f"all who can, list the folder in {lists()[0]}"
        )


def _make_own(folder: Path) -> None:
    """Makes `folder` so that nobody else can write it, with any umask; one in a temporary folder for us alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700 if folder.parent == Path(tempfile.gettempdir()) else 0o755)


@contextlib.contextmanager
def locked(entry: Path, progress: Progress) -> Iterator[None]:
    """Holds the entry's lock among processes, and removes what one that died has left of the entry."""
    path = lock_path(entry)
    waiting = "waiting for another process that converts the data"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(path, waiting=lambda: progress(waiting, 0.0)))
        except OSError as error:
            raise DataError(f"{path}: the cache cannot be written ({error.strerror}); set data.cache") from error
        yield


def temporary_folder(entry: Path) -> Path:
    """A new folder beside the entry, for its parts until they are complete. Its name says which entry it is of."""
    return Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))


def entry_of(path: Path) -> Path | None:
    """The entry that a folder is, or is a part of; None for any other folder. Raises OSError."""
    named = NAME.fullmatch(path.name) or PART.fullmatch(path.name)
    if named is None or path.is_symlink() or not path.is_dir():
        return None
    if any(not name.startswith(FILES) for name in os.listdir(path)):  # noqa: PTH208 - names only
        return None
    return path.with_name(named["entry"])


def abandoned(folder: Path) -> list[Path]:
    """Temporary folders whose process died: nobody holds the lock of their entry. Only those of ours."""
    with contextlib.suppress(OSError):
        return [path for path in sorted(folder.iterdir()) if _is_abandoned(path)]
    return []


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary folders that nobody writes any more."""
    for path in abandoned(folder):
        shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    if (entry := entry_of(path)) is None or entry == path or path.lstat().st_uid != os.geteuid():
        return False
    try:
        with file_lock(lock_path(entry), waiting=busy):
            return True
    except OSError:
        return False


def busy() -> None:
    """For `file_lock(waiting=)`: raises BlockingIOError instead of a wait for a process that holds the lock."""
    raise BlockingIOError


def lock_path(entry: Path) -> Path:
    """The lock of an entry, held while the entry is written or removed."""
    return entry.parent / f".{entry.name}.lock"
