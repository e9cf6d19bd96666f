"""Input files: config entries (files, folders, glob patterns) to a list of files, and their identity."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from shardkeep.base.errors import ConfigError, DataError

PARQUET = (".parquet", ".pq", ".parq")
NO_DATA = (".yaml", ".yml", ".md", ".json", ".py", ".crc", ".names", ".pdf")


def find_files(root: Path, entries: Sequence[str], *, key: str, kind: str) -> list[Path]:
    """The files that `entries` of the config key `key` name, in order; a folder's and a pattern's files by name.

    Left out of folders are names that start with . or _, and what cannot be of `kind` by its suffix.
    Raises DataError where nothing is there.
    """
    if not entries:
        raise ConfigError(f"{key}: is empty; allowed: at least one file, folder or glob pattern")
    return [path for entry in entries for path in _find(root, entry, key, kind)]


def _find(root: Path, entry: str, key: str, kind: str) -> list[Path]:
    path = root / Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _inside(path, key, kind)
    found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207
    if not found:
        raise DataError(_not_found(path, key))
    return found


def _inside(folder: Path, key: str, kind: str) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] not in "._")
    wanted = [p for p in files if (p.suffix in PARQUET) == (kind == "parquet") and p.suffix not in NO_DATA]
    if not wanted and files:
        raise DataError(f"{folder}: the folder has no {kind} files, only {files[0].name} ({key}); name the files")
    if not wanted:
        below = any(p.is_dir() and p.name[0] not in "._" for p in folder.iterdir())
        hint = f"; for those in its subfolders: {key}: [{folder.name}/**/*]" if below else ""
        raise DataError(f"{folder}: the folder has no files ({key}){hint}")
    return wanted


def _not_found(path: Path, key: str) -> str:
    if glob.has_magic(str(path)):
        return f"{path}: no file matches ({key})"
    if not path.parent.is_dir():
        return f"{path}: no such file ({key}); there is no folder {path.parent}; check data.root"
    names = sorted(p.name for p in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"{path}: no such file ({key}){f'; did you mean {near[0]}?' if near else ''}"


def identity(path: Path) -> list[str | int]:
    """What tells that a file is still the same: path, size in bytes, time of the last change in ns."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
