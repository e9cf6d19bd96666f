"""Excerpts of files: rows from all over them, in bounded memory, and how many rows there are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from pyarrow import feather, orc

from shardkeep.base.errors import DataError
from shardkeep.workers.data.sources import excerpt as module, text_files
from shardkeep.workers.data.sources.excerpt import excerpt_of
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

KINDS = ["a.csv", "a.csv.gz", "a.parquet", "a.jsonl", "a.orc", "a.feather"]
LARGE, MOST_ROWS = 40_000, 2_000


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", MOST_ROWS)
    monkeypatch.setattr(module, "PART_BYTES", 1 << 13)
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 18)


def rows(count: int, start: int = 0) -> pa.Table:
    number = np.arange(start, start + count)
    return pa.table({"number": number, "text": [f"value {n % 1000} of the column" for n in number]})


def write(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=12_000)
        return path
    if path.suffix in (".orc", ".feather"):
        {".orc": orc.write_table, ".feather": feather.write_feather}[path.suffix](table, str(path))
        return path
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        return path
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        pacsv.write_csv(table, file)
    return path


def excerpt(*paths: Path) -> tuple[pa.Table, int, bool]:
    found = excerpt_of(DataConfig(train=list(map(str, paths))), paths)
    return found.table, found.num_rows, found.whole


@every("name", KINDS)
def test_a_small_file_is_read_as_a_whole(name: str, tmp_path: Path) -> None:
    table, num_rows, whole = excerpt(write(tmp_path / name, rows(1234)))
    assert (len(table), num_rows, whole) == (1234, 1234, True)
    assert [int(n) for n in table["number"].to_pylist()] == list(range(1234))


@pytest.mark.usefixtures("_small_parts")
@every("name", KINDS)
def test_rows_come_from_all_over_a_large_file_in_its_order(name: str, tmp_path: Path) -> None:
    table, num_rows, whole = excerpt(write(tmp_path / name, rows(LARGE)))
    number_N = np.array(table["number"].to_pylist()).astype(int)
    assert not whole and 1_000 < len(table) <= 1.2 * MOST_ROWS
    assert (np.diff(number_N) > 0).all()
    assert np.histogram(number_N, 8, (0, LARGE))[0].min() > len(table) / 30
    assert num_rows == pytest.approx(LARGE, rel=0.02)


@pytest.mark.usefixtures("_small_parts")
def test_of_large_row_groups_only_their_first_pages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_read() -> int:
        """Those that this process has read of files and caches so far."""
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])

    monkeypatch.setattr(module, "READ_BYTES", 1 << 20)
    path, draw = tmp_path / "a.parquet", np.random.default_rng(0)
    table = pa.table({f"x{k}": draw.random(200_000) for k in range(10)})
    pq.write_table(table, path, row_group_size=200_000, use_dictionary=False, data_page_size=1 << 16)
    before = bytes_read()
    assert len(excerpt(path)[0]) > 1_000
    assert bytes_read() - before < path.stat().st_size / 4


@every("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_files_that_lack_columns_are_told_apart(name: str, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}{name}", rows(9).drop(["text"] * (i == 1))) for i in range(3)]
    for chosen, differ in ((paths, True), (paths[::2], False)):
        found = excerpt_of(DataConfig(train=list(map(str, chosen))), chosen)
        assert found.differ == differ and set(found.table.column_names) == {"number", "text"}


def test_rows_of_several_files_and_of_their_folders(tmp_path: Path) -> None:
    paths = []
    for day in (1, 2, 3):
        (tmp_path / f"dt={day}").mkdir()
        paths.append(write(tmp_path / f"dt={day}" / "a.parquet", rows(100, day * 100)))
    table, num_rows, whole = excerpt(*paths)
    assert (num_rows, whole, table["dt"].to_pylist()) == (300, True, ["1"] * 100 + ["2"] * 100 + ["3"] * 100)


@pytest.mark.usefixtures("_small_parts")
def test_a_row_that_is_cut_or_wrong_inside_a_large_csv_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", rows(LARGE))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 1000)
        file.write(b'","\n,,,,\n"')
    table, _, _ = excerpt(path)
    assert {len(each) > 10 for each in table["text"].to_pylist()} == {True}


@every(
    ("name", "text", "told"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"a,b\n", "has no rows"),
        ("a.csv", b"a,a\n1,2\n", "2 columns are called a"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "has 3 fields, expected 2"),
        ("a.parquet", b"PAR1 and nothing else", "cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, text: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=told):
        excerpt(tmp_path / name)
