"""The decorator of kernels and the folder in which compiled ones are kept."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from shardkeep.base import kernels


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


def test_compile_kernels_imports_what_it_is_told() -> None:
    kernels.compile_kernels(["shardkeep.ps.shard.kernels", "shardkeep.ps.shard.optimizer_kernels"])
    with pytest.raises(ModuleNotFoundError):
        kernels.compile_kernels(["shardkeep.ps.shard.no_such_kernels"])
