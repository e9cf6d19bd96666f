"""The columnar cache: found again, rebuilt when it must be, right at any size."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
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
from shardkeep.workers.data.sources import csv_files
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import first_column, opened, refusal


def _write(folder: Path, num_rows: int = 40, first: int = 0) -> None:
    lines = "".join(f"{i},{i % 7},{i % 2}\n" for i in range(first, first + num_rows))
    (folder / "a.csv").write_text("x,c,y\n" + lines)


def _open(folder: Path, *, told: list[str] | None = None, seed: int = 0, **settings: Any) -> Data:
    """`told`: gets what is told of progress."""
    progress = {} if told is None else {"progress": lambda text, _: told.append(text)}
    return opened(folder, seed=seed, **{"dense": ["x"], "sparse": ["c"]} | settings | progress)


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / ".shardkeep-cache").iterdir() if p.is_dir())


def test_a_second_reader_finds_the_cache_of_the_first_and_other_settings_have_an_entry_of_their_own(
    tmp_path: Path,
) -> None:
    _write(tmp_path)
    told: list[str] = []
    line = _open(tmp_path, told=told).describe()
    assert "40 samples, none for evaluation; 1 dense column, 1 feature" in line and told
    told.clear()
    _open(tmp_path, told=told)
    data = _open(tmp_path, told=told, sparse=[{"column": "c", "table": "t"}], seed=9)
    assert data.train.schema.features[0].table == "t" and not told and len(_entries(tmp_path)) == 1
    others = {"scale": "log"}, {"missing": ["7"]}, {"dense": [{"column": "x", "fill": 3.0}]}, {"split": "random"}
    for number, settings in enumerate(others, 2):
        _open(tmp_path, **settings)
        assert len(_entries(tmp_path)) == number


def test_changed_files_replace_their_entry_and_open_readers_keep_the_old_one(tmp_path: Path) -> None:
    _write(tmp_path)
    old = _open(tmp_path)
    _write(tmp_path, first=1000)
    assert (first_column(old.train)[0], first_column(_open(tmp_path).train)[0]) == (0.0, 1000.0)
    assert len(_entries(tmp_path)) == 1


def _put_another_files_entry(arrow: Path) -> None:
    folder, meta = arrow.parents[2], arrow.with_name("meta.json")
    _write(folder, num_rows=39)
    _open(folder, cache="other")
    (other,) = (folder / "other").glob("a-*")
    _write(folder)
    os.utime(folder / "a.csv", ns=(0, json.loads(meta.read_text())["inputs"][0][2]))
    arrow.write_bytes((other / "train.arrow").read_bytes())


@every(
    "damage",
    [
        lambda arrow: arrow.write_bytes(arrow.read_bytes()[:-100]),
        lambda arrow: arrow.write_bytes(bytes(arrow.stat().st_size)),
        lambda arrow: arrow.unlink(),
        lambda arrow: arrow.with_name("meta.json").unlink(),
        lambda arrow: arrow.with_name("meta.json").write_text("{"),
        _put_another_files_entry,
    ],
    ids=["truncated", "zeros", "gone", "no meta", "bad meta", "another file's"],
)
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _write(tmp_path)
    _open(tmp_path)
    (entry,) = _entries(tmp_path)
    arrow = entry / "train.arrow"
    size = arrow.stat().st_size
    damage(arrow)
    assert first_column(_open(tmp_path).train) == list(range(40)) and arrow.stat().st_size == size


def test_a_folder_in_which_nothing_can_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, home = tmp_path / "data", tmp_path / "home"
    data.mkdir()
    _write(data)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    data.chmod(0o555)
    try:
        _open(data)
        assert [p.name for p in data.iterdir()] == ["a.csv"]
        assert list((home / "shardkeep" / "data").glob("a-*/train.arrow"))
    finally:
        data.chmod(0o755)
    shutil.rmtree(home)
    _open(data)
    (data / ".shardkeep-cache").chmod(0o555)
    told: list[str] = []
    try:
        assert len(_open(data, told=told).train) == 40 and not told, "the entry beside the data is read"
    finally:
        (data / ".shardkeep-cache").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "~")
    assert [folder.parent for folder in own_folders()] == [Path(tempfile.gettempdir())], "there is no home"


def test_the_cache_folder_can_be_named_and_who_may_read_it_may_read_its_entries(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "kept").mkdir(mode=0o755)
    _open(tmp_path, cache="kept")
    (entry,) = (tmp_path / "kept").glob("a-*")
    assert entry.stat().st_mode & 0o055 == 0o055 and (entry / "train.arrow").exists()
    assert not (tmp_path / ".shardkeep-cache").exists()


def test_many_readers_at_once_convert_once_and_agree(tmp_path: Path) -> None:
    _write(tmp_path, num_rows=5000)
    told: list[str] = []
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda _: _open(tmp_path, told=told).train.gather(np.arange(5000)[::-1]), range(12))
        assert len({batch.dense_BI.tobytes() for batch in found}) == 1
    assert sum(text.startswith("reading") for text in told) == 2  # one block and the end, of one conversion


def test_rows_are_found_across_chunks_and_files(tmp_path: Path) -> None:
    rng, parts = np.random.default_rng(0), []
    for name, count in (("a.parquet", 70_000), ("b.parquet", 1), ("c.parquet", 65_535 + 9000)):
        lengths = rng.integers(0, 4, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, rng.integers(-(2**62), 2**62, int(lengths.sum())))
        dense, ids = {"x": rng.normal(size=count), "z": rng.normal(size=count)}, rng.integers(0, 2**62, count)
        columns = {**dense, "c": ids, "d": rng.integers(0, 9, count), "m": lists, "y": rng.integers(0, 2, count)}
        parts.append(pa.table(columns))
        pq.write_table(parts[-1], tmp_path / name)
    train = _open(tmp_path, train=["*.parquet"], dense=["x", "z"], sparse=["m", "c", "d"]).train
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
    for row in (-1, len(whole), 2**40):
        with pytest.raises(IndexError, match="outside"):
            train.gather(np.array([0, row]))
    batch = train.gather(np.empty(0, np.int64))
    assert batch.dense_BI.shape == (0, 2) and batch.label_BT.shape == (0, 1) and len(batch.ids["c"]) == 0


def test_a_conversion_needs_memory_for_a_few_chunks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 1 << 20)
    rng = np.random.default_rng(0)
    block = "".join(f"{x},{x % 99991},{x % 2}\n" for x in rng.integers(0, 10**9, 25_000))
    (tmp_path / "a.csv").write_text("x,c,y\n" + 12 * block)
    before, seen = pa.total_allocated_bytes(), []

    class Watching(list[str]):
        def append(self, _text: str) -> None:
            seen.append(pa.total_allocated_bytes() - before)

    assert len(_open(tmp_path, told=Watching()).train) == 300_000
    assert max(seen) < 7e6, "the file has 6 MB"


def test_progress_is_the_share_of_the_bytes_of_all_files(tmp_path: Path) -> None:
    _write(tmp_path)
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    shares: list[tuple[str, float]] = []
    _open(tmp_path, train=["a.csv", "b.csv"], progress=lambda *told: shares.append(told))
    assert shares == sorted(shares) and shares[-1] == ("reading b.csv", 1.0)
    assert max(share for text, share in shares if text == "reading a.csv") == 0.5


def test_jobs_share_the_training_entry_and_an_evaluation_entry_whose_values_are_stored_as_they_are(
    tmp_path: Path,
) -> None:
    _write(tmp_path)
    (tmp_path / "d.csv").write_text("x,c,y\n1,1,0\n,2,1\n2,2,1\n")
    for name in ("b.csv", "c.csv"):
        (tmp_path / name).write_text("x,c,y\n5,1,0\n6,2,1\n")
    first = _open(tmp_path, eval="b.csv", scale="standard")
    told: list[str] = []
    second = _open(tmp_path, told=told, eval="c.csv", scale="standard")
    _open(tmp_path, told=told, scale="standard")
    assert set(told) == {"reading c.csv"} and [e.name[0] for e in _entries(tmp_path)] == ["a", "b", "c"]
    assert first_column(first.eval) == first_column(second.eval)
    told.clear()
    for train in ("a.csv", "d.csv"):
        data = _open(tmp_path, told=told, train=train, eval="b.csv", scale="log")
        assert first_column(data.eval)[0] == np.float32(np.log1p(5.0))
    assert set(told) == {"reading a.csv", "reading b.csv", "reading d.csv"}
    assert told.index("reading d.csv") > max(i for i, t in enumerate(told) if t == "reading b.csv")


# Files that change


class Acting(list[str]):
    """Does something when it is told of progress for the first time, or `always`."""

    def __init__(self, act: Any, *, always: bool = False) -> None:
        super().__init__()
        self._act, self._always = act, always

    def append(self, text: str) -> None:
        if self._always or not self:
            self._act()
        super().append(text)


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
    new = path.read_text().replace("7,0,1\n", "7,0,0\n")  # of the same size, and given the same time
    data = _open(tmp_path, told=Acting(lambda: _replace(path, new)))
    assert data.train.gather(np.array([7])).label_BT[0, 0] == 0.0 and len(_entries(tmp_path)) == 1
    _replace(path, path.read_text().replace("\n0,0,0", "\n9,0,0"))
    assert first_column(_open(tmp_path).train)[0] == 9.0, "another file of the same size and time has another entry"


def test_an_error_leaves_no_entry_and_is_forgotten_with_the_file_that_changes_meanwhile(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"
    whole = path.read_text()
    with pytest.raises(DataError, match=r"a.csv: changed while it was read, 3 times; wait until it is written"):
        _open(tmp_path, told=Acting(lambda: path.write_text(path.read_text() + "1,1,1\n"), always=True))
    path.write_text(whole[:-1] + ",x,y,z\n")
    assert "has 6 fields" in refusal(tmp_path, dense=["x"], sparse=["c"]) and _entries(tmp_path) == []
    # with two files the first is read before the second's error shows
    (tmp_path / "0.csv").write_text("x,c,y\n1,1,1\n")
    data = _open(tmp_path, told=Acting(lambda: path.write_text(whole)), train=["0.csv", "a.csv"])
    assert len(data.train) == 41


def test_parts_that_a_dead_process_has_left_go_with_the_next_conversion(tmp_path: Path) -> None:
    cache = tmp_path / ".shardkeep-cache"
    dead, busy, mine = (f".{name}-0123456789abcdef.x1y2z3_8" for name in "abc")
    for name in (dead, busy, mine):
        (cache / name).mkdir(parents=True)
        (cache / name / "train.arrow").write_bytes(b"half")
    (cache / mine / "letter.txt").write_text("no part of a conversion")
    (cache / ".config.d").mkdir()
    _write(tmp_path)
    with file_lock(cache / ".b-0123456789abcdef.lock"):  # somebody converts
        _open(tmp_path)
    names = {path.name for path in cache.iterdir() if path.is_dir()}
    assert dead not in names and {busy, mine, ".config.d"} < names


def test_a_large_cache_is_said_with_its_size_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path)
    assert "shardkeep cache" not in _open(tmp_path).describe()
    monkeypatch.setattr("shardkeep.workers.data.cache.cache.LARGE_BYTES", 1)
    text, (entry,) = _open(tmp_path).describe(), _entries(tmp_path)
    assert re.search(rf"cached in {re.escape(str(entry))} \([\d.]+ kB; `shardkeep cache` shows and cleans it\)", text)


def test_many_files_are_known_by_size_and_time_alone(tmp_path: Path) -> None:
    for name in range(70):
        (tmp_path / f"{name:02}.csv").write_text(f"x,c,y\n{name},1,{name % 2}\n")
    assert first_column(_open(tmp_path, train=["*.csv"]).train)[0] == 0.0
    (tmp_path / "00.csv").write_text("x,c,y\n10,1,0\n")
    assert first_column(_open(tmp_path, train=["*.csv"]).train)[0] == 10.0


# ---- the fingerprint of data ----


LINES = [f"{i}.5,{i % 7},{i % 3}|{i % 5},{i % 2}" for i in range(40)]


def _mark(folder: Path, lines: list[str] = LINES, *, held: list[str] | None = None, seed: int = 0, **more: Any) -> str:
    files = {"a.csv": "\n".join(["x,c,m,y", *lines])}
    if held is not None:
        files["b.csv"] = "\n".join(["x,c,m,y", *held])
        more = {"eval": "b.csv"} | more
    columns = {"dense": ["x"], "sparse": ["c", {"column": "m", "separator": "|"}], "scale": None}
    return opened(folder, files, seed=seed, **columns | more).fingerprint


def test_equal_content_has_one_fingerprint_at_any_path_and_time_and_in_several_files(tmp_path: Path) -> None:
    mark = _mark(tmp_path / "one")
    assert mark and mark == _mark(tmp_path / "two", seed=5)
    os.utime(tmp_path / "one" / "a.csv", ns=(1, 1))
    assert mark == _mark(tmp_path / "one")
    tables = [{"column": "c", "table": "t"}, {"column": "m", "separator": "|", "pooling": "mean"}]
    assert mark == _mark(tmp_path / "one", sparse=tables), "tables and pooling do not count"
    mark = _mark(tmp_path / "one", scale="none")
    parts = {"held": LINES[10:], "eval": [], "train": ["a.csv", "b.csv"]}
    assert mark == _mark(tmp_path / "one", LINES[:10], scale="none", **parts)


def test_any_other_value_order_or_scaling_has_another_fingerprint(tmp_path: Path) -> None:
    last = {
        "dense": "39.25,4,0|4,1",
        "category": "39.5,5,0|4,1",
        "list entry": "39.5,4,0|3,1",
        "list length": "39.5,4,4,1",
        "label": "39.5,4,0|4,0",
        "missing": ",4,0|4,1",
    }
    marks = {name: _mark(tmp_path / name, [*LINES[:-1], line], scale="none") for name, line in last.items()}
    marks |= {
        "none": _mark(tmp_path / "none", scale="none"),
        "as it is": _mark(tmp_path / "as it is"),
        "backwards": _mark(tmp_path / "backwards", LINES[::-1]),
        "log": _mark(tmp_path / "log", scale="log"),
        "fill": _mark(tmp_path / "fill", dense=[{"column": "x", "fill": 3.0}]),
        "split": _mark(tmp_path / "split", split="random"),
        "seed": _mark(tmp_path / "seed", split="random", seed=1),
        "an entry of the first list": _mark(tmp_path / "first", ["1,1,3|4,0", "1,1,5,1"]),
        "an entry of the next list": _mark(tmp_path / "next", ["1,1,3,0", "1,1,4|5,1"]),
    }
    assert len(set(marks.values())) == len(marks), marks


def test_training_and_evaluation_samples_have_a_part_each(tmp_path: Path) -> None:
    train, held = _mark(tmp_path / "one", held=LINES[:20]).split("-")
    other_train, other_held = _mark(tmp_path / "two", held=LINES[:19]).split("-")
    assert train == other_train == _mark(tmp_path / "three") and held != other_held


def test_the_synthetic_stream_is_known_by_its_settings_and_seed() -> None:
    def mark(seed: int = 0, **settings: Any) -> str:
        return open_data(DataConfig.model_validate({"synthetic": settings}), seed=seed).fingerprint

    assert mark() == mark()
    marks = [mark(), mark(1), mark(zipf=1.1), mark(num_dense=3), mark(train_samples=9), mark(ids="numbered")]
    assert len({m.split("-")[0] for m in marks}) == len(marks)
    assert mark().split("-")[0] == mark(eval_samples=9).split("-")[0]
