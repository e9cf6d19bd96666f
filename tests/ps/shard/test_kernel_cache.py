"""The decorator of kernels and the folder in which compiled ones are kept."""

from __future__ import annotations

import errno
import importlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from shardkeep.base import kernels
from shardkeep.base.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def opened(monkeypatch: pytest.MonkeyPatch, user_cache: Path, temporary: Path) -> Path:
    """The folder that a fresh process would use with these two places."""
    monkeypatch.setattr(kernels, "_user_cache", lambda: user_cache)
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(temporary))
    return kernels.cache_folder.__wrapped__()


def test_the_cache_is_a_private_folder_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(monkeypatch, tmp_path / "cache" / "shardkeep", tmp_path)
    assert folder.parent == tmp_path / "cache" / "shardkeep"
    assert folder.name.startswith("kernels-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert opened(monkeypatch, tmp_path / "cache" / "shardkeep", tmp_path) == folder


def test_without_a_usable_home_the_cache_is_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = opened(monkeypatch, tmp_path / "file" / "shardkeep", tmp_path)
    assert folder.parent.parent == tmp_path
    assert folder.is_dir()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(monkeypatch, tmp_path / "cache", tmp_path)
    first.chmod(0o777)
    second = opened(monkeypatch, tmp_path / "cache", tmp_path)
    assert second != first and second.parent.name.startswith("shardkeep-")
    second.parent.chmod(0o777)
    third = opened(monkeypatch, tmp_path / "cache", tmp_path)
    assert third not in (first, second) and stat.S_IMODE(third.stat().st_mode) == 0o700


def test_kernel_sources_of_all_rooms_are_found_through_the_links() -> None:
    package = Path(kernels.__file__).parent.parent
    found = {str(path.relative_to(package)) for path in kernels.kernel_sources()}
    assert {"base/kernels.py", "ps/shard/kernels.py", "ps/shard/optimizer_kernels.py"} <= found


def test_a_changed_kernel_source_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels.py"
    source.write_text("one")
    monkeypatch.setattr(kernels, "kernel_sources", lambda: [source])
    first = opened(monkeypatch, tmp_path / "cache", tmp_path)
    source.write_text("two")
    assert opened(monkeypatch, tmp_path / "cache", tmp_path) != first


def test_a_kernel_is_compiled_for_its_signature_and_leaves_numbas_setting_alone() -> None:
    before = config.CACHE_DIR

    @kernels.kernel("float32(float32[::1])")
    def total(values: np.ndarray) -> float:
        out = np.float32(0.0)
        for value in values:
            out += value
        return out

    assert before == config.CACHE_DIR
    assert total(np.ones(5, np.float32)) == 5.0
    with pytest.raises(TypeError, match="No matching definition"):
        total(np.ones(5, np.float64))


def compiled_elsewhere(folder: Path, *modules: str) -> list[str]:
    """Calls compile_kernels in a fresh process with an own cache: what it said before it compiled, how many it did,
    whether numba came."""
    code = (
        "import sys; from shardkeep.base.kernels import compile_kernels; "
        f"print(compile_kernels({modules!r}, lambda: print('compiling')), 'numba' in sys.modules)"
    )
    env = os.environ | {"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_kernels_are_compiled_once_and_then_not_even_imported(tmp_path: Path) -> None:
    module = "shardkeep.workers.data.sampling_kernels"
    assert compiled_elsewhere(tmp_path, module) == ["compiling", "1", "True"]
    assert compiled_elsewhere(tmp_path, module) == ["0", "False"]
    assert compiled_elsewhere(tmp_path, module, "shardkeep.workers.data.gather_kernels") == ["compiling", "1", "True"]


def test_a_module_of_kernels_that_is_new_or_touched_is_not_taken_for_compiled(tmp_path: Path) -> None:
    module = "shardkeep.ps.shard.kernels"
    source = tmp_path / "ps" / "shard" / "kernels.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    first = kernels.compiled_mark(module, package=tmp_path)
    assert first == kernels.compiled_mark(module, package=tmp_path)
    os.utime(source, (1, 1))  # numba compares the time of the file with that of its cache
    assert kernels.compiled_mark(module, package=tmp_path) != first
    assert kernels.compiled_mark(module) != first  # another checkout


def test_an_unknown_module_of_kernels_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        kernels.compile_kernels(["shardkeep.ps.shard.no_such_kernels"])


TINY = """
from shardkeep.base.kernels import kernel

@kernel("int64(int64)", "float64(float64)")
def twice(number):
    return 2 * number
"""


def compile_tiny() -> tuple[int, int]:
    """As a process that starts: the modules that were compiled, and what a kernel of the one answers."""
    sys.modules.pop("tiny_kernels", None)
    count = kernels.compile_kernels(["tiny_kernels"])
    return count, importlib.import_module("tiny_kernels").twice(21)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty cache folder of a user, who has a module `tiny_kernels`."""
    (tmp_path / "tiny_kernels.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernels.cache_folder.cache_clear()
    yield tmp_path / "cache"
    kernels.cache_folder.cache_clear()
    sys.modules.pop("tiny_kernels", None)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, emptied, flipped, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc", "*.compiled"])
def test_a_damaged_file_of_compiled_kernels_is_compiled_again(
    cache: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    assert compile_tiny() == (1, 42)
    assert compile_tiny() == (0, 42)
    files = list(cache.rglob(kind))
    assert files
    for path in files:
        damage(path)
    assert [compile_tiny()[1] for _ in range(2)] == [42, 42]  # code may have another size, which the second one notes
    assert compile_tiny() == (0, 42)
    assert len(list(cache.rglob("*.nb?"))) == 3


def test_files_that_are_damaged_after_the_import_are_not_noted_as_compiled(cache: Path) -> None:
    compile_tiny()
    for path in cache.rglob("*.nbc"):
        emptied(path)
    assert [kernels.compile_kernels(["tiny_kernels"]) for _ in range(2)] == [1, 1]
    assert compile_tiny() == (1, 42)
    assert compile_tiny() == (0, 42)


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)  # of a disk that has no room for a file's content
    with pytest.raises(UserError, match=r"cache/shardkeep/kernels-[^\n]*: compiled kernels cannot be kept \(No space "):
        compile_tiny()


def test_where_no_folder_can_be_written_it_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("not a folder")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    with pytest.raises(UserError, match=r"compiled kernels cannot be kept \(Not a directory\)"):
        kernels.cache_folder()
