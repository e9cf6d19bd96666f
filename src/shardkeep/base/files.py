"""Files that are never half written or that are replaced while they are read, private ones, checksums, and locks
between processes. Knows nothing of what they hold."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import xxhash

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.net.descriptors import when_free

P = TypeVar("P", bound=str | Path)
T = TypeVar("T")
R = TypeVar("R")
_READ_BYTES = 1 << 20
_PRIVATE_BYTES = 1 << 16
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash of the two


class _NotLocal(ConfigError, ValueError):  # a ValueError for pydantic
    """An address stands where a path belongs."""


def local(path: P) -> P:
    """The path itself. Raises ConfigError for an address such as `s3://bucket/day`, which would become a folder."""
    if _ADDRESS.match(str(path)):
        raise _NotLocal(f"{path} is an address; copy or mount its files, and give their path")
    return path


def check_writable(folder: Path) -> None:
    """Raises OSError if nothing can be written to a folder, or to the lowest folder above it where it is missing."""
    there = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def atomic_write(path: str | Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes `content` to a temporary neighbour of `path`, then renames it: readers see all of it or the old file.
    Nobody but its owner can write it, with any umask.

    `private`: at no time can anybody but its owner read it. A process that is killed leaves the temporary file. Raises
    OSError."""
    path = Path(path)
    handle, name = when_free(lambda: tempfile.mkstemp(dir=path.parent, prefix=_temporary(path)))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if not private:  # mkstemp's own mode is 0600
            with contextlib.suppress(OSError):  # a file system without modes
                Path(name).chmod(0o644 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields temporary neighbours of files. They take the files' names if the block succeeds, else they are deleted."""
    partial = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        yield partial
        for temporary, path in zip(partial, paths, strict=True):
            temporary.replace(path)
    finally:
        for temporary in partial:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def check_out(path: Path) -> None:
    """Raises UserError for a path that cannot be a file."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise UserError(f"--out {path}: {wrong}")


def use_newest(
    find: Callable[[], T], use: Callable[[T], R], failure: type[Exception] = CheckpointError, *, attempts: int = 5
) -> tuple[T, R]:
    """Calls `use` with what `find` returns, which another process may replace meanwhile. Returns both.

    If `use` raises `failure` and `find` returns something else by then, both are called again. Raises what they
    raise."""
    while True:
        found, attempts = find(), attempts - 1
        try:
            return found, use(found)
        except failure:
            if not attempts or find() == found:
                raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts a file's name into an OSError that has none: of a write to an open file, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(path: str | Path, *, mode: int = 0o755) -> None:
    """Makes a folder and those above it that are missing, and brings their names to disk. By default nobody but their
    owner can write them, with any umask. Raises OSError."""
    path = Path(path)
    for folder in (*reversed(path.parents), path):
        if folder == path or not folder.exists():
            folder.mkdir(mode=mode, exist_ok=True)
            with contextlib.suppress(PermissionError):  # the folder above cannot be read
                sync_folder(folder.parent)


def read_private(path: str | Path) -> bytes:
    """The bytes of a secret's file.

    Raises ConfigError: it cannot be read, belongs to another user (root's are taken), or others can read or change it.
    A group may read a file of root's: so secrets are mounted into containers."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_PRIVATE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    own = found.st_uid == os.geteuid()
    if not own and found.st_uid != 0:
        raise ConfigError(f"{path}: belongs to another user (uid {found.st_uid}); allowed: your own file")
    if found.st_mode & (0o077 if own else 0o027):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{path}: others can read or change it (mode {mode:04o}); chmod 600 {path}")
    return content


def checksum(path: str | Path) -> str:
    """xxh3 of a file's bytes, 128 bits, as hex. Raises OSError."""
    found = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
    return found.hexdigest()


def sync_folder(path: str | Path) -> None:
    """Brings a folder's entries to disk: names made or renamed in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call for folders
            raise
    finally:
        os.close(descriptor)


def fill(descriptor: int, size: int) -> None:
    """Gives a fresh file its size on disk, without holes. Raises OSError when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)  # macOS has no such call
    for at in range(0, size, len(zeros)):
        write_all(descriptor, [zeros[: size - at]])


def let_go(path: Path, start: int = 0, size: int = 0) -> None:
    """Tells the system that a file's bytes (`size` 0 = to its end) are not read soon: Linux begins to write those that
    are not on disk, without waiting, and takes the others out of its page cache (mm/fadvise.c).

    A hint, which never fails. A page cache that grows takes memory that others could use, and in a virtual machine each
    page that its host has not given out yet costs a fault there: 2 ms of CPU a MiB, where those that come around again
    cost 0.2."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str | Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock on `path` among processes (and threads); the system frees it when a holder dies.

    Blocks until the lock is free; `waiting` is called once if that is not at once, and ends the wait by what it
    raises. The file stays, empty; only who holds the lock may delete it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            try:
                free = _try_lock(file.fileno())
            except OSError:  # this folder has no locks, so nobody holds it
                path.unlink(missing_ok=True)
                raise
            if not free:
                if waiting is not None:
                    waiting()
                while not _try_lock(file.fileno()):  # polled, so that a signal handler gets its turn
                    time.sleep(0.05)
            if not _is_at(path, file.fileno()):
                continue  # deleted by the holder before us: others lock another file now
            try:
                yield
            finally:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)
            return


def owner_lock(path: str | Path, *, limit_s: float) -> int:
    """A descriptor that holds an exclusive lock on `path`, which names our process; closing it, or dying, frees it.

    Blocks up to `limit_s` seconds. Raises TimeoutError naming the process that holds it, other OSErrors."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = Deadline(limit_s)
    try:
        while not _try_lock(descriptor):
            if deadline.over:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise TimeoutError(f"process {holder} still holds the lock after {limit_s:g} s")
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> int:
    """Writes parts (bytes) one after the other without joining them, however few the system takes at once; their size.

    Raises OSError, and some bytes may be written then."""
    left = [memoryview(part) for part in parts]
    size = sum(view.nbytes for view in left)
    while left:
        written = os.writev(descriptor, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]
    return size


def _temporary(path: Path) -> str:
    """How the names of temporary neighbours of `path` begin."""
    return f".{path.name}."


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
