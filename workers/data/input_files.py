"""Input files: config entries (files, folders, glob patterns) to a list of files, their identity, and the columns in
the names of their folders."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

import xxhash

from shardkeep.base.errors import ConfigError, DataError, did_you_mean, first_line
from shardkeep.base.files import local
from shardkeep.workers.file_kinds import SUFFIXES, UNREAD, data_suffix, kind_of

if TYPE_CHECKING:
    from shardkeep.workers.data_config import DataConfig

PARQUET = tuple(suffix for suffix, kind in SUFFIXES.items() if kind == "parquet")
SPLITS = {"data.train": "train", "FILE": "train", "data.eval": "validation", "data.test": "test"}
"""The split of a `DatasetDict` of Hugging Face that a role reads."""
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
    if unread := next((path for path in files if path.suffix.lower() in UNREAD), None):
        raise DataError(
            f"{unread}: holds {UNREAD[unread.suffix.lower()]}, which no source reads ({key}); write Parquet, "
            "or return the columns from a function of yours (data.source: module:function)"
        )
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
    if (saved := _saved_dataset(folder, key)) is not None:
        return saved
    files = _below(folder)
    data = [p for p in files if p.suffix not in NO_DATA]
    data = data or [p for p in files if kind in ("", "jsonl") and p.suffix == ".json"]
    if kind in ("csv", "criteo"):  # any name may be a text's
        named = [p for p in data if data_suffix(p.name) in ("", ".csv", ".tsv")]
    else:
        kinds = {p: kind_of(p) for p in data}
        named = [p for p, found in kinds.items() if found == kind] if kind else data
        if not kind and len(shown := {found or "csv": p.name for p, found in kinds.items()}) > 1:
            several = ", ".join(f"{found}: {name}" for found, name in sorted(shown.items()))
            raise DataError(f"{folder}: the folder has files of several kinds ({several}); name the files ({key})")
    if not named and files:
        raise DataError(f"{folder}: the folder has no {kind} files, only {files[0].name} ({key}); name the files")
    if not named:
        below = any(p.is_dir() and p.name[0] not in "._" for p in folder.iterdir())
        hint = f"; for those in its subfolders: {key}: [{folder.name}/**/*]" if below else ""
        raise DataError(f"{folder}: the folder has no files ({key}){hint}")
    return named


def _saved_dataset(folder: Path, key: str) -> list[Path] | None:
    """The files of a dataset that Hugging Face's `save_to_disk` wrote; None = the folder is another one."""
    try:
        if (both := folder / "dataset_dict.json").is_file():
            splits, split = json.loads(both.read_text())["splits"], SPLITS.get(key, "")
            if split in splits:
                return _inside(folder / split, key, "arrow")
            raise DataError(
                f"{folder}: is a dataset with the splits {', '.join(splits)}; name one, {folder}/SPLIT ({key})"
            )
        if not (state := folder / "state.json").is_file():
            return None
        record = json.loads(state.read_text())
        files = [folder / each["filename"] for each in record["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: is no whole dataset of Hugging Face ({first_line(error)}) ({key})") from error
    if record.get("_indices_data_files"):
        raise DataError(f"{folder}: stores an order of its rows beside them; write it by flatten_indices() ({key})")
    if lost := next((path for path in files if not path.is_file()), None):
        raise DataError(f"{folder}: lacks the file {lost.name}, which state.json names ({key})")
    return files


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
    for named in [(key, path) for key, paths in roles.items() for path in paths]:
        (key, path), status = named, named[1].stat()
        role, first = known = seen.setdefault((status.st_dev, status.st_ino), named)
        if known is named:
            continue
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
    return f"{path}: no such file ({key}){did_you_mean(path.name, names)}"


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
        return [_state(path, of=len(paths)) for path in paths]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror or error})") from error


def changed_since(before: Sequence[State]) -> Path | None:
    """The first file that is not what it was; None where all are."""
    for state in before:
        with contextlib.suppress(OSError):
            if _state(state.path, of=len(before)) == state:
                continue
        return state.path
    return None


def _state(path: Path, *, of: int) -> State:
    return State(path, identity(path, of=of), path.stat().st_ino)


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


def files_of(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """Those of training and those of evaluation. Raises DataError, ConfigError."""
    files = {f"data.{role}": own_files(config, role) for role in ("train", "eval", "test")}
    check_once(files)  # those of data.test are read after training; a wrong name ends the job before it
    return files["data.train"], files["data.eval"]


def own_files(config: DataConfig, role: Literal["train", "eval", "test"]) -> list[Path]:
    """Those of one role, of which only the training files must be there. Raises as `files_of`."""
    entries, key = getattr(config, role), f"data.{role}"
    return find_files(Path(config.root), entries, key=key, kind=config.source) if entries or role == "train" else []
