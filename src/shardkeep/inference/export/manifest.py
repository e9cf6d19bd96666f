"""The manifest of an export, writer and reader: what the model is, and which files belong to it.

    OUT/manifest.json        written last, by one rename: until then an older export in OUT stays whole
    OUT/files-1a2b3c4d/      the files of this manifest; a new export makes another folder and deletes this one

It ends with a checksum of itself, and its text has one form: any other byte is damage. Loads no kernels, because it is
read before they are compiled.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import xxhash
from pydantic import ValidationError

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import atomic_write, file_lock, sync_folder
from shardkeep.base.settings import first_problem, known
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import FileRecord, unknown_format
from shardkeep.ps.config import TableSpec
from shardkeep.workers.model_config import RETRIEVAL

MANIFEST = "manifest.json"
TOWER, PROGRAM, ITEMS = "tower.safetensors", "tower.pt2", "items.parquet"
TowerFormat = Literal["fp32", "int8"]
RowFormat = Literal["fp32", "fp16", "int8"]
DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
assert set(get_args(RowFormat)) == set(DTYPES)
MOST_BITS = 28
"""Of the placement keys by which a table's offsets find an id."""
FORMAT = 2
_KIND = "shardkeep model"
_FILES = re.compile(r"files-[0-9a-f]{8}")
_LOCK = ".export.lock"
T = TypeVar("T")
_PLAIN = {
    "folder": str, "step": int, "settings": dict, "inputs": dict, "tower": str, "program": bool, "metrics": dict,
    "versions": dict,
}  # fmt: skip
"""Fields of a manifest that are stored as they are, and their types."""
SETTINGS = frozenset({"name", "seed", "model", "tables", "tower", "train", "eval"})
"""The keys of a job's config that a model needs."""


@dataclass(frozen=True)
class TableRecord:
    """What the manifest says about a table.

    Attributes:
        rows: N.
        offsets: xxh3, 64 bits, as hex, of the offsets.
    """

    spec: TableSpec
    rows: int
    format: RowFormat
    bits: int
    offsets: str

    def to_json(self) -> dict[str, Any]:
        spec = self.spec.model_dump(mode="json", include={"name", "dim", "init"})  # an optimizer is of no use here
        found = {"spec": spec, "rows": self.rows, "format": self.format}
        return found | {"bits": self.bits, "offsets": self.offsets}

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> TableRecord:
        """Undoes `to_json`. Raises ValueError, which names the key, for anything else."""
        format, rows, bits = (
            field_of(record, "format", str),
            field_of(record, "rows", int),
            field_of(record, "bits", int),
        )
        if format not in DTYPES or rows < 0 or not 1 <= bits <= MOST_BITS:
            raise ValueError(f"format {format[:20]}, {rows} rows, {bits} bits")
        try:
            spec = TableSpec.model_validate(known(field_of(record, "spec", dict), TableSpec))
        except ValidationError as error:
            raise ValueError(f"spec.{first_problem(error)}") from error
        return cls(spec, rows, cast(RowFormat, format), bits, field_of(record, "offsets", str))

    def arrays(self) -> tuple[dict[str, tuple[Any, tuple[int, ...]]], dict[str, tuple[Any, tuple[int, ...]]]]:
        """Type and shape of the arrays of the index file and of the rows file, in their order."""
        index: dict[str, tuple[Any, tuple[int, ...]]] = {
            "ids": (np.int64, (self.rows,)),
            "offsets": (np.int64, ((1 << self.bits) + 1,)),
        }
        if self.format == "int8":
            index["scales"] = (np.float32, (self.rows,))
        return index, {"rows": (DTYPES[self.format], (self.rows, self.spec.dim))}


def field_of(record: Any, key: str, kind: type[T]) -> T:
    """A value of a JSON object. Raises ValueError, which names the key, where it is missing or of another type."""
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"{key}: is missing")
    if type(record[key]) is not kind:  # True is no number
        raise ValueError(f"{key}: is of type {type(record[key]).__name__}; allowed: {kind.__name__}")
    found: T = record[key]
    return found


