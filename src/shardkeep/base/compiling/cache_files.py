"""The files in which numba keeps compiled kernels, each with a checksum at its end: a damaged one counts as absent.

The only place that knows numba's classes of its cache. Imports numba.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from numba.core import caching

from shardkeep.base.compiling.errors import unwritable_cache

_END_BYTES = 8


class _Locator(caching.UserProvidedCacheLocator):
    """Does not try to write: code may be loaded from a folder that is read-only."""

    def ensure_cache_path(self) -> None:
        pass


class CheckedFiles(caching.IndexDataCacheFile):
    """One kernel's index and machine code.

    numba loads both by pickle and hands the code to LLVM: a cut one ends the process. It ignores what follows a pickle,
    so that the checksum (xxh3, 64 bits) fits there."""

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        """Leaves out numba's folder for a source's place, below `checked_files`'s: that folder's name says which source
        the code is of, and two copies of a source share it."""
        folder = str(Path(cache_path).parent)
        super().__init__(folder, filename_base, source_stamp="")  # type: ignore[no-untyped-call]

    def save(self, key: Any, data: Any) -> None:
        try:
            Path(self._cache_path).mkdir(parents=True, exist_ok=True)
            super().save(key, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise unwritable_cache(Path(self._cache_path), error) from error

    def _load_index(self) -> Any:
        if not is_whole(Path(self._index_path)):
            return {}
        return super()._load_index()  # type: ignore[no-untyped-call]

    def _load_data(self, name: str) -> Any:
        path = Path(self._data_path(name))  # type: ignore[no-untyped-call]
        if not is_whole(path):
            raise FileNotFoundError(path)  # numba compiles it again
        return super()._load_data(name)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue())
            file.write(_end(content.getvalue()))


def is_whole(path: Path) -> bool:
    """Whether a file is there and ends with the checksum of what comes before."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _END_BYTES and content[-_END_BYTES:] == _end(content[:-_END_BYTES])


@contextlib.contextmanager
def checked_files(folder: Path) -> Iterator[None]:
    """Dispatchers that are made inside keep their code in `folder`, in checked files.

    numba reads these settings when a dispatcher is made, so a user's own numba functions keep theirs. Among them is
    NUMBA_DISABLE_JIT, which is for theirs: kernels are never plain Python."""
    numba_config: Any = caching.config  # type: ignore[attr-defined]
    settings = numba_config.CACHE_DIR, numba_config.DISABLE_JIT
    before = caching.IndexDataCacheFile, caching.CacheImpl._locator_classes
    numba_config.CACHE_DIR, numba_config.DISABLE_JIT = str(folder), 0
    caching.IndexDataCacheFile = CheckedFiles  # type: ignore[misc]
    caching.CacheImpl._locator_classes = [_Locator]
    try:
        yield
    finally:
        numba_config.CACHE_DIR, numba_config.DISABLE_JIT = settings
        caching.IndexDataCacheFile, caching.CacheImpl._locator_classes = before  # type: ignore[misc]


def _end(content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content)
