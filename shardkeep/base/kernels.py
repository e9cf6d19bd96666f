"""Kernels: numba functions that release the GIL, compiled ahead for stated types and cached on disk.

The decorator, the cache folder and the one call that compiles them all. Knows no kernel itself.
A module of kernels is named `kernels.py` or `*_kernels.py` and holds nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding  # type: ignore[import-untyped]

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

    numba_config: Any = numba.core.config  # its settings are made at run time, unknown to type checkers

    def decorate(function: F) -> F:
        # The locator of the cache reads the setting when the dispatcher is made, so a user's own
        # numba functions in this process keep their own cache folder.
        before = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = str(cache_folder())
        try:
            compiled = numba.njit(list(signatures), nogil=True, cache=True, error_model="numpy")(function)
        finally:
            numba_config.CACHE_DIR = before
        return cast(F, compiled)

    return decorate


def compile_kernels(modules: Sequence[str], begin: Callable[[], None] = lambda: None) -> int:
    """Imports those modules of kernels that this machine has not compiled yet; returns their number.

    Under a file lock, so that only one process compiles (up to a minute). Call it before the modules are imported.
    `begin` is called first, if there is anything to compile.
    """
    if not _missing(modules):
        return 0
    begin()
    with _locked(cache_folder() / "lock"):
        missing = _missing(modules)
        for module in missing:
            importlib.import_module(module)
            compiled_mark(module).touch()
    return len(missing)


def _missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not compiled_mark(module).exists()]


def compiled_mark(module: str, package: Path = PACKAGE) -> Path:
    """The file that says that all kernels of a module are in the cache folder.

    Named as numba keys its cache: by the source's place and time, besides the contents that name the folder.
    """
    source = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    stamp = source.stat().st_mtime_ns if source.exists() else 0
    key = hashlib.sha256(f"{source} {stamp}".encode()).hexdigest()[:16]
    return cache_folder() / f"{module}-{key}.compiled"


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled kernels, made if missing: the user's cache folder, else a private temporary one.

    Its name changes with every kernel source, the version of numba and the CPU: numba's own check
    does not notice a change in a function that a kernel of another module calls.
    """
    name = f"kernels-{_fingerprint()}"
    for parent in (_user_cache(), Path(tempfile.gettempdir()) / f"shardkeep-{_user_id()}"):
        folder = parent / name
        if _made_private(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="shardkeep-kernels-"))


def kernel_sources() -> list[Path]:
    """Every file of kernels in the package, in a fixed order."""
    rooms = [entry for entry in PACKAGE.iterdir() if entry.is_dir()]  # links too: rglob does not follow them
    found = [path for room in rooms for pattern in ("kernels.py", "*_kernels.py") for path in room.rglob(pattern)]
    return sorted(set(found), key=lambda path: str(path.relative_to(PACKAGE)))


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
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def kernel_modules() -> list[str]:
    """The import names of all modules of kernels, for `compile_kernels`."""
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in kernel_sources()]
    return [f"shardkeep.{name}" for name in names if name != "base.kernels"]