def files_of(folder: Path, number: int) -> tuple[Path, Path]:
    """The index file and the rows file of a table, by its number in the manifest."""
    return folder / f"table-{number}.index.safetensors", folder / f"table-{number}.rows.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What an export says of itself.

    Attributes:
        folder: The name of the folder of files, in the export.
        step: The training step of the model.
        settings: The keys of the job's config that the model needs.
        inputs: How raw columns become inputs, as of a checkpoint.
        tower: fp32 or int8.
        program: Whether the dense model is a program of torch.export.
        metrics: The job's evaluation of this model, {} = none; `cost`: what the number formats changed of it, by
            metric, None = not measured.
        versions: Of shardkeep and torch.
    """

    folder: str
    step: int
    settings: dict[str, Any]
    inputs: dict[str, Any]
    tables: tuple[TableRecord, ...]
    tower: str
    program: bool
    metrics: dict[str, Any]
    cost: dict[str, float] | None
    versions: dict[str, str]
    files: tuple[FileRecord, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @property
    def finds_items(self) -> bool:
        """Whether it is a retrieval model, which has a file of items."""
        model = self.settings.get("model")
        return isinstance(model, dict) and model.get("name") in RETRIEVAL

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": _KIND, "format": FORMAT, "cost": self.cost}
        found |= {name: getattr(self, name) for name in _PLAIN}
        found["tables"] = [table.to_json() for table in self.tables]
        found["files"] = [asdict(file) for file in self.files]
        return found

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> Manifest:
        """Undoes `to_json`. Raises ValueError, which names the key, for anything else."""
        fields: dict[str, Any] = {name: field_of(record, name, kind) for name, kind in _PLAIN.items()}
        fields["cost"] = None if record.get("cost", {}) is None else field_of(record, "cost", dict)
        tables = _each("tables", field_of(record, "tables", list), TableRecord.of_json)
        files = _each("files", field_of(record, "files", list), _file)
        found = cls(**fields, tables=tuple(tables), files=tuple(files))
        found._check()
        return found

    def _check(self) -> None:
        """Raises ValueError for what no export has. A reader neither leaves the folder nor runs code by a manifest."""
        if self.step < 0 or self.tower not in get_args(TowerFormat):
            raise ValueError(f"step {self.step}, tower {self.tower[:20]}")
        if not _FILES.fullmatch(self.folder):
            raise ValueError(f"folder {self.folder[:40]}")
        needed = {path.name for number in range(len(self.tables)) for path in files_of(Path(), number)}
        needed.add(PROGRAM if self.program else TOWER)
        if self.finds_items:
            needed.add(ITEMS)
        names = [file.path.removeprefix(f"{self.folder}/") for file in self.files]
        if len(set(names)) < len(names) or not needed <= set(names) <= needed | {PROGRAM}:
            raise ValueError("files: its list of files is not that of an export")
        tables = [table.spec.name for table in self.tables]
        if len(set(tables)) < len(tables):
            raise ValueError("tables: two tables have the same name")
        if unknown := set(self.settings) - SETTINGS:
            raise ValueError(f"settings {sorted(unknown)[0][:40]}")
        if ":" in str(self.settings.get("model", {}).get("name", "")) and not self.program:
            raise ValueError("it names a model of the user's own and has no program")

    def config(self, out: Path) -> JobConfig:
        """The settings of the job. Raises CheckpointError, which names the folder `out`."""
        try:
            return JobConfig.stored(known(self.settings, JobConfig))
        except ValidationError as error:
            raise CheckpointError(
                f"{out / MANIFEST}: its settings do not fit this version: settings.{first_problem(error)}"
            ) from error

    def verify(self, out: Path) -> None:
        """Reads every file. Raises CheckpointError for the first one that is not what was written."""
        for file in self.files:
            file.check(out)


def is_export(path: Path) -> bool:
    """Whether a folder has the manifest of an export. A damaged one counts if it is beside files of an export."""
    try:
        record = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (ValueError, RecursionError):
        return any(_FILES.fullmatch(other.name) for other in path.iterdir())
    return isinstance(record, dict) and record.get("kind") == _KIND


@contextlib.contextmanager
def new_files(out: Path) -> Iterator[Path]:
    """An empty folder for the files of a new export, in `out`, which is made. Files that no manifest names are deleted
    at the end. Holds a lock, so that two exports do not delete each other's files. Raises UserError, OSError."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; allowed: a new folder, or an export to replace")
    if out.is_dir() and not is_export(out) and any(not _ours(path) for path in out.iterdir()):
        raise UserError(f"{out}: is a folder of something else; allowed: a new folder, or an export to replace")
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)

    def busy() -> None:
        raise UserError(f"{out}: another export writes to it; allowed: another folder, or wait until it is done")

    try:
        with file_lock(out / _LOCK, waiting=busy):
            folder = out / f"files-{secrets.token_hex(4)}"
            folder.mkdir()
            try:
                yield folder
            finally:
                _clean(out)
                (out / _LOCK).unlink(missing_ok=True)
    finally:
        if new:
            with contextlib.suppress(OSError):  # it is not empty
                out.rmdir()


