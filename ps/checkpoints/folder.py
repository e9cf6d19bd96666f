"""The folder of a job's checkpoints: where a checkpoint's files lie, when it counts, which are kept.

    checkpoints/
      step-00001000/          complete: it was renamed from .step-00001000 once its manifest was on disk
        manifest.json         what belongs to it, each file with its size and checksum; and its own checksum
        server-0/ ...         one server's snapshot (ps/server/snapshot/files.py)
        tower/ ...            the dense model (workers/checkpoint/tower_state.py)
      step-00002000/          an increment: rows that changed since its base, which its manifest names
      step-00002000.2/        the same step written again, after the job went back: takes the other's place
      .step-00003000/         being written, or left by a job that died; never read

An increment counts only with all that it builds on, down to one that holds all rows: its chain. The base is named by
the checksum of its manifest, so that a later checkpoint of the same step cannot take its place. A complete one is
deleted only when what takes its place is on disk: at every moment there is one to resume from.

Knows paths, checksums and the manifest, not what the files hold. Both planes use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write, checksum, let_go, make_folder, sync_folder
from shardkeep.ps.checkpoints.owner import Hold

FORMAT, CHAINED, REMOVING = 3, 4, 5
"""Of a manifest: of a checkpoint on its own; of an increment, which an older version must not take for one; and of an
increment whose base may hold rows that were removed, which an older version would bring back. The lowest number that is
safe is written, so that older versions read what they can."""
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint: its path below the checkpoint, its size, its checksum (xxh3, 128 bits, hex)."""

    path: str
    size: int
    checksum: str

    @classmethod
    def of(cls, folder: Path, path: Path, computed: str = "") -> FileRecord:
        """The record of a file that was just written, which is brought to disk here, and out of the page cache. It gets
        the mode of every other file, where the file system takes one: safetensors makes private ones. `computed`: its
        checksum; "" = the file is read."""
        with contextlib.suppress(OSError):
            path.chmod(path.parent.stat().st_mode & 0o666)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        record = cls(path.relative_to(folder).as_posix(), path.stat().st_size, computed or checksum(path))
        let_go(path)
        return record

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

    def check_size(self, folder: Path, advice: str) -> None:
        """Raises CheckpointError, which ends with `advice`, when the file is missing or of another size. Reads none."""
        path = folder / self.path
        size = path.stat().st_size if path.is_file() else None
        if size != self.size:
            state = "missing" if size is None else f"damaged: {size} bytes, {self.size} were written"
            raise CheckpointError(f"{path}: {state}; {advice}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `facts`: what its writer noted of the job, JSON types."""

    folder: Path
    step: int
    files: tuple[FileRecord, ...]
    facts: dict[str, Any]
    id: str
    """The checksum of its manifest."""
    base: Checkpoint | None = None
    """The one whose rows hold where this one has none; None = it has all."""

    @property
    def chain(self) -> list[Checkpoint]:
        """What it is made of: a checkpoint of all rows, then increments, each on the one before; itself last."""
        return [*(self.base.chain if self.base is not None else []), self]

    @property
    def written_s(self) -> int:
        """When its manifest was written, in seconds since 1970, by the file system."""
        return int((self.folder / _MANIFEST).stat().st_mtime)

    def check_sizes(self) -> None:
        """Raises CheckpointError when a file of its chain is missing or of another size; reads none."""
        if self.base is not None:
            self.base.check_sizes()
        for file in self.files:
            file.check_size(self.folder, f"delete {self.folder.name} to resume from the checkpoint before it")

    def below(self, part: str) -> list[FileRecord]:
        """The files of one part, `tower` or `server-0`."""
        return [file for file in self.files if file.path.startswith(f"{part}/")]


class Checkpoints:
    """The checkpoints in one folder. One process writes at a time, except the parts that servers add.

    `hold`: what keeps other jobs out while this process writes; None = it only reads."""

    def __init__(self, folder: str | Path, *, hold: Hold | None = None) -> None:
        self.folder = Path(folder)
        self._hold = hold

    @property
    def owned(self) -> bool:
        """Whether other jobs are kept out, or were until `release`."""
        return self._hold is not None

    def begin(self, step: int) -> Path:
        """An empty folder for a new checkpoint; what an earlier attempt left is deleted. Raises CheckpointError when
        another job has taken the folder."""
        if self._hold is not None:
            self._hold.check()
        make_folder(self.folder, mode=0o777)
        for stale in self.folder.glob(".step-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def release(self) -> None:
        """Leaves the folder to other jobs: this process writes no more."""
        if self._hold is not None:
            self._hold.release()

    def abandon(self, step: int) -> None:
        """Gives back what a checkpoint that failed takes on the disk."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def partial(self, step: int) -> Path:
        """Where the files of a checkpoint lie while it is written."""
        return self.folder / f".{_name(step)}"

    def commit(
        self,
        step: int,
        files: Iterable[FileRecord],
        facts: dict[str, Any],
        *,
        base: Checkpoint | None = None,
        removes: bool = False,
    ) -> Checkpoint:
        """Makes a checkpoint whose files are all on disk count, by one rename. `base`: of an increment; `removes`: it
        may say that rows of its base were removed. One of the same step counts no more then; `prune` deletes it.

        Raises CheckpointError when a file is not there, of this one or of what it builds on, or when another job has
        taken the folder, OSError when the disk fails."""
        if self._hold is not None:
            self._hold.check()
        partial, final = self.partial(step), _free(self.folder, step)
        known = sorted(files, key=lambda file: file.path)
        for file in known:
            if not (partial / file.path).is_file() or (partial / file.path).stat().st_size != file.size:
                raise CheckpointError(
                    f"{partial / file.path}: was written elsewhere; all members must share this folder"
                )
        if base is not None:
            base = self._base_of(final.name, step, (base.step, base.id))
            base.check_sizes()
        rows = [asdict(file) for file in known]
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": rows, "facts": facts}
        if base is not None:
            manifest |= {"format": REMOVING if removes else CHAINED, "base": {"step": base.step, "id": base.id}}
        sealed = manifest | {"checksum": _seal(manifest)}
        atomic_write(partial / _MANIFEST, json.dumps(sealed, indent=1) + "\n")
        for folder in {(partial / file.path).parent for file in known} | {partial}:
            sync_folder(folder)
        partial.rename(final)
        sync_folder(self.folder)
        return Checkpoint(final, step, tuple(known), facts, checksum(final / _MANIFEST), base)

    def complete(self) -> list[tuple[int, Path]]:
        """Steps and folders of the complete checkpoints, oldest first. An increment is one if all manifests of its
        chain are there; files are not looked at."""
        return [(step, path) for step, path, _ in _complete_in(self.folder)]

    @property
    def has_start(self) -> bool:
        """Whether there is a checkpoint of step 0: the model with which the job begins."""
        return (self.folder / _name(0) / _MANIFEST).is_file()

    def folder_of(self, step: int) -> Path:
        """The folder that counts for a step, or would, if there is none."""
        return _newest(self.folder).get(step, self.folder / _name(step))

    def last_step(self) -> int:
        """The step of the newest complete checkpoint; 0 = there is none."""
        return max((step for step, _ in self.complete()), default=0)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None when there is none. Raises CheckpointError when it is damaged."""
        complete = self.complete()
        return self.load(complete[-1][0]) if complete else None

    def load(self, step: int) -> Checkpoint:
        """The manifests of a checkpoint and what it builds on; files are checked when they are read. Raises
        CheckpointError."""
        folder = self.folder_of(step)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] not in (FORMAT, CHAINED, REMOVING):
                raise unknown_format(folder, manifest["format"], REMOVING, oldest=FORMAT)
            _check(manifest, step)
            files = tuple(FileRecord(str(f["path"]), int(f["size"]), str(f["checksum"])) for f in manifest["files"])
            link = _link_of(manifest)
            base = None if link is None else self._base_of(folder.name, step, link)
            id = checksum(folder / _MANIFEST)
            return Checkpoint(folder, int(manifest["step"]), files, dict(manifest["facts"]), id, base)
        except OSError as error:
            raise CheckpointError(f"{folder}: has no manifest ({error.strerror or error})") from error
        except (ValueError, KeyError, TypeError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{folder / _MANIFEST}: damaged ({what}); delete {folder.name} to resume from the checkpoint before it"
            ) from error

    def _base_of(self, name: str, step: int, link: tuple[int, str]) -> Checkpoint:
        """The base, by its step and id, of the increment `name` of `step`. Raises CheckpointError."""
        base_step, base_id = link
        if base_step >= step:
            raise ValueError(f"step {step} on step {base_step}")
        base = self.load(base_step)
        if base.id != base_id:
            raise CheckpointError(
                f"{base.folder / _MANIFEST}: is not what {name} was written on; delete {name} to resume from the "
                "checkpoint before it"
            )
        return base

    def prune(self, keep: int, *, also: int | None = None) -> None:
        """Deletes the oldest complete checkpoints until `keep` are left and what these build on; older increments
        that lost their base, and what another of the same step took the place of, too.

        `also`: The step of one that stays at any age."""
        if not (complete := _complete_in(self.folder)):
            return
        known = {step: (folder, base) for step, folder, base in complete}
        needed: set[Path] = set()
        kept = [step for step, _, _ in complete[-keep:]]
        for step in [*kept, *(step for step in known if step == also)]:
            link: int | None = step
            while link is not None and known[link][0] not in needed:
                folder, link = known[link]
                needed.add(folder)
        for step, _, folder in _named(self.folder):
            if folder in needed or step > complete[-1][0] or not (folder / _MANIFEST).is_file():
                continue
            doomed = folder.with_name(f".{folder.name}")
            folder.rename(doomed)  # a half deleted one must not look complete
            shutil.rmtree(doomed, ignore_errors=True)


def checkpoint_in(path: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a folder of checkpoints, or the one whose folder this is; None when there is
    none. Raises CheckpointError when it is damaged, or another one of its step counts."""
    named = _NAME.fullmatch(path.name)
    if named is None or not (path / _MANIFEST).is_file():
        return Checkpoints(path).latest()
    checkpoint = Checkpoints(path.parent).load(int(named[1]))
    if checkpoint.folder != path:
        counts = f"step {checkpoint.step} was written again: {checkpoint.folder}"
        raise CheckpointError(f"{path}: does not count, because {counts}")
    return checkpoint


def unknown_format(path: Path, number: object, newest: int, *, oldest: int = 1) -> CheckpointError:
    """The error for a file or folder of a format that this version does not know."""
    known = f"{oldest} to {newest}" if newest > oldest else str(newest)
    return CheckpointError(
        f"{path}: format {number!r:.100}; this version reads {known}; use the version of shardkeep that wrote it, or a "
        "newer one"
    )


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _named(folder: Path) -> list[tuple[int, int, Path]]:
    """Returns step, number among those of the step, and path of every folder with a checkpoint's name, oldest first."""
    named = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*")]
    return sorted((int(m[1]), int(m[2] or 1), path) for m, path in named if m is not None)


def _newest(folder: Path) -> dict[int, Path]:
    """Returns the folder that counts for each step, oldest step first."""
    return {step: path for step, _, path in _named(folder) if (path / _MANIFEST).is_file()}


def _complete_in(folder: Path) -> list[tuple[int, Path, int | None]]:
    """As `Checkpoints.complete`, each with the step of its base."""
    ids: dict[int, str] = {}
    complete = []
    for step, path in _newest(folder).items():
        with contextlib.suppress(OSError):  # it is being deleted
            link = _link_in(path / _MANIFEST)
            if link is None or ids.get(link[0]) == link[1]:
                ids[step] = checksum(path / _MANIFEST)
                complete.append((step, path, None if link is None else link[0]))
    return complete


def _free(folder: Path, step: int) -> Path:
    """Returns the path of a new checkpoint. A job that rewound may have left others of the same step."""
    last = max((number for other, number, _ in _named(folder) if other == step), default=0)
    return folder / (f"{_name(step)}.{last + 1}" if last else _name(step))


def _seal(manifest: dict[str, Any]) -> str:
    """xxh3, 128 bits, as hex, of all fields of a manifest except its checksum, in one canonical form."""
    fields = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _check(manifest: dict[str, Any], step: int) -> None:
    """Raises ValueError when a manifest is not what was written, or is of another step than its folder."""
    if manifest.get("checksum") != _seal(manifest):
        raise ValueError("its checksum is wrong")
    if manifest["step"] != step:
        raise ValueError(f"it is of step {manifest['step']}")


def _link_of(manifest: dict[str, Any]) -> tuple[int, str] | None:
    """Step and id of an increment's base. Raises what a damaged manifest raises."""
    if manifest["format"] not in (CHAINED, REMOVING):
        return None
    return int(manifest["base"]["step"]), str(manifest["base"]["id"])


def _link_in(path: Path) -> tuple[int, str] | None:
    """As `_link_of`; None where the manifest is damaged, which `load` tells. Raises OSError."""
    try:
        return _link_of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):
        return None
