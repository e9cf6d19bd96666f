"""The folder of a job's checkpoints: where a checkpoint's files lie, when it counts, which are kept.

    checkpoints/
      step-00001000/          complete: it was renamed from .step-00001000 once its manifest was on disk
        manifest.json         what belongs to it, each file with its size and checksum
        server-0/ ...         one server's snapshot (ps/shard/snapshot.py)
        tower/ ...            the dense model (workers/checkpoint.py)
      .step-00002000/         being written, or left by a job that died; never read

Knows paths, checksums and the manifest, not what the files hold. Both planes use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write, checksum, sync_folder

FORMAT = 1
_MANIFEST = "manifest.json"
_TOKEN = ".token"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint: its path below the checkpoint, its size, its checksum (xxh3, 128 bits, hex)."""

    path: str
    size: int
    checksum: str

    @classmethod
    def of(cls, folder: Path, path: Path) -> FileRecord:
        """The record of a file that was just written, which is brought to disk here."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return cls(path.relative_to(folder).as_posix(), path.stat().st_size, checksum(path))

    def check(self, folder: Path) -> Path:
        """The file's path. Raises CheckpointError when it is missing or not what was written."""
        path = folder / self.path
        try:
            size = path.stat().st_size
            if size == self.size and checksum(path) == self.checksum:
                return path
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        wrong = f"{size} bytes, {self.size} were written" if size != self.size else "its checksum is wrong"
        raise CheckpointError(f"{path}: damaged: {wrong}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `facts`: what its writer noted of the job, JSON types."""

    folder: Path
    step: int
    files: tuple[FileRecord, ...]
    facts: dict[str, Any]

    def check_sizes(self) -> None:
        """Raises CheckpointError when a file is missing or of another size; reads none."""
        for file in self.files:
            path = self.folder / file.path
            if not path.is_file() or path.stat().st_size != file.size:
                state = "damaged" if path.is_file() else "missing"
                raise CheckpointError(
                    f"{path}: {state}; delete {self.folder.name} to go on from the checkpoint before it"
                )

    def below(self, part: str) -> list[FileRecord]:
        """The files of one part, `tower` or `server-0`."""
        return [file for file in self.files if file.path.startswith(f"{part}/")]


class Checkpoints:
    """The checkpoints in one folder. One process writes at a time, but for the parts that servers add."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def sign(self) -> str:
        """Leaves a fresh token in the folder, by which other processes show that they see the same one.

        Raises CheckpointError when the folder cannot be written."""
        token = secrets.token_hex(8)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / _TOKEN, token)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be written ({error.strerror or error})") from error
        return token

    def check_token(self, token: str) -> None:
        """Raises CheckpointError when the folder, as this process sees it, does not hold the token."""
        with contextlib.suppress(OSError):
            if (self.folder / _TOKEN).read_text(encoding="utf-8") == token:
                return
        raise CheckpointError(
            f"{self.folder} is not the folder that worker 0 writes checkpoints to; "
            "checkpoint.dir must be storage that all members share"
        )

    def begin(self, step: int) -> Path:
        """An empty folder for a new checkpoint; what an earlier attempt left is deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(".step-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def abandon(self, step: int) -> None:
        """Gives back what a checkpoint that failed takes on the disk."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def partial(self, step: int) -> Path:
        """Where the files of a checkpoint lie while it is written."""
        return self.folder / f".{_name(step)}"

    def commit(self, step: int, files: Iterable[FileRecord], facts: dict[str, Any]) -> Checkpoint:
        """Makes a checkpoint whose files are all on disk count, by one rename.

        Raises CheckpointError when a file is not there, OSError when the disk fails."""
        partial, final = self.partial(step), self.folder / _name(step)
        known = sorted(files, key=lambda file: file.path)
        for file in known:
            if not (partial / file.path).is_file() or (partial / file.path).stat().st_size != file.size:
                raise CheckpointError(
                    f"{partial / file.path}: was written elsewhere; all members must share this folder"
                )
        rows = [{"path": file.path, "size": file.size, "checksum": file.checksum} for file in known]
        manifest = {"format": FORMAT, "step": step, "files": rows, "facts": facts}
        atomic_write(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        for folder in {(partial / file.path).parent for file in known} | {partial}:
            sync_folder(folder)
        before = self.folder / f".{final.name}.before"
        if final.exists():  # of a run that was resumed before it
            final.rename(before)
        partial.rename(final)
        sync_folder(self.folder)
        shutil.rmtree(before, ignore_errors=True)
        return Checkpoint(final, step, tuple(known), facts)

    def complete(self) -> list[tuple[int, Path]]:
        """Steps and folders of the complete checkpoints, oldest first; the manifests are not read."""
        named = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*")]
        return sorted((int(m[1]), path) for m, path in named if m is not None and (path / _MANIFEST).is_file())

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None when there is none. Raises CheckpointError when it is damaged."""
        found = self.complete()
        return self.load(found[-1][0]) if found else None

    def load(self, step: int) -> Checkpoint:
        """The manifest of a checkpoint; its files are checked when they are read. Raises CheckpointError."""
        folder = self.folder / _name(step)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"{folder}: format {manifest['format']}; this version reads {FORMAT}")
            files = tuple(FileRecord(str(f["path"]), int(f["size"]), str(f["checksum"])) for f in manifest["files"])
            return Checkpoint(folder, int(manifest["step"]), files, dict(manifest["facts"]))
        except OSError as error:
            raise CheckpointError(f"{folder}: has no manifest ({error.strerror or error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / _MANIFEST}: damaged ({type(error).__name__}: {error})") from error

    def prune(self, keep: int) -> None:
        """Deletes the oldest complete checkpoints until `keep` are left."""
        for _, folder in self.complete()[:-keep]:
            doomed = folder.with_name(f".{folder.name}")
            folder.rename(doomed)  # a half deleted one must not look complete
            shutil.rmtree(doomed, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"
