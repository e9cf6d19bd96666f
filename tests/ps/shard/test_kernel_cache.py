"""The decorator of kernels and the folder in which compiled ones are kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from shardkeep.base import kernels

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
