"""Input files: config entries (files, folders, glob patterns) to a list of files, their identity, and the columns in
the names of their folders."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.files import local
from shardkeep.workers.data_config import DataConfig

PARQUET = (".parquet", ".pq", ".parq")
PROBES, PROBE_BYTES = 8, 4096  # of a file's bytes, spread over it
MOST_PROBED = 64  # files: thousands on a network disk would hold up every start
Identity = list[str | int]
MISSING = "__HIVE_DEFAULT_PARTITION__"
LOGS = {
    "_delta_log": "a Delta",
    ".hoodie": "a Hudi",
    ".hoodie_partition_metadata": "a Hudi",
    "metadata/*.metadata.json*": "an Iceberg",
}
"""What shows a table whose rows are those of a log, not those of all its files."""
NO_DATA = (".yaml", ".yml", ".md", ".json", ".py", ".crc", ".names", ".pdf")


def find_files(root: Path, entries: Sequence[str], *, key: str, kind: str) -> list[Path]:
    """The files that `entries` of the config key `key` name, in order; a folder's and a pattern's files by name.

    Left out of folders are names that start with . or _, and what cannot be of `kind` by its suffix; an empty `kind` is
    the one of the files. Raises DataError where nothing is there, a folder on the way cannot be read, a file is there
    twice or belongs to a table with a log, and for an address.
    """
    if not entries:
        raise ConfigError(f"{key}: is empty; allowed: at least one file, folder or glob pattern")
    files: list[Path] = []
    for entry in entries:
        try:
            files += _find(root, Path(local(entry)).expanduser(), key, kind)
        except ConfigError as error:
            raise DataError(f"{error} ({key})") from error
        except OSError as error:
            place = error.filename or entry
            raise DataError(f"{place}: cannot be read ({error.strerror or error}) ({key})") from error
        except (ValueError, RuntimeError) as error:  # a NUL in it; a user's home that does not exist
            raise DataError(f"{key}: {entry!r} is no path ({error})") from error
    tabled = [path for path in files if kind == "parquet" or path.suffix in PARQUET]
    tabled += [path.resolve() for path in tabled if path.is_symlink()]
    folders = dict.fromkeys(path.parent for path in tabled)
    named = [path for folder in folders for path in (Path(os.path.abspath(folder)), folder.resolve())]  # noqa: PTH100
    _check_no_log(dict.fromkeys(above for path in named for above in (path, *path.parents)), key)
    check_once({key: files})
    return files


def _check_no_log(folders: Iterable[Path], key: str) -> None:
    """Raises DataError where one of the folders is that of a table with a log."""
    for folder in folders:
        for log, kind in LOGS.items():
            if next(folder.glob(log), None) is not None:
                raise DataError(
                    f"{folder}: is {kind} table, and its files hold rows that its log excludes ({key}); write the "
                    "rows that it has to Parquet files in another folder"
                )


def _find(root: Path, entry: Path, key: str, kind: str) -> list[Path]:
    path = root / entry
    if path.is_file():
        return [path]
    if path.is_dir():
        return _inside(path, key, kind)
    if path.exists():
        raise DataError(f"{path}: is neither a file nor a folder ({key})")
    pattern = Path(glob.escape(str(root))) / entry
    matches = sorted(map(Path, glob.glob(str(pattern), recursive=True)))  # noqa: PTH207
    _look_into(pattern)
    files = [p for p in matches if p.is_file()]
    files = files or [file for p in matches if p.is_dir() for file in _inside(p, key, kind)]
    if not files:
        raise NotThere(_not_found(path, key))
    return files


def _look_into(pattern: Path) -> None:
    """Raises OSError where a folder that a glob pattern leads to cannot be read: glob leaves its files out silently."""
    for depth, part in enumerate(pattern.parts):
        if glob.has_magic(part):
            places = glob.glob(str(Path(*pattern.parts[: depth + (part == "**")])), recursive=True)  # noqa: PTH207
            for place in places:
                if os.path.isdir(place):  # noqa: PTH112 - one of many
                    os.scandir(place).close()


def _inside(folder: Path, key: str, kind: str) -> list[Path]:
    _check_no_log([folder], key)
    files = _below(folder)
    data = [p for p in files if p.suffix not in NO_DATA]
    kind = kind or ("parquet" if all(p.suffix in PARQUET for p in data) else "csv")
    named = [p for p in data if (p.suffix in PARQUET) == (kind == "parquet")]
    if not named and files:
        raise DataError(f"{folder}: the folder has no {kind} files, only {files[0].name} ({key}); name the files")
    if not named:
        below = any(p.is_dir() and p.name[0] not in "._" for p in folder.iterdir())
        hint = f"; for those in its subfolders: {key}: [{folder.name}/**/*]" if below else ""
        raise DataError(f"{folder}: the folder has no files ({key}){hint}")
    return named


def _below(folder: Path) -> list[Path]:
    """The files of a folder, then those of its partitions, each by name."""
    inside = sorted(p for p in folder.iterdir() if p.name[0] not in "._")
    below = [file for p in inside if is_partition(p) and p.is_dir() for file in _below(p)]
    return [p for p in inside if p.is_file()] + below


class NotThere(DataError):
    """No file is where the config says."""


@contextlib.contextmanager
def advising(advice: str) -> Iterator[None]:
    """Adds what to do about files that are not there to the error."""
    try:
        yield
    except NotThere as error:
        raise NotThere(f"{error}; {advice}") from error


def check_once(roles: Mapping[str, Sequence[Path]]) -> None:
    """Raises DataError for a file that is there twice, in one role or in two. A link is the file to which it leads.

    Args:
        roles: The files by the config key that names them."""
    seen: dict[tuple[int, int], tuple[str, Path]] = {}
    for key, paths in roles.items():
        for path in paths:
            status = path.stat()
            file = status.st_dev, status.st_ino
            if file not in seen:
                seen[file] = key, path
                continue
            role, first = seen[file]
            same = "" if first == path else f" (the same file as {first})"
            if role == key:
                raise DataError(f"{path}{same}: is in {key} twice; name each file once")
            raise DataError(
                f"{path}{same}: is in {role} and in {key}; a file has one role: name the other files in {role}, for "
                "example by a pattern such as 2024-05-0[1-6].csv, or move it to a folder of its own"
            )


def _not_found(path: Path, key: str) -> str:
    if glob.has_magic(str(path)):
        return f"{path}: no file matches ({key})"
    if path.is_symlink():
        return f"{path}: is a link that leads nowhere ({key})"
    if not path.parent.is_dir():
        return f"{path}: no such file ({key}); there is no folder {path.parent}"
    names = sorted(p.name for p in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"{path}: no such file ({key}){f'; did you mean {near[0]}?' if near else ''}"


def identity(path: Path, *, of: int) -> Identity:
    """What says that one of a set `of` so many files is still the same: path, size in bytes, time of the last change
    in ns, and in small sets the checksum of some of its bytes, for copies that keep time and size. Raises OSError."""
    if of > MOST_PROBED:
        status = path.stat()
        return [str(path.resolve()), status.st_size, status.st_mtime_ns]
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        checksum = xxhash.xxh3_64()
        for part in range(PROBES):
            file.seek(part * max(0, status.st_size - PROBE_BYTES) // (PROBES - 1))
            checksum.update(file.read(PROBE_BYTES))
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, checksum.hexdigest()]


@dataclass(frozen=True)
class State:
    """A file at one time. `inode`: another one means that the file was replaced, even with equal time and size."""

    path: Path
    identity: Identity
    inode: int


def snapshot(paths: Sequence[Path]) -> list[State]:
    """What the files are now. Raises DataError where one cannot be read."""
    try:
        return [State(path, identity(path, of=len(paths)), path.stat().st_ino) for path in paths]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})") from error


def changed_since(before: Sequence[State]) -> Path | None:
    """The first file that is not what it was; None where all are."""
    for state in before:
        try:
            if (identity(state.path, of=len(before)), state.path.stat().st_ino) != (state.identity, state.inode):
                return state.path
        except OSError:
            return state.path
    return None


# Partitions, as Hive, Spark and pyarrow write them: `log/dt=2024-05-01/country=DE/part-0.parquet` has the columns dt
# and country in each row. All values are texts.


def is_partition(folder: Path) -> bool:
    """Whether a folder's name is KEY=VALUE."""
    return folder.name.find("=") > 0