def commit(out: Path, manifest: Manifest) -> None:
    """Makes the manifest count, in place of an earlier one. Raises OSError."""
    sync_folder(out / manifest.folder)
    atomic_write(out / MANIFEST, _text(manifest.to_json()))
    sync_folder(out)


def _clean(out: Path) -> None:
    """Deletes folders of files that the manifest does not name, and what a killed export left."""
    try:
        named = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["folder"]
    except FileNotFoundError:
        named = ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for path in out.iterdir():
        if path.is_dir() and _FILES.fullmatch(path.name) and path.name != named:
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(f".{MANIFEST}."):
            path.unlink(missing_ok=True)


def read_manifest(out: Path) -> Manifest:
    """The manifest of an export. Raises UserError where there is none, CheckpointError where it is damaged."""
    path = out / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{out}: has no {MANIFEST}; allowed: a folder that shardkeep export has finished") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        record = json.loads(text)
        if record.get("kind") == _KIND and record.get("format") != FORMAT and _sealed(record) == record:
            raise unknown_format(path, record.get("format"), FORMAT, oldest=FORMAT)
        record.pop("checksum")
        if _text(record) != text:
            raise ValueError("its checksum is wrong")
        return Manifest.of_json(record)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split()) if isinstance(error, ValueError) else type(error).__name__
        raise CheckpointError(f"{path}: damaged ({why[:160]}); export the model again") from error


def records_of(out: Path, paths: Sequence[Path]) -> tuple[FileRecord, ...]:
    """The records of new files, which are brought to disk here. Raises OSError."""
    return tuple(FileRecord.of(out, path) for path in sorted(paths))


def _each(key: str, records: list[Any], of: Callable[[Any], T]) -> Iterator[T]:
    for number, record in enumerate(records):
        try:
            yield of(record)
        except ValueError as error:
            raise ValueError(f"{key}.{number}.{error}") from error


def _file(record: Any) -> FileRecord:
    return FileRecord(field_of(record, "path", str), field_of(record, "size", int), field_of(record, "checksum", str))


def _ours(path: Path) -> bool:
    """Whether only an export makes such a name; the manifest is looked into elsewhere."""
    return bool(_FILES.fullmatch(path.name)) or path.name == _LOCK or path.name.startswith(f".{MANIFEST}.")


def _text(record: dict[str, Any]) -> str:
    return json.dumps(_sealed(record), indent=1) + "\n"


def _sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a checksum: xxh3, 128 bits, as hex, of its other fields."""
    fields = {key: value for key, value in record.items() if key != "checksum"}
    return fields | {"checksum": xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())}
