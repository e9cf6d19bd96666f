"""A disk that is full while a model is exported: one line with the file's name, and the older export stays whole.

A limit on the size of files takes the part of the disk: the system's own error comes from the real writers."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import app
from shardkeep.inference.export import writing
from shardkeep.inference.export.writing import export_run
from tests.support.served_clicks import texts, trained

WRITERS = {"write_rows": "table-0.rows.safetensors", "write_tower": "tower.safetensors", "write_program": "tower.pt2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("full"), model={"name": "dlrm", "bottom": [16], "hidden": [128, 64]})


@contextlib.contextmanager
def small_files(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_in(writer: str, size_bytes: int) -> Callable[..., Any]:
    """The writer of an export's files, on a disk that becomes full meanwhile."""
    real = getattr(writing, writer)

    def write(*arguments: Any) -> Any:
        with small_files(size_bytes):
            return real(*arguments)

    return write


@pytest.mark.parametrize("size_bytes", [0, 17_000], ids=["at once", "later"])
@pytest.mark.parametrize(("writer", "file"), list(WRITERS.items()))
def test_a_disk_that_is_full_leaves_the_older_export_whole(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, file: str, size_bytes: int
) -> None:
    out, columns = tmp_path / "out", texts(40)
    export_run(run, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    expected = shardkeep.load(out).predict(columns)
    with monkeypatch.context() as patch:
        patch.setattr(writing, writer, full_in(writer, size_bytes))
        done = CliRunner().invoke(app, ["export", str(run), str(out), "--with-program"])
    assert done.exit_code == 1 and "Traceback" not in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert file in line and "File too large" in line
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert np.array_equal(shardkeep.load(out, verify=True).predict(columns), expected)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_first_export_that_meets_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="File too large"):
        patch.setattr(writing, writer, full_in(writer, 17_000))
        export_run(run, tmp_path / "out", with_program=True)
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_cannot_be_written_leaves_the_older_export_whole(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_run(run, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="File too large"):
        patch.setattr(writing, "commit", full_in("commit", 100))
        export_run(run, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    shardkeep.load(out, verify=True)
