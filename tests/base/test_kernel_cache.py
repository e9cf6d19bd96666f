"""The decorator of kernels and the folder in which compiled ones are kept."""

from __future__ import annotations

import ast
import errno
import importlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from shardkeep.base.compiling import kernels, sources as kernel_sources
from shardkeep.base.errors import UserError
from tests.support.cases import every
from tests.support.import_path import ROOT


def opened(monkeypatch: pytest.MonkeyPatch, user_cache: Path, temporary: Path) -> Path:
    """The folder that a fresh process would use with these two places."""
    monkeypatch.setattr(kernels, "user_cache", lambda: user_cache)
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(temporary))
    return kernels.cache_folder.__wrapped__()


def test_the_cache_is_a_private_folder_of_the_user_or_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(monkeypatch, tmp_path / "cache" / "shardkeep", tmp_path)
    assert folder.parent == tmp_path / "cache" / "shardkeep" and folder.name.startswith("kernels-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert opened(monkeypatch, tmp_path / "cache" / "shardkeep", tmp_path) == folder
    (tmp_path / "file").write_text("not a folder")
    folder = opened(monkeypatch, tmp_path / "file" / "shardkeep", tmp_path)
    assert folder.parent.parent == tmp_path and folder.is_dir()
    monkeypatch.chdir(tmp_path)
    folder = opened(monkeypatch, Path("~/.cache/shardkeep"), tmp_path / "temporary")  # of a user without a home
    assert folder.is_relative_to(tmp_path / "temporary") and not Path("~").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no XDG folders")
@every("given", ["", "relative"])
def test_an_xdg_cache_folder_that_is_not_absolute_is_ignored(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert kernels.user_cache() == Path("~/.cache/shardkeep").expanduser()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(monkeypatch, tmp_path / "cache", tmp_path)
    first.chmod(0o777)
    second = opened(monkeypatch, tmp_path / "cache", tmp_path)
    assert second != first and second.parent.name.startswith("shardkeep-")
    second.parent.chmod(0o777)
    third = opened(monkeypatch, tmp_path / "cache", tmp_path)
    assert third not in (first, second) and stat.S_IMODE(third.stat().st_mode) == 0o700


@every("disabled", [0, 1], ids=["", "NUMBA_DISABLE_JIT=1"])
def test_a_kernel_is_compiled_for_its_signature_and_leaves_numbas_settings_alone(
    disabled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "DISABLE_JIT", disabled)
    before = config.CACHE_DIR

    @kernels.kernel("float32(float32[::1])")
    def total(values: np.ndarray) -> float:
        out = np.float32(0.0)
        for value in values:
            out += value
        return out

    assert (before, disabled) == (config.CACHE_DIR, config.DISABLE_JIT)
    assert total(np.ones(5, np.float32)) == 5.0
    with pytest.raises(TypeError, match="No matching definition"):
        total(np.ones(5, np.float64))


CALLEE = """
from shardkeep.base.compiling.kernels import kernel

@kernel("int64(int64)")
def once(number):
    return number
"""
CALLER = """
from shardkeep.base.compiling.kernels import kernel
from callee_kernels import once

@kernel("int64(int64)")
def twice(number):
    return once(number) + once(number)
"""
TINY = """
from shardkeep.base.compiling.kernels import kernel

@kernel("int64(int64)", "float64(float64)")
def twice(number):
    return 2 * number
"""


OWN = ("tiny_kernels", "caller_kernels", "callee_kernels")


def forget_own() -> None:
    """From here on as a process that starts."""
    for module in OWN:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()
    kernel_sources.imports_of.cache_clear()
    kernel_sources.fingerprint.cache_clear()
    kernels.cache_folder.cache_clear()
    kernels.image_folder.cache_clear()


def compile_own(module: str = "tiny_kernels") -> tuple[int, int]:
    """The modules that a process compiles when it starts, and what a kernel of the one answers."""
    forget_own()
    count = kernels.compile_kernels([module])
    return count, importlib.import_module(module).twice(21)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty cache folder of a user, who has modules of kernels: `tiny_kernels`, and one that calls another's."""
    for module, source in zip(OWN, (TINY, CALLER, CALLEE), strict=True):
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a cache goes that cannot be there
    forget_own()
    yield tmp_path / "cache"
    forget_own()


IMPORTED = "import caller_kernels; assert caller_kernels.twice(21) == 42"
COMPILED = """
import sys
from shardkeep.base.compiling.kernels import compile_kernels
print(compile_kernels(["caller_kernels"], lambda count: print("compiling", count)), "numba" in sys.modules)
"""


def test_kernels_are_compiled_once_which_a_process_says_once_and_then_not_even_imported(cache: Path) -> None:
    first, second = elsewhere(IMPORTED, COMPILED), elsewhere(COMPILED, IMPORTED)
    assert first.stderr.splitlines() == ["kernels   compiling, once for this installation; it may take a minute"]
    assert first.stdout.split() == ["compiling", "2", "2", "True"]  # with the one that it imports
    assert (second.stdout.split(), second.stderr) == (["0", "False"], "")


def elsewhere(*parts: str) -> subprocess.CompletedProcess[str]:
    """What a fresh process says."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "\n".join(parts)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.fixture
def image(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a container's image: it has `tiny_kernels`, and nobody can write there, not even root."""
    kernels.compile_for_image(cache, ["tiny_kernels"])
    real, temporary = tempfile.TemporaryFile, cache.parent / "temporary"
    temporary.mkdir()

    def only_elsewhere(dir: Path) -> object:
        if Path(dir).is_relative_to(cache):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", only_elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return cache


def test_kernels_of_an_image_that_is_read_only_are_used_and_others_are_compiled_elsewhere(image: Path) -> None:
    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in image.rglob("*.*") if p.is_file() and p.name != "compiled.json"}

    before = files()
    everything = [image / "shardkeep", *(image / "shardkeep").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in everything if path.is_dir()} == {0o755}
    assert {stat.S_IMODE(path.stat().st_mode) for path in everything if path.is_file()} == {0o644}
    assert compile_own() == (0, 42)
    assert sum(importlib.import_module("tiny_kernels").twice.stats.cache_hits.values()) == 2
    assert not list((image.parent / "temporary").iterdir())
    assert compile_own("caller_kernels") == (2, 42) and compile_own("caller_kernels") == (0, 42)
    assert files() == before
    assert len(list((image.parent / "temporary").rglob("*.nbc"))) == 2


@pytest.mark.parametrize("what", ["shardkeep", "*/*/tiny_kernels-*", "*/*/*/*.nbc"])
def test_kernels_of_an_image_that_others_could_have_changed_are_not_used(image: Path, what: str) -> None:
    for path in image.glob(what):
        path.chmod(path.stat().st_mode | 0o002)
    assert compile_own() == (1, 42)
    assert len(list((image.parent / "temporary").rglob("*.nbc"))) == 2


def test_kernels_of_an_image_are_not_put_where_others_can_write(cache: Path) -> None:
    (cache / "shardkeep").mkdir(parents=True)
    (cache / "shardkeep").chmod(0o777)
    with pytest.raises(UserError, match=r"^--to .*/cache: cannot be used; allowed: a folder that you can write, and"):
        kernels.compile_for_image(cache, ["tiny_kernels"])


def edit(path: Path, old: str, new: str) -> None:
    """Another source of the same size, in a file of the same time."""
    status, source = path.stat(), path.read_text()
    assert old in source and len(old) == len(new)
    path.write_text(source.replace(old, new))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # Python looks at size and time only


def test_an_edit_of_a_kernel_compiles_those_that_call_it_and_no_other(cache: Path) -> None:
    assert compile_own("caller_kernels") == (2, 42) and compile_own() == (1, 42)
    edit(cache.parent / "callee_kernels.py", "return number", "return 1234+1")
    assert compile_own("caller_kernels") == (2, 2470) and compile_own() == (0, 42)
    edit(cache.parent / "callee_kernels.py", "return 1234+1", "return number")
    assert compile_own("caller_kernels") == (0, 42)  # the code of the first source is still there
    edit(cache.parent / "caller_kernels.py", "once(number) + once(number)", "once(number) * once(number)")
    assert compile_own("caller_kernels") == (1, 441)


@pytest.mark.slow
def test_several_modules_are_compiled_by_other_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable_cores", lambda: (0, 1))
    forget_own()
    assert kernels.compile_kernels(["caller_kernels", "tiny_kernels"]) == 3
    assert not set(OWN) & set(sys.modules)
    assert importlib.import_module("caller_kernels").twice(21) == 42
    assert sum(importlib.import_module(module).twice.stats.cache_hits.total() for module in OWN[:2]) == 3
    assert len(list(cache.rglob("*.nbc"))) == 4  # each signature once


def test_kernels_that_another_process_has_not_compiled_yet_are_never_stale(cache: Path) -> None:
    compile_own("caller_kernels")
    edit(cache.parent / "callee_kernels.py", "return number", "return 1234+1")
    forget_own()
    assert importlib.import_module("caller_kernels").twice(21) == 2470  # without compile_kernels, as in a test


def test_two_copies_of_a_source_share_their_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_own("caller_kernels")
    (cache.parent / "copy").mkdir()
    for module in OWN:
        (cache.parent / f"{module}.py").rename(cache.parent / "copy" / f"{module}.py")
    monkeypatch.syspath_prepend(cache.parent / "copy")
    assert compile_own("caller_kernels") == (0, 42)
    assert {found.stem for found in Path(importlib.import_module("caller_kernels").__file__ or "").parents} >= {"copy"}


def test_code_of_a_source_that_nobody_has_used_for_a_month_is_deleted(cache: Path) -> None:
    compile_own()
    (old,) = (path.parent for path in cache.rglob("tiny_kernels-*/compiled.json"))
    edit(cache.parent / "tiny_kernels.py", "2 * number", "3 * number")
    assert compile_own() == (1, 63) and old.exists()
    month_ago = time.time() - 31 * 86400
    os.utime(old / "compiled.json", (month_ago, month_ago))
    edit(cache.parent / "tiny_kernels.py", "3 * number", "4 * number")
    assert compile_own() == (1, 84)
    assert not old.exists() and len(list(cache.rglob("tiny_kernels-*"))) == 2


@every("module", kernel_sources.kernel_modules())
def test_kernels_import_kernels_only_and_at_the_top(module: str) -> None:
    """A fingerprint covers no other module: a number from one would become a part of machine code and stay. The types
    of arrays are none."""
    file = kernel_sources.PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    source = ast.parse(file.read_text())
    places = [node for node in ast.walk(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = {
        f"{node.module}.{alias.name}"
        for node in places
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("shardkeep")
        for alias in node.names
    }
    kernel = "shardkeep.base.compiling.kernels.kernel"
    allowed = {kernel, "shardkeep.base.arrays", *kernel_sources.imports_of(module)}
    assert all(name in allowed or name.rpartition(".")[0] in allowed for name in ours)
    assert all(node in source.body for node in places)


def test_kernel_sources_of_all_rooms_are_found_through_the_links() -> None:
    found = {path.name for path in kernel_sources.kernel_sources()}
    assert found > {"kernels.py", "row_kernels.py", "shared_kernels.py"}


def test_the_types_of_arrays_are_types_alone() -> None:
    body = ast.parse((kernel_sources.PACKAGE / "base/arrays.py").read_text()).body
    assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body[1:])
    assert all(ast.unparse(n.value).startswith("npt.NDArray[") for n in body if isinstance(n, ast.Assign))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@every(("kind", "damage"), [
    ("*.nbi", flipped), ("*.nbi", Path.unlink), ("*.nbc", emptied), ("*.nbc", flipped), ("compiled.json", emptied),
])  # fmt: skip
def test_a_damaged_file_of_compiled_kernels_is_compiled_again(
    cache: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    compile_own()
    assert compile_own() == (0, 42)
    files = list(cache.rglob(kind))
    assert files
    for path in files:
        damage(path)
    assert [compile_own()[1] for _ in range(2)] == [42, 42]  # code may have another size, which the second one notes
    assert compile_own() == (0, 42)
    assert len(list(cache.rglob("*.nb?"))) == 3


def test_files_that_are_damaged_after_the_import_are_not_noted_as_compiled(cache: Path) -> None:
    compile_own()
    for path in cache.rglob("*.nbc"):
        emptied(path)
    assert [kernels.compile_kernels(["tiny_kernels"]) for _ in range(2)] == [1, 1]
    assert compile_own() == (1, 42)
    assert compile_own() == (0, 42)


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)  # of a disk that has no room for a file's content
        with pytest.raises(UserError, match=r"cache/shardkeep/kernels-[^\n]*: compiled kernels cannot be kept \(No sp"):
            compile_own()
    forget_own()
    shutil.rmtree(cache)
    cache.write_text("not a folder")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    with pytest.raises(UserError, match=r"compiled kernels cannot be kept \(Not a directory\)"):
        kernels.cache_folder()
