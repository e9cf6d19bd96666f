"""Kernels: numba functions that release the GIL, compiled ahead for stated types and cached on disk.

The decorator, the cache folder and the one call that compiles them all. Knows no kernel itself.
A module of kernels is named `kernels.py` or `*_kernels.py` and holds nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding  # type: ignore[import-untyped]

from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write

try:
    import fcntl
except ImportError:  # a platform without POSIX locks: compiling twice is slow, not wrong
    fcntl = None  # type: ignore[assignment]

PACKAGE = Path(__file__).resolve().parent.parent

F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compiles a function for the given numba signatures, or loads it from the cache folder.

    nogil, no fastmath (results are compared bit for bit), no parallel (concurrent calls of parallel
    kernels kill the process under the workqueue layer); division by zero gives inf or nan.
    """
    import numba  # here: a launcher that finds everything compiled needs none of its half second

    from shardkeep.base.kernel_files import checked_files

    def decorate(function: F) -> F:
        with checked_files(cache_folder()):
            compiled = numba.njit(list(signatures), nogil=True, cache=True, error_model="numpy")(function)
        return cast(F, compiled)

    return decorate


def compile_kernels(modules: Sequence[str], begin: Callable[[], None] = lambda: None) -> int:
    """Imports those modules of kernels that this machine has not compiled yet; returns their number.

    Under a file lock, so that only one process compiles (up to a minute). Call it before the modules are imported.
    `begin` is called first, if there is anything to compile. Raises UserError when the result cannot be kept.
    """
    if not _missing(modules):
        return 0
    begin()
    with _locked(cache_folder() / "lock"):
        missing = _missing(modules)
        for module in missing:
            _mark(module)
    return len(missing)


def _missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not _is_marked(module)]


def _mark(module: str) -> None:
    """Imports a module, and notes the sizes of its kernels' files."""
    imported = importlib.import_module(module)
    from shardkeep.base.kernel_files import files_of, is_whole

    files = files_of(imported)
    if all(is_whole(path) for path in files):  # not so where it was imported before the damage
        sizes = {str(path.relative_to(cache_folder())): path.stat().st_size for path in files}
        with _one_line(compiled_mark(module)):
            atomic_write(compiled_mark(module), json.dumps(sizes))


def _is_marked(module: str) -> bool:
    """Whether all files of a module's kernels are there, with the sizes that were noted. Whoever loads one looks at its
    checksum as well."""
    try:
        sizes = json.loads(compiled_mark(module).read_bytes())
        return all((cache_folder() / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def compiled_mark(module: str, package: Path = PACKAGE) -> Path:
    """The file that says which files of a module's kernels are in the cache folder.

    Named as numba keys its cache: by the source's place and time, besides the contents that name the folder.
    """
    source = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    stamp = source.stat().st_mtime_ns if source.exists() else 0
    key = hashlib.sha256(f"{source} {stamp}".encode()).hexdigest()[:16]
    return cache_folder() / f"{module}-{key}.compiled"


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled kernels, made if missing: the user's cache folder, else a private temporary one. Raises
    UserError when there is none.

    Its name changes with every kernel source, the version of numba and the CPU: numba's own check
    does not notice a change in a function that a kernel of another module calls.
    """
    name = f"kernels-{_fingerprint()}"
    first = _user_cache() / name
    if _made_private(first):
        return first
    with _one_line(first):
        second = Path(tempfile.gettempdir()) / f"shardkeep-{_user_id()}" / name
        return second if _made_private(second) else Path(tempfile.mkdtemp(prefix="shardkeep-kernels-"))


def kernel_sources() -> list[Path]:
    """Every file of kernels in the package, in a fixed order."""
    rooms = [entry for entry in PACKAGE.iterdir() if entry.is_dir()]  # links too: rglob does not follow them
    found = [path for room in rooms for pattern in ("kernels.py", "*_kernels.py") for path in room.rglob(pattern)]
    return sorted(set(found), key=lambda path: str(path.relative_to(PACKAGE)))


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Raises an OSError as a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise not_kept(path.parent, error) from error


def not_kept(folder: Path, error: OSError) -> UserError:
    """What a user reads when compiled kernels cannot be written."""
    return UserError(
        f"{folder}: compiled kernels cannot be kept ({error.strerror or error}); "
        "free space there, or set XDG_CACHE_HOME to another folder"
    )


def _fingerprint() -> str:
    digest = hashlib.sha256()
    features = llvmlite.binding.get_host_cpu_features().flatten()
    versions = (
        metadata.version("numba"),
        llvmlite.__version__,
        sys.version,
        llvmlite.binding.get_host_cpu_name(),
        features,
    )
    digest.update(repr(versions).encode())
    for path in kernel_sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is no home
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "shardkeep"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "shardkeep"


def _made_private(folder: Path) -> bool:
    """Whether `folder` exists or was made, is writable, and is ours alone: cached kernels are code."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in (folder, folder.parent):
            status = part.stat()
            if status.st_uid != _user_id() or status.st_mode & stat.S_IWOTH:
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with _one_line(path):
        file = path.open("ab")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def kernel_modules() -> list[str]:
    """The import names of all modules of kernels, for `compile_kernels`."""
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in kernel_sources()]
    return [f"shardkeep.{name}" for name in names if name != "base.kernels"]
