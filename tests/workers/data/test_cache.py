"""The columnar cache: found again, rebuilt when it must be, right at any size."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.base.files import file_lock
from shardkeep.workers.data.cache.folders import own_folders
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every


def _write(folder: Path, num_rows: int = 40, first: int = 0) -> None:
    lines = "".join(f"{i},{i % 7},{i % 2}\n" for i in range(first, first + num_rows))
    (folder / "a.csv").write_text("x,c,y\n" + lines)


def _config(folder: Path, **settings: Any) -> DataConfig:
    base: dict[str, Any] = {
        "source": "csv",
        "root": str(folder),
        "train": ["a.csv"],
        "label": "y",
        "dense": ["x"],
        "sparse": ["c"],
        "scale": "none",
    }
    return DataConfig.model_validate(base | settings)


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / ".shardkeep-cache").iterdir() if p.is_dir())


def _first(data: Data) -> float:
    return float(data.train.gather(np.array([0])).dense_BI[0, 0])


def test_a_second_reader_finds_the_cache_of_the_first(tmp_path: Path) -> None:
    _write(tmp_path)
    told: list[str] = []
    line = open_data(_config(tmp_path), seed=0, progress=lambda text, share: told.append(text)).describe()
    assert "40 samples, none for evaluation; 1 dense column, 1 feature" in line
    assert told
    told.clear()
    open_data(_config(tmp_path), seed=0, progress=lambda text, share: told.append(text))
    assert not told and len(_entries(tmp_path)) == 1


def test_changed_files_replace_their_entry_and_open_readers_keep_the_old_one(tmp_path: Path) -> None:
    _write(tmp_path)
    old = open_data(_config(tmp_path), seed=0)
    _write(tmp_path, first=1000)
    new = open_data(_config(tmp_path), seed=0)
    assert (_first(old), _first(new)) == (0.0, 1000.0)
    assert len(_entries(tmp_path)) == 1


@every(
    "settings",
    [{"scale": "log"}, {"missing": ["7"]}, {"dense": [{"column": "x", "fill": 3.0}]}, {"eval_fraction": 0.5}],
    ids=["scale", "missing", "fill", "split"],
)
def test_other_settings_have_an_entry_of_their_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path), seed=0)
    open_data(_config(tmp_path, **settings), seed=0)
    assert len(_entries(tmp_path)) == 2


def test_pooling_tables_and_without_a_split_the_seed_share_an_entry(tmp_path: Path) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path), seed=0)
    data = open_data(_config(tmp_path, sparse=[{"column": "c", "table": "t", "pooling": "mean"}]), seed=9)
    assert data.train.schema.features[0].table == "t"
    assert len(_entries(tmp_path)) == 1


@every("damage", ["truncate", "foreign", "no meta", "bad meta", "another file", "missing"])
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path), seed=0)
    (entry,) = _entries(tmp_path)
    arrow, meta = entry / "train.arrow", entry / "meta.json"
    content = arrow.read_bytes()
    if damage == "truncate":
        arrow.write_bytes(content[:-100])
    elif damage == "foreign":
        arrow.write_bytes(bytes(len(content)))
    elif damage == "no meta":
        meta.unlink()
    elif damage == "bad meta":
        meta.write_text("{")
    elif damage == "another file":
        _write(tmp_path, num_rows=39)
        config = _config(tmp_path, cache="other")
        open_data(config, seed=0)
        (other,) = (tmp_path / "other").glob("a-*")
        _write(tmp_path)
        os.utime(tmp_path / "a.csv", ns=(0, json.loads(meta.read_text())["inputs"][0][2]))
        arrow.write_bytes((other / "train.arrow").read_bytes())
    else:
        arrow.unlink()
    data = open_data(_config(tmp_path), seed=0)
    assert data.train.gather(np.arange(40)).dense_BI[:, 0].tolist() == list(range(40))
    assert arrow.stat().st_size == len(content)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,c,y\n1,a,0\nz,b,1\n")
    with pytest.raises(DataError, match="row 2"):
        open_data(_config(tmp_path), seed=0)
    assert [p for p in (tmp_path / ".shardkeep-cache").iterdir() if p.is_dir()] == []


def test_a_read_only_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, home = tmp_path / "data", tmp_path / "home"
    data.mkdir()
    _write(data)
    data.chmod(0o555)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    try:
        open_data(_config(data), seed=0)
        assert [p.name for p in data.iterdir()] == ["a.csv"]
        assert list((home / "shardkeep" / "data").glob("a-*/train.arrow"))
    finally:
        data.chmod(0o755)


def test_a_user_without_a_home_has_a_temporary_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "~")
    assert [folder.parent for folder in own_folders()] == [Path(tempfile.gettempdir())]


def test_an_entry_beside_the_data_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path), seed=0)
    (tmp_path / ".shardkeep-cache").chmod(0o555)
    told: list[str] = []
    try:
        data = open_data(_config(tmp_path), seed=0, progress=lambda text, share: told.append(text))
    finally:
        (tmp_path / ".shardkeep-cache").chmod(0o755)
    assert len(data.train) == 40 and not told


def test_other_users_may_read_an_entry_where_they_may_read_the_folder(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "kept").mkdir(mode=0o755)
    open_data(_config(tmp_path, cache="kept"), seed=0)
    (entry,) = (tmp_path / "kept").glob("a-*")
    assert entry.stat().st_mode & 0o055 == 0o055


def test_the_cache_folder_can_be_named(tmp_path: Path) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path, cache="kept"), seed=0)
    assert list((tmp_path / "kept").glob("a-*/train.arrow"))
    assert not (tmp_path / ".shardkeep-cache").exists()


def test_many_readers_at_once_convert_once_and_agree(tmp_path: Path) -> None:
    _write(tmp_path, num_rows=5000)
    told: list[str] = []

    def read(_: int) -> bytes:
        data = open_data(_config(tmp_path), seed=0, progress=lambda text, share: told.append(text))
        return data.train.gather(np.arange(5000)[::-1]).dense_BI.tobytes()

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(read, range(12)))) == 1
    assert sum(text.startswith("reading") for text in told) == 2  # one block and the end, of one conversion


def test_rows_are_found_across_chunks_and_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = []
    for name, count in (("a.parquet", 70_000), ("b.parquet", 1), ("c.parquet", 65_535 + 9000)):
        lengths = rng.integers(0, 4, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, rng.integers(-(2**62), 2**62, int(lengths.sum())))
        columns = {
            "x": rng.normal(size=count),
            "z": rng.normal(size=count),
            "c": rng.integers(0, 2**62, count),
            "d": rng.integers(0, 9, count),
            "m": lists,
            "y": rng.integers(0, 2, count),
        }
        parts.append(pa.table(columns))
        pq.write_table(parts[-1], tmp_path / name)
    config = _config(tmp_path, source="parquet", train=["*.parquet"], dense=["x", "z"], sparse=["m", "c", "d"])
    train = open_data(config, seed=0).train
    whole = pa.concat_tables(parts).combine_chunks()
    rows = rng.permutation(len(whole))[:20_000]
    rows[:4] = [0, 65_535, 65_536, len(whole) - 1]
    batch, expected = train.gather(rows), whole.take(rows)
    assert len(train) == len(whole)
    assert np.array_equal(batch.dense_BI[:, 1], expected["z"].to_numpy().astype(np.float32))
    assert np.array_equal(batch.label_BT[:, 0], expected["y"].to_numpy())
    for name in ("c", "d"):
        assert np.array_equal(batch.ids[name].values_N, expected[name].to_numpy())
    assert list(batch.ids) == ["m", "c", "d"]
    assert np.array_equal(batch.ids["m"].values_N, expected["m"].combine_chunks().flatten().to_numpy())
    assert batch.ids["m"].lengths_B is not None
    assert int(batch.ids["m"].lengths_B.sum()) == len(batch.ids["m"].values_N)


@every("row", [-1, 40, 2**40])
def test_a_row_outside_the_data_is_refused(tmp_path: Path, row: int) -> None:
    _write(tmp_path)
    train = open_data(_config(tmp_path), seed=0).train
    with pytest.raises(IndexError, match="outside"):
        train.gather(np.array([0, row]))


def test_no_rows_give_an_empty_batch(tmp_path: Path) -> None:
    _write(tmp_path)
    batch = open_data(_config(tmp_path), seed=0).train.gather(np.empty(0, np.int64))
    assert batch.dense_BI.shape == (0, 1) and batch.label_BT.shape == (0, 1) and len(batch.ids["c"]) == 0


def test_a_conversion_needs_memory_for_a_few_chunks_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "a.csv").open("w") as file:
        file.write("x,c,y\n")
        block = "".join(f"{x},{x % 99991},{x % 2}\n" for x in rng.integers(0, 10**9, 50_000))
        for _ in range(12):
            file.write(block)
    before = pa.total_allocated_bytes()
    peak = 0

    def watch(_text: str, _share: float) -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - before)

    data = open_data(_config(tmp_path), seed=0, progress=watch)
    assert len(data.train) == 600_000
    assert peak < 120e6


def test_progress_is_the_share_of_the_bytes_of_all_files(tmp_path: Path) -> None:
    _write(tmp_path)
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    shares: list[tuple[str, float]] = []
    open_data(_config(tmp_path, train=["a.csv", "b.csv"]), seed=0, progress=lambda *told: shares.append(told))
    assert shares == sorted(shares) and shares[-1] == ("reading b.csv", 1.0)
    assert max(share for text, share in shares if text == "reading a.csv") == 0.5


def test_jobs_with_other_evaluation_files_share_the_training_entry(tmp_path: Path) -> None:
    _write(tmp_path)
    for name in ("b.csv", "c.csv"):
        (tmp_path / name).write_text("x,c,y\n5,1,0\n6,2,1\n")
    config = {"eval": "b.csv", "scale": "standard"}
    first = open_data(_config(tmp_path, **config), seed=0)
    assert len(_entries(tmp_path)) == 2
    told: list[str] = []
    second = open_data(_config(tmp_path, **config | {"eval": "c.csv"}), seed=0, progress=lambda t, _: told.append(t))
    assert set(told) == {"reading c.csv"}
    assert [e.name[0] for e in _entries(tmp_path)] == ["a", "b", "c"]
    told.clear()
    open_data(_config(tmp_path, scale="standard"), seed=0, progress=lambda t, _: told.append(t))
    assert not told
    assert first.eval is not None and second.eval is not None
    rows = np.arange(2)
    assert np.array_equal(first.eval.gather(rows).dense_BI, second.eval.gather(rows).dense_BI)


def test_jobs_with_other_training_files_share_the_evaluation_entry_where_values_are_stored_as_they_are(
    tmp_path: Path,
) -> None:
    _write(tmp_path)
    (tmp_path / "b.csv").write_text("x,c,y\n5,1,0\n6,2,1\n")
    (tmp_path / "d.csv").write_text("x,c,y\n1,1,0\n,2,1\n2,2,1\n")
    told: list[str] = []
    for train in ("a.csv", "d.csv"):
        data = open_data(
            _config(tmp_path, train=train, eval="b.csv", scale="log"), seed=0, progress=lambda t, _: told.append(t)
        )
        assert data.eval is not None
        assert data.eval.gather(np.array([0])).dense_BI[0, 0] == np.float32(np.log1p(5.0))
    assert set(told) == {"reading a.csv", "reading b.csv", "reading d.csv"}
    assert told.index("reading d.csv") > max(i for i, t in enumerate(told) if t == "reading b.csv")


def _replace(path: Path, text: str) -> None:
    """Another file at the path, of the old one's time."""
    status = path.stat()
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.replace(path)


