"""The owner of a folder of checkpoints: which job writes there, so that two jobs never do. Knows no checkpoint.

    checkpoints/
      .lock                 locked by the process that writes
      owner-000003.json     the third owner's job, run folder, host, process, and a counter that grows while it lives

A lock ends with its process, so a killed job blocks nobody on its host. Over hosts a lock may be local (NFS with
`local_lock`, Lustre with `localflock`) or refused, so the counter decides there: it needs no common clock. An owner's
file is made exclusively, which is atomic on every shared file system, and takes the number after the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import CheckpointError, ConfigError
from shardkeep.base.files import make_folder

BEAT_S = 3.0
WATCH_S = 15.0
"""Seconds for which the counter of another host's owner must hang until the owner counts as dead."""
POLL_S = 0.1
_TEXT_CHARS = 512
_NAME = re.compile(r"owner-(\d{6,})\.json")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that writes checkpoints, or wrote them."""

    job: str
    """This start of the job."""
    run: str
    """The run folder."""
    host: str
    kernel: str
    """Names the running kernel: within one, locks always hold."""
    pid: int
    locked: bool
    """Whether it holds the lock."""
    beat: int = 0
    over: bool = False

    def __str__(self) -> str:
        return f"run folder {self.run}, process {self.pid} on {self.host}"


class Hold:
    """A folder that belongs to this process until `release`, or until the process ends."""

    def __init__(self, folder: Path, owner: Owner, *, watch_s: float = WATCH_S, beat_s: float = BEAT_S) -> None:
        """Takes the folder; blocks up to `watch_s` where an owner on another host may be dead. Raises ConfigError when
        another job has it, CheckpointError when it cannot be written."""
        self.folder = folder
        self._owner, self._watch_s, self._beat_s = owner, watch_s, beat_s
        self._number, self._lock = 0, -1
        self._released = threading.Event()
        self._writing = threading.Lock()  # of the owner's file, where what was written last must be the newest
        self._take()
        threading.Thread(target=self._beat, name="checkpoint-owner", daemon=True).start()

    def check(self) -> None:
        """Makes sure that the folder is still this process's, and takes it again if somebody deleted it. Raises
        CheckpointError when it belongs to another job, or cannot be written."""
        try:
            number, owner = _last(self.folder)
            if not number:
                self._unlock()
                self._take()
                return
        except (ConfigError, OSError) as error:
            raise CheckpointError(str(error)) from error
        if number != self._number or not (owner is None or self._is_mine(owner)):
            raise CheckpointError(f"{self.folder} was taken by another process ({owner or 'unknown'})")

    def release(self) -> None:
        """Gives the folder back; who takes it next need not wait. Idempotent."""
        with self._writing:
            if self._released.is_set():
                return
            self._released.set()
            with contextlib.suppress(OSError):
                self._write(replace(self._owner, over=True))
            self._unlock()

    def _take(self) -> None:
        try:
            make_folder(self.folder, mode=0o777)
            locked = self._try_lock()
            while True:
                number, before = _last(self.folder)
                if before is None or before.job != self._owner.job:  # else it replaces the process before it
                    self._refuse_alive(number, before, locked=locked)
                if self._enter(number + 1, locked=locked is True):
                    break
            for earlier, path in _named(self.folder):
                if earlier < self._number:
                    with contextlib.suppress(OSError):  # a sticky folder keeps another user's
                        path.unlink(missing_ok=True)
        except OSError as error:
            self._unlock()
            raise CheckpointError(f"{self.folder}: cannot be written ({error.strerror or error})") from error
        except ConfigError:
            self._unlock()
            raise

    def _refuse_alive(self, number: int, owner: Owner | None, *, locked: bool | None) -> None:
        """Raises ConfigError unless the last owner is dead or gave the folder back."""
        alive = locked is False
        if not alive and number and not (owner is not None and owner.over):
            here = owner is not None and owner.locked and owner.kernel == self._owner.kernel
            alive = not (here and locked) and self._grows()
        if alive:
            who = f" ({owner})" if owner is not None else ""
            raise ConfigError(
                f"checkpoint.dir: {self.folder} belongs to another job that runs{who}; allowed: another folder, or "
                "this one once that job has ended"
            )

    def _grows(self) -> bool:
        """Whether the last owner's file changes, or another owner comes, within the time to watch."""
        before, deadline = _last(self.folder), Deadline(self._watch_s)
        while not deadline.over:
            time.sleep(min(POLL_S, self._watch_s))
            if _last(self.folder) != before:
                return True
        return False

    def _enter(self, number: int, *, locked: bool) -> bool:
        """Makes the owner's file; False when another process was faster. Raises OSError."""
        self._owner = replace(self._owner, locked=locked)
        try:
            with (self.folder / _name(number)).open("x", encoding="utf-8") as file:
                file.write(_text(self._owner))
        except FileExistsError:
            return False
        self._number = number
        return True

    def _try_lock(self) -> bool | None:
        """Whether this process has the lock now; None where the file system has no locks. Raises OSError."""
        path = self.folder / ".lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # another user made it; a lock over NFS needs a file that can be written: None below
            self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _is_mine(self, owner: Owner) -> bool:
        own = self._owner
        return (owner.job, owner.kernel, owner.pid) == (own.job, own.kernel, own.pid)

    def _beat(self) -> None:
        while not self._released.wait(self._beat_s):
            # The folder may be gone: `check` takes it again.
            with self._writing, contextlib.suppress(OSError):
                self._owner = replace(self._owner, beat=self._owner.beat + 1)
                _, owner = _last(self.folder)
                if owner is not None and self._is_mine(owner) and not self._released.is_set():
                    self._write(self._owner)

    def _write(self, owner: Owner) -> None:
        """Writes the owner's file in place: a new file would need a name that another process may look at."""
        with (self.folder / _name(self._number)).open("r+", encoding="utf-8") as file:
            file.write(_text(owner))
            file.truncate()


def owner_here(job: str, run: str) -> Owner:
    """This process as an owner."""
    try:
        kernel = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        kernel = socket.gethostname()
    return Owner(job, run, socket.gethostname(), kernel, os.getpid(), locked=False)


def last_owner(folder: Path) -> Owner | None:
    """The process that wrote checkpoints last; None where it is not known."""
    with contextlib.suppress(OSError):
        return _last(folder)[1]
    return None


def _last(folder: Path) -> tuple[int, Owner | None]:
    """The last owner and its number; 0 = there was none, None = its file cannot be read. Raises OSError."""
    named = _named(folder)
    if not named:
        return 0, None
    number, path = named[-1]
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return number, Owner(**json.loads(path.read_text(encoding="utf-8")))
    return number, None


def _named(folder: Path) -> list[tuple[int, Path]]:
    """The owners' files by number."""
    with contextlib.suppress(FileNotFoundError):
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
        return sorted((int(m[1]), path) for m, path in matches if m is not None)
    return []


def _name(number: int) -> str:
    return f"owner-{number:06d}.json"


def _text(owner: Owner) -> str:
    """Longer by spaces than it need be: it is written over an earlier one, which may be longer."""
    return json.dumps(asdict(owner)).ljust(_TEXT_CHARS) + "\n"
