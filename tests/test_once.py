"""What the workers of a test run share is made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.once import once


def test_several_that_need_a_result_get_what_one_of_them_made(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = []

    def make(folder: Path) -> dict[str, int]:
        folders.append(folder)
        return {"number": len(folders)}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: once(tmp_path_factory, "made-once", make), range(4)))
    assert found == [{"number": 1}] * 4 and len(folders) == 1 and folders[0].is_dir()


def test_a_result_that_could_not_be_made_is_made_by_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("no result")

    with pytest.raises(RuntimeError, match="no result"):
        once(tmp_path_factory, "made-later", fail)
    assert once(tmp_path_factory, "made-later", lambda folder: [folder.name]) == ["made-later1"]