def partition_of(path: Path) -> dict[str, str | None]:
    """The columns in the names of the folders right above a file; None = missing."""
    columns: dict[str, str | None] = {}
    for folder in path.parents:
        if not is_partition(folder):
            break
        key, _, value = folder.name.partition("=")
        columns[unquote(key)] = None if value == MISSING else unquote(value)
    return columns


def columns_of_folders(path: Path, columns: Sequence[str], names: Sequence[str]) -> dict[str, pa.Scalar]:
    """The value of each of `columns` that a file with the columns `names` has only by its folders."""
    pairs = partition_of(path).items()
    return {key: pa.scalar(value, pa.string()) for key, value in pairs if key in columns and key not in names}


def first_file(config: DataConfig) -> Path:
    """The first training file: the one that says which columns there are."""
    return files_of(config)[0][0]


def files_of(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """Those of training and those of evaluation. Raises DataError, ConfigError."""
    root = Path(config.root)
    kind = config.source
    roles = {"data.train": config.train, "data.eval": config.eval, "data.test": config.test}
    files = {
        key: find_files(root, entries, key=key, kind=kind)
        for key, entries in roles.items()
        if entries or key == "data.train"
    }
    check_once(files)  # those of data.test are read after training; a wrong name ends the job before it
    return files["data.train"], files.get("data.eval", [])