def test_a_file_replaced_while_it_is_converted_is_converted_again(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"
    old = path.read_text()
    new = old.replace("7,0,1\n", "7,0,0\n")  # of the same size, and given the same time
    swaps = [new]

    def swap(_text: str, _share: float) -> None:
        if swaps:
            _replace(path, swaps.pop())

    data = open_data(_config(tmp_path), seed=0, progress=swap)
    assert data.train.gather(np.array([7])).label_BT[0, 0] == 0.0
    assert len(_entries(tmp_path)) == 1


def test_a_file_that_never_stops_to_change_is_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"

    def append(_text: str, _share: float) -> None:
        with path.open("a") as file:
            file.write("1,1,1\n")

    with pytest.raises(DataError, match=r"a.csv: changed while it was read, 3 times; wait until it is written"):
        open_data(_config(tmp_path), seed=0, progress=append)
    assert _entries(tmp_path) == []


def test_an_error_in_a_file_that_changes_meanwhile_is_forgotten_with_it(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"
    whole = path.read_text()
    path.write_text(whole[:-1] + ",x,y,z\n")
    swaps = [whole]

    def mend(_text: str, _share: float) -> None:
        if swaps:
            path.write_text(swaps.pop())

    with pytest.raises(DataError, match="has 6 fields"):
        open_data(_config(tmp_path), seed=0)
    # with two files the first is read before the second's error shows
    (tmp_path / "0.csv").write_text("x,c,y\n1,1,1\n")
    data = open_data(_config(tmp_path, train=["0.csv", "a.csv"]), seed=0, progress=mend)
    assert len(data.train) == 41


def test_another_file_of_the_same_size_and_time_has_another_entry(tmp_path: Path) -> None:
    _write(tmp_path)
    open_data(_config(tmp_path), seed=0)
    text = (tmp_path / "a.csv").read_text()
    _replace(tmp_path / "a.csv", text.replace("\n0,0,0", "\n9,0,0"))
    assert _first(open_data(_config(tmp_path), seed=0)) == 9.0


def test_parts_that_a_dead_process_has_left_go_with_the_next_conversion(tmp_path: Path) -> None:
    cache = tmp_path / ".shardkeep-cache"
    dead, busy, mine = ".a-0123456789abcdef.x1y2z3_8", ".b-0123456789abcdef.x1y2z3_8", ".c-0123456789abcdef.x1y2z3_8"
    for name in (dead, busy, mine):
        (cache / name).mkdir(parents=True)
        (cache / name / "train.arrow").write_bytes(b"half")
    (cache / mine / "letter.txt").write_text("no part of a conversion")
    (cache / ".config.d").mkdir()
    _write(tmp_path)
    with file_lock(cache / ".b-0123456789abcdef.lock"):  # somebody converts
        open_data(_config(tmp_path), seed=0)
    names = {path.name for path in cache.iterdir() if path.is_dir()}
    assert dead not in names
    assert {busy, mine, ".config.d"} < names


def test_a_large_cache_is_said_with_its_size_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path)
    assert "shardkeep cache" not in open_data(_config(tmp_path), seed=0).describe()
    monkeypatch.setattr("shardkeep.workers.data.cache.cache.LARGE_BYTES", 1)
    text = open_data(_config(tmp_path), seed=0).describe()
    (entry,) = _entries(tmp_path)
    assert re.search(rf"cached in {re.escape(str(entry))} \([\d.]+ kB; `shardkeep cache` shows and cleans it\)", text)


def test_many_files_are_known_by_size_and_time_alone(tmp_path: Path) -> None:
    for name in range(70):
        (tmp_path / f"{name:02}.csv").write_text(f"x,c,y\n{name},1,{name % 2}\n")
    config = _config(tmp_path, train=["*.csv"])
    assert _first(open_data(config, seed=0)) == 0.0
    (tmp_path / "00.csv").write_text("x,c,y\n10,1,0\n")
    assert _first(open_data(config, seed=0)) == 10.0
