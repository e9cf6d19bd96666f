"""What a switched off host leaves on shared storage. All hosts of a test have one page cache, so this is a model: each
process of a host records what it writes and syncs (`record`), and `lose` takes the rest away.

- The bytes of a file go back to its last sync by the host that opened it last for writing, whose group it has. Those
  of other hosts stay, below what this one has appended. Files of C++ count: checkpoints sync them by their path.
- A name that is made, replaced or removed is so once its folder is synced, by any host: what another host sees, the
  storage has. So after `atomic_write` alone the earlier file is back. C++'s names share the fate of their folder.
"""
# ruff: noqa: PTH100, PTH102, PTH104, PTH112, PTH113, PTH115, PTH116, PTH118, PTH120, PTH208
# Hooks of Python's audit get strings, at each `open`.

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

VARIABLE = "SHARDKEEP_TEST_DISK"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Entry = dict[str, Any]


def record() -> None:
    """Has this process and those that it forks record, where the environment asks for it."""
    if VARIABLE in os.environ and not isinstance(getattr(os.fsync, "__self__", None), Disk):
        Disk(**json.loads(os.environ[VARIABLE]))


class Disk:
    """Records one process: content of synced files by inode, and operations on names. Links to what these hide keep
    its inode's number in use. Nothing is really synced."""

    def __init__(self, top: str, kept: str, group: int) -> None:
        """`top`: the storage; `kept`: a folder beside it, for what is recorded; `group`: of the host."""
        from numpy import memmap

        from shardkeep.ps.server.journal.journal import Journal

        os.setgid(group)
        self._top, self._kept, self._group = top, kept, group
        self._log = os.open(f"{kept}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        sys.addaudithook(self._hook)
        os.fsync = os.fdatasync = self._sync
        (Journal.__init__.__kwdefaults__ or {})["fdatasync"] = self._sync
        memmap.flush = lambda mapped: self._keep(self._at(mapped.filename))  # type: ignore[method-assign, assignment]

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and given[2] & _WRITES and not given[2] & os.O_DIRECTORY and not isinstance(given[0], int):
            self._open(self._at(given[0]))
        elif event == "os.mkdir":
            self._note("make", self._at(given[0], given[2]))
        elif event == "os.link":
            self._note("make", self._at(given[1], given[3]))
        elif event == "os.rename":
            self._note("rename", self._at(given[1], given[3]), self._at(given[0], given[2]))
        elif event in ("os.remove", "os.rmdir"):
            self._note("remove", self._at(given[0], given[1]))

    def _at(self, path: Any, folder: int = -1) -> str | None:
        """The path on the storage; None = it is elsewhere. `folder`: a descriptor, -1 = none."""
        above = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
        found = os.path.abspath(os.path.join(above, os.fsdecode(path)))
        return found if f"{found}/".startswith(f"{self._top}/") else None

    def _open(self, path: str | None) -> None:
        self._note("make", path)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            if path is not None and os.path.isfile(path) and os.stat(path).st_gid != self._group:
                self._keep(path)
                os.chown(path, -1, self._group)
                self._append({"event": "seen", "path": path})

    def _note(self, event: str, path: str | None, source: str | None = None) -> None:
        refused = event == "remove" and os.path.isdir(path or "") and os.listdir(path)
        if path is None or refused or (event != "rename" and os.path.lexists(path) == (event == "make")):
            return
        link = ""
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            if os.path.isfile(path):
                link = f"{self._kept}/link-{os.stat(path).st_ino}"
                os.link(path, link)
        self._append({"event": event, "path": path, "source": source or "", "link": link, "group": self._group})

    def _append(self, entry: Entry) -> None:
        os.write(self._log, json.dumps(entry).encode() + b"\n")

    def _sync(self, file: Any) -> None:
        path = f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"
        if (at := self._at(os.readlink(path))) is not None and os.path.isdir(at):
            self._append({"event": "sync", "path": at})
        elif at is not None and os.stat(path).st_gid == self._group:
            self._keep(path)

    def _keep(self, path: str | None) -> None:
        if path is not None:
            kept = f"{self._kept}/bytes-{os.stat(path).st_ino}"
            Path(shutil.copyfile(path, f"{kept}.part")).replace(kept)


def lose(top: Path, kept: Path, group: int, seed: int | None = None) -> list[str]:
    """Takes away what a host, all processes of which are dead, has not synced. Returns what changed.

    `seed`: on storage without order some of it stays, whatever was written before, and files end anywhere."""
    pending: list[Entry] = []
    for line in (kept / "log").read_text().splitlines():
        pending = _after(pending, json.loads(line))
    with (kept / "log").open("a") as log:
        log.write(json.dumps({"event": "lost", "group": group}) + "\n")
    changed, own = [], [entry for entry in pending if entry["group"] == group]
    while own:
        entry = own.pop()
        if seed is None or random.Random(f"{seed} {os.path.relpath(entry['path'], top)}").random() < 0.5:
            changed.append(f"not done: {entry['event']} {entry['path']}")
            _undo(entry, group)
            _move(own, entry["path"], entry["source"])
    for path in sorted(path for path in top.rglob("*") if path.is_file() and path.stat().st_gid == group):
        now, synced = path.read_bytes(), kept / f"bytes-{path.stat().st_ino}"
        then = synced.read_bytes() if synced.exists() else b""
        if seed is not None:
            rng = random.Random(f"{seed} bytes of {path.relative_to(top)}")
            then = rng.choice([then, now, now[: max(len(then), rng.randrange(len(now) + 1))]])
        if then != now:
            changed.append(f"{len(now)} bytes were, {len(then)} are: {path}")
            with path.open("r+b") as file:  # in place: others may have it open
                file.write(then)
                file.truncate()
            synced.write_bytes(then)
    return changed


def _after(pending: list[Entry], entry: Entry) -> list[Entry]:
    """The operations that are not on disk after one more entry of the log."""
    if entry["event"] == "lost":
        return [each for each in pending if each["group"] != entry["group"]]
    if entry["event"] == "seen":
        return [each for each in pending if not f"{entry['path']}/".startswith(f"{each['path']}/")]
    if entry["event"] != "sync":
        _move(pending, entry["source"], entry["path"])
        return [*pending, entry]
    done = [each for each in pending if os.path.dirname(each["path"]) == entry["path"]]
    gone = tuple(f"{each['path']}/" for each in done if each["event"] == "remove")
    return [each for each in pending if each not in done and not each["path"].startswith(gone)]


def _move(entries: list[Entry], source: str, target: str) -> None:
    """Gives operations below a renamed folder their other paths."""
    for entry, key in itertools.product(entries if source and target else (), ("path", "source")):
        if entry[key].startswith(f"{source}/"):
            entry[key] = target + entry[key][len(source) :]


def _undo(entry: Entry, group: int) -> None:
    path = entry["path"]
    with contextlib.suppress(OSError):
        if entry["event"] == "make":
            _vanish(Path(path), group)
        elif entry["source"] and os.stat(path).st_gid == group:
            os.rename(path, entry["source"])
    with contextlib.suppress(OSError):
        if entry["link"]:
            os.link(entry["link"], path)
        elif entry["event"] == "remove":
            os.mkdir(path)
            os.chown(path, -1, group)


def _vanish(path: Path, group: int) -> None:
    """Deletes a file, or a folder and what is below it, except what other hosts wrote."""
    if path.is_dir():
        for below in path.iterdir():
            with contextlib.suppress(OSError):
                _vanish(below, group)
        path.rmdir()
    elif path.stat().st_gid == group:
        path.unlink()
