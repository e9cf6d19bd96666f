"""Kernels: numba functions that release the GIL, compiled ahead for stated types and cached on disk.

The decorator, the cache folder and the call that compiles modules of kernels. Knows no kernel itself.
A module of kernels is named `kernels.py` or `*_kernels.py` and holds nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding  # type: ignore[import-untyped]

from shardkeep.base.compiling.builders import build_all
from shardkeep.base.compiling.errors import unwritable_cache
from shardkeep.base.compiling.sources import fingerprint, kernel_modules, with_imports
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.versions import usable_cores

try:
    import fcntl
except ImportError:  # a platform without POSIX locks: compiling twice is slow, not wrong
    fcntl = None  # type: ignore[assignment]

__all__ = ["build", "cache_folder", "compile_kernels", "kernel", "kernel_modules", "load_kernels"]

_MARK = "compiled.json"
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_UNUSED_S = 30 * 86400.0
"""Seconds after which the code of a source that nobody has started with is deleted."""

F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: str) -> Callable[[F], F]:
    """Compiles a function for the given numba signatures, or loads it from the cache folder.

    nogil, no fastmath (results are compared bit for bit), no parallel (concurrent calls of parallel
    kernels kill the process under the workqueue layer); division by zero gives inf or nan.
    """
    import numba  # here: a launcher that finds everything compiled needs none of its half second

    from shardkeep.base.compiling.cache_files import checked_files

    def decorate(function: F) -> F:
        with checked_files(_folder_of(function.__module__)):
            compiled = numba.njit(list(signatures), cache=True, **_OPTIONS)(function)
        return cast(F, compiled)

    return decorate


def compile_kernels(modules: Sequence[str], begin: Callable[[int], None] = lambda count: None) -> int:
    """Compiles those modules of kernels that this machine has not compiled yet, and those that they import; returns
    their number.

    Uses a process for each core. Under a file lock, so that no two callers compile. Call it before the modules are
    imported. `begin` is called first with their number, unless it is 0. Raises UserError when the result cannot be
    kept.
    """
    modules = with_imports(modules)
    if not (count := len(_missing(modules))):
        return 0
    begin(count)
    with _locked(cache_folder() / "lock"):
        missing = _missing(modules)
        if (builders := min(usable_cores(), len(missing) - 1)) > 1:
            build_all(missing, builders)
        for module in _missing(missing):  # those that no builder has built
            build(module)
        for module in missing:
            _drop_unused(module)
    return len(missing)


def load_kernels(modules: Sequence[str]) -> None:
    """Imports modules of kernels, compiled before where need be: then no step waits for them. Raises as
    `compile_kernels`."""
    compile_kernels(modules)
    for module in modules:
        importlib.import_module(module)


def _missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not _is_marked(module)]


def build(module: str) -> None:
    """Compiles one module where it is not compiled, by importing it. Notes the sizes of its kernels' files."""
    importlib.import_module(module)
    from shardkeep.base.compiling.cache_files import is_whole

    files = sorted(_folder_of(module).glob("*.nb[ic]"))
    if all(is_whole(path) for path in files):  # not so where it was imported before the damage
        with _one_line(_mark_of(module)):
            _mark_of(module).parent.mkdir(exist_ok=True)
            atomic_write(_mark_of(module), json.dumps({path.name: path.stat().st_size for path in files}))


def _is_marked(module: str) -> bool:
    """Whether all files of a module's kernels are there, with the sizes that were noted. Loading one also checks its
    checksum."""
    mark = _mark_of(module)
    try:
        sizes = json.loads(mark.read_bytes())
        whole = all((mark.parent / name).stat().st_size == size for name, size in sizes.items())
        os.utime(mark)  # in use: see _drop_unused
    except (OSError, ValueError, AttributeError):
        return False
    return whole


def _drop_unused(module: str) -> None:
    """Deletes the code of other sources of a module, where nothing has started with it for long."""
    for mark in cache_folder().glob(f"{module}-*/{_MARK}"):
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(mark.parent)


def _mark_of(module: str) -> Path:
    """The file that says which files there are of a module's kernels."""
    return _folder_of(module) / _MARK


def _folder_of(module: str) -> Path:
    """Where the code of a module's kernels is kept. A source that changes, or one that it imports, gets another folder,
    and the same sources in another place get the same."""
    return cache_folder() / f"{module}-{fingerprint(module)}"


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled kernels, made if missing: the user's cache folder, else a private temporary one. Raises
    UserError when there is none.

    Its name changes with the versions of numba and Python and with the CPU.
    """
    name = f"kernels-{_environment()}"
    first = user_cache() / name
    if _made_private(first):
        return first
    with _one_line(first):
        second = Path(tempfile.gettempdir()) / f"shardkeep-{_user_id()}" / name
        return second if _made_private(second) else Path(tempfile.mkdtemp(prefix="shardkeep-kernels-"))


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Raises an OSError as a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise unwritable_cache(path.parent, error) from error


def _environment() -> str:
    features = llvmlite.binding.get_host_cpu_features().flatten()
    host = (sys.version, llvmlite.binding.get_host_cpu_name(), features)
    found = (metadata.version("numba"), llvmlite.__version__, *host, sorted(_OPTIONS.items()))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def user_cache() -> Path:
    """Where this user keeps compiled kernels."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is no home
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "shardkeep"
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else home / ".cache") / "shardkeep"  # as the XDG specification says


def _made_private(folder: Path) -> bool:
    """Whether `folder` exists or was made, is writable, and is ours alone: cached kernels are code. A relative one is
    refused: a user without a home has the cache `~/.cache`."""
    if not folder.is_absolute():
        return False
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
