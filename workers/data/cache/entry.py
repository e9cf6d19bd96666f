"""One cache entry on disk: columnar files and meta.json, which is written last. Both ends of its form.

An entry is made from one file set: the training files, or the evaluation files. It names the files with their
size, time and content, and the settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.files import atomic_write
from shardkeep.workers.data.cache.folders import trusted
from shardkeep.workers.data.columnar import ColumnarDataset, Stored
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.layout import Fitted
from shardkeep.workers.data.conversion.teaching import Note
from shardkeep.workers.data.input_files import Identity, identity
from shardkeep.workers.data.schema import Schema

FORMAT = 8  # a new number makes every older entry a stranger
META = "meta.json"
BESIDE = ".targets"  # ends the name of a file whose labels, weights and times stand in place of those of a side
E = TypeVar("E")


@dataclass(frozen=True)
class FileSet:
    """What an entry is made from. `settings`: all that its bytes depend on, but the files' content."""

    paths: Sequence[Path]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The same for the same files and settings, so that changed files replace their old entry."""
        text = json.dumps([self.settings, [str(p.resolve()) for p in self.paths]], sort_keys=True)
        first = self.paths[0].name.split(".")[0].encode("utf-8", "ignore").decode()  # pyarrow opens no other
        return f"{first}-{xxhash.xxh3_64_hexdigest(text.encode())}"


@dataclass(frozen=True)
class Content:
    """What a conversion has written, and what the training rows have decided."""

    inputs: Inputs
    checksums: Mapping[str, str]
    """Of the values of each side, by the name of its file."""
    stored: Stored
    """What lies side by side in its files."""
    skipped: int
    """Rows left out because their label is missing."""
    notes: Sequence[Note]
    """What a person should know of the columns."""
    absent: Mapping[str, str]
    """Values of `label.positive` that no row has, and what its column holds."""


@dataclass(frozen=True)
class CacheEntry:
    """An entry whose files are all there, at their length."""

    folder: Path
    content: Content
    parts: Mapping[str, ColumnarDataset]
    size_bytes: int


def write_entry(folder: Path, files: FileSet, inputs: Sequence[Identity], content: Content) -> None:
    """Completes an entry whose columnar files are in `folder`: nobody but us can change it. Raises OSError."""
    meta = {
        "format": FORMAT,
        "settings": files.settings,
        "inputs": inputs,
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "checksums": content.checksums,
        "model": content.inputs.to_json(),
        "stored": content.stored,
        "skipped": content.skipped,
        "notes": content.notes,
        "absent": content.absent,
        "made": time.time(),
    }
    atomic_write(folder / META, json.dumps(meta, indent=1))
    for path in folder.iterdir():
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o022:
            path.chmod(mode & ~0o022)
    folder.chmod(folder.parent.stat().st_mode & 0o755)  # mkdtemp's is for one user only


def read_entry(folder: Path, files: FileSet, schema: Schema, fitted: Fitted | None) -> CacheEntry | None:
    """The samples of these files; None where they are not there, as of `read_files`. `fitted` replaces the entry's own
    scaling."""

    def read(meta: Mapping[str, Any], mapped: Mapping[str, pa.Buffer]) -> CacheEntry:
        content = content_of(meta)
        if fitted is not None:
            content = replace(content, inputs=replace(content.inputs, fitted=fitted))
        return CacheEntry(folder, content, samples_of(mapped, content, schema), sum(meta["sizes"].values()))

    return read_files(folder, files, read)


def content_of(meta: Mapping[str, Any]) -> Content:
    """What an entry says of its content. Raises KeyError or ValueError."""
    said = (meta[name] for name in ("checksums", "stored", "skipped", "notes", "absent"))
    return Content(Inputs.of_json(meta["model"]), *said)


def samples_of(mapped: Mapping[str, pa.Buffer], content: Content, schema: Schema) -> dict[str, ColumnarDataset]:
    """The samples of each side in the files of an entry. Raises KeyError or ValueError for others."""
    fitted = content.inputs.fitted
    form: dict[str, Any] = {"schema": schema, "lists": fitted.lists, "transform": fitted.transform}
    return {
        name: ColumnarDataset(mapped[name], **form, stored=content.stored, targets=mapped.get(f"{name}{BESIDE}"))
        for name in content.checksums
    }


def mapped_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, pa.Buffer]:
    """The content of files of an entry. Raises OSError or ValueError where one may be another than was written."""
    mapped = {name: pa.memory_map(str(folder / name)).read_buffer() for name in sizes if trusted(folder / name)}
    if {name: content.size for name, content in mapped.items()} != dict(sizes):
        raise ValueError(f"{folder}: is not as it was written")
    return mapped


def read_files(
    folder: Path, files: FileSet, read: Callable[[Mapping[str, Any], Mapping[str, pa.Buffer]], E]
) -> E | None:
    """What `read` makes of the entry of these files: of its meta.json and its other files, mapped.

    None where it is absent, of other inputs, damaged, or maybe made by somebody else. Its time of last use becomes now.
    """
    try:
        meta = read_meta(folder)
        identities = [identity(path, of=len(files.paths)) for path in files.paths]
        if meta["settings"] != json.loads(json.dumps(files.settings)) or meta["inputs"] != identities:
            return None
        entry = read(meta, mapped_files(folder, meta["sizes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # pa.ArrowInvalid is a ValueError
    with contextlib.suppress(OSError):
        os.utime(folder / META)
    return entry


def read_meta(folder: Path) -> dict[str, Any]:
    """What an entry says of itself. Raises OSError and ValueError: there is none, or it is not ours or root's."""
    if not (trusted(folder) and trusted(folder / META)):
        raise PermissionError(f"{folder}: belongs to another user, or others can write it")
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{folder}: is of another version")
    return meta
