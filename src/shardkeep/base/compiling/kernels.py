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
from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.owners import why_distrusted
from shardkeep.base.machine.topology import usable_cores

try:
    import fcntl
except ImportError:  # a platform without POSIX locks: compiling twice is slow, not wrong
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "build", "cache_folder", "compile_for_image", "compile_kernels", "image_folder", "kernel", "kernel_modules",
    "load_kernels",
]  # fmt: skip

_MARK = "compiled.json"
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_UNUSED_S = 30 * 86400.0
"""Seconds after which the code of a source that nobody has started with is deleted."""

_said = False
"""Whether this process has said that it compiles."""
F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: Any) -> Callable[[F], F]:
    """Compiles a function for the given numba signatures, strings or calls of types, or loads it from the cache folder.

    nogil, no fastmath (results are compared bit for bit), no parallel (concurrent calls of parallel
    kernels kill the process under the workqueue layer); division by zero gives inf or nan.
    """
    import numba  # here: a launcher that finds everything compiled needs none of its half second

    from shardkeep.base.compiling.cache_files import checked_files

    def decorate(function: F) -> F:
        _say_if_missing(function.__module__)
        with checked_files(_folder_of(function.__module__)):
            compiled = numba.njit(list(signatures), cache=True, **_OPTIONS)(function)
        return cast(F, compiled)

    return decorate


def _say_compiling(_count: int = 0) -> None:
    """Says on stderr that kernels are compiled, once a process."""
    global _said
    if not _said and sys.stderr is not None:
        with contextlib.suppress(OSError):
            print("kernels   compiling, once for this installation; it may take a minute", file=sys.stderr, flush=True)
    _said = True


@functools.cache
def _say_if_missing(module: str) -> None:
    if not _is_marked(module):
        _say_compiling()


def compile_kernels(modules: Sequence[str], begin: Callable[[int], None] = _say_compiling) -> int:
    """Compiles those modules of kernels that this machine has not compiled yet, and those that they import; returns
    their number.

    Uses a process for each core. Under a file lock, so that no two callers compile. Call it before the modules are
    imported. `begin` is called first with their number, unless it is 0. Raises UserError when the result cannot be
    kept.
    """
    global _said
    modules = with_imports(modules)
    if not (count := len(_missing(modules))):
        return 0
    begin(count)
    _said = True
    with _locked(cache_folder() / "lock"):
        missing = _missing(modules)
        if (builders := min(len(usable_cores()), len(missing) - 1)) > 1:
            build_all(missing, builders)
        for module in _missing(missing):  # those that no builder has built
            build(module)
        for module in missing:
            _drop_unused(module)
    return len(missing)


def compile_for_image(folder: Path, modules: Sequence[str]) -> Path:
    """Compiles modules of kernels for processes whose XDG_CACHE_HOME is `folder`, where they need not write. Call it
    before any is imported. Returns their place. Raises UserError."""
    os.environ["XDG_CACHE_HOME"] = str(folder.absolute())  # the builders inherit it
    cache_folder.cache_clear()
    image_folder.cache_clear()
    place = cache_folder()
    if not place.is_relative_to(folder.absolute()):
        raise UserError(f"--to {folder}: cannot be used; allowed: a folder that you can write, and nobody else")
    compile_kernels(modules)
    for path in (place.parent, place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


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
    mark = _mark_of(module)
    with contextlib.suppress(OSError):
        os.utime(mark)  # in use: see _drop_unused
    return _is_whole(mark.parent)


def _is_whole(folder: Path) -> bool:
    """Whether all files of a module's kernels are there, with the sizes that were noted. Loading one also checks its
    checksum."""
    try:
        sizes = json.loads((folder / _MARK).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


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
    and the same sources in another place get the same. What is whole in a folder that is read-only stays there."""
    name = f"{module}-{fingerprint(module)}"
    image = image_folder()
    return image / name if image is not None and _is_trusted(image / name) else cache_folder() / name


@functools.cache
def _is_trusted(folder: Path) -> bool:
    """Whether a module's code is whole, and only we or root could have put it there."""
    return _is_whole(folder) and all(
        why_distrusted(path, above=path == folder) is None for path in (folder, *folder.iterdir())
    )


@functools.cache
def image_folder() -> Path | None:
    """The folder of compiled kernels in the user's cache where it is there and not ours to write, as in an image."""
    folder = user_cache() / f"kernels-{_environment()}"
    return folder if folder.is_absolute() and folder.is_dir() and not _made_private(folder) else None


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


@functools.cache
def _environment() -> str:
    features = llvmlite.binding.get_host_cpu_features().flatten()
    host = (sys.version, llvmlite.binding.get_host_cpu_name(), features)
    found = (metadata.version("numba"), llvmlite.__version__, *host, sorted(_OPTIONS.items()))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def user_cache() -> Path:
    """Where this user keeps compiled kernels."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # another is to be ignored, as the XDG specification says
        return given / "shardkeep"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is no home
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "shardkeep"


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
