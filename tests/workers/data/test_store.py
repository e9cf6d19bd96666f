"""The store of columns: jobs of the same files share what they read alike, and each sees what it alone would."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from shardkeep.base.errors import DataError
from shardkeep.workers.data.samples import Data, Dataset
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data.store.folders import own_folders
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import TwoTowerConfig
from tests.support.cases import every
from tests.support.data_files import first_column, opened, refusal
from tests.support.forked import fork_context
from tests.support.full_disk import full_disk
from tests.support.owners import STRANGER
from tests.support.stored import open_in_process

ROWS = {"train": 300, "held": 60}
DENSE: list[Any] = [
    "x",
    {"column": "z", "scale": "log"},
    {"column": "v", "width": 3},
    {"column": "q", "fill": 0.0},
    "same",
]


def _columns(num_rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, num_rows)
    return {
        "x": rng.normal(size=num_rows),
        "z": rng.normal(size=num_rows) * 1e6 + 1e9,
        "v": rng.normal(size=(num_rows, 3)).tolist(),
        "q": pa.array(rng.normal(size=num_rows), mask=rng.random(num_rows) < 0.1),
        "same": np.ones(num_rows),
        "c": rng.integers(0, 50, num_rows),
        "d": rng.choice(["a", "b", "US", "us"], num_rows),
        "m": [rng.integers(0, 9, length).astype(str).tolist() for length in lengths],
        "wm": [[0.5] * length for length in lengths],
        "s1": [rng.integers(0, 9, length).tolist() for length in lengths],
        "s2": [rng.normal(size=length).tolist() for length in lengths],
        "y": rng.integers(0, 2, num_rows),
        "y2": rng.integers(0, 2, num_rows),
        "k": pa.array(rng.integers(0, 2, num_rows), mask=rng.random(num_rows) < 0.1),
        "w": rng.random(num_rows),
        "t": rng.integers(1_600_000_000, 1_700_000_000, num_rows),
    }


def _as_texts(values: pa.ChunkedArray) -> Any:
    if not pa.types.is_list(values.type):
        return values
    return ["|".join(map(str, row)) for row in values.to_pylist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of both forms."""
    folder = tmp_path_factory.mktemp("files")
    for seed, (name, num_rows) in enumerate(ROWS.items()):
        table = pa.table(_columns(num_rows, seed))
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=200)
        texts = {name: _as_texts(values) for name, values in zip(table.column_names, table.columns, strict=True)}
        pacsv.write_csv(pa.table(texts), folder / f"{name}.csv")
    return folder


@pytest.fixture
def files(folder: Path) -> tuple[str, Path]:
    """Those of one form, for what does not depend on it."""
    return "parquet", folder


def _config(files: tuple[str, Path], cache: Path, **changes: Any) -> DataConfig:
    form, folder = files
    cut = {"separator": "|"} if form == "csv" else {}
    base = {
        "root": str(folder),
        "cache": str(cache),
        "train": f"train.{form}",
        "label": "y",
        "dense": DENSE,
        "sparse": ["c", "d", {"column": "m", "pooling": "weighted", "weights": "wm", **cut}],
        "sequences": {"seen": {"ids": {"s1": "c"}, "numbers": ["s2"], "max_length": 2, **cut}},
    }
    held = {"eval": f"held.{form}"} if changes.pop("held", False) else {}
    return DataConfig.model_validate({k: v for k, v in (base | held | changes).items() if v is not None})


def _samples(dataset: Dataset | None) -> list[Any]:
    if dataset is None:
        return []
    batch = dataset.gather(np.arange(len(dataset))[::-1])
    parts = [batch.dense_BI, batch.label_BT, batch.weight_B, *batch.numbers.values()]
    parts += [part for ids in batch.ids.values() for part in (ids.values_N, ids.lengths_B, ids.weights_N)]
    return [dataset.schema, [None if part is None else part.tobytes() for part in parts]]


def _all(data: Data) -> list[Any]:
    """What a job sees of its data."""
    parts = [_samples(part) for part in (data.train, data.eval, data.test)]
    return [data.fingerprint, parts, data.inputs, data.notes, data.source.partition(";")[2]]


def _opened(config: DataConfig, **more: Any) -> tuple[Data, list[str]]:
    reports: list[str] = []
    return open_data(config, seed=3, progress=lambda text, _: reports.append(text), **more), reports


def _alike(files: tuple[str, Path], folder: Path, **changes: Any) -> list[str]:
    """Opens with the store that jobs share, `folder/shared`, and with a fresh one, which give the same. Returns what
    the former reported."""
    data, reports = _opened(_config(files, folder / "shared", **changes))
    fresh = Path(tempfile.mkdtemp(dir=folder))
    own, _ = _opened(_config(files, fresh, **changes))
    shutil.rmtree(fresh)
    assert _all(data) == _all(own), changes
    return reports


def _converted(cache: Path) -> dict[str, int]:
    """The columns that are stored, and when they were written."""
    found = [path for path in cache.glob("*/*.column") if path.name[:5] != "rows-"]
    return {f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in found}


def _names(paths: Iterable[str]) -> list[str]:
    return [path.partition("/")[2].rpartition("-")[0] for path in paths]


# What jobs share

CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"dense": [DENSE[3], DENSE[0]], "sparse": ["d", "c"], "sequences": {}}, set()),
    ({"dense": [{"column": "x", "scale": "log", "fill": 2.0}, "z"], "scale": "none"}, set()),
    ({"sparse": [{"column": "c", "table": "other"}, "d"], "sequences": {}}, set()),
    ({"split": {"by": "random"}}, set()),
    ({"held": True}, set()),
    ({"label": {"column": "d", "positive": ["a", "us"]}, "sparse": ["c"]}, {"label"}),
    ({"label": {"column": "k", "missing": "skip"}, "dense": []}, {"label"}),
    ({"label": None, "labels": ["y2", {"column": "k", "missing": "mask"}], "weight": "w"}, {"label", "weight"}),
    ({"weight": "w", "split": {"by": "time"}, "time": "t", "dense": [*DENSE, "w"]}, {"weight", "time", "numbers-w"}),
    ({"split": {"by": "c", "test": 0.0}}, {"split"}),
    ({"dense": [{"column": "v", "width": 3}, "t"], "sparse": ["c", "d", "y2"]}, {"numbers-t", "ids-y2"}),
    ({"missing": ["", "7"], "dense": ["x"], "sparse": ["c"], "sequences": {}}, {"label", "numbers-x", "ids-c"}),
]


@every(("changes", "fresh"), CHANGES)
def test_a_job_converts_only_the_columns_that_no_job_has_read_as_it_does(
    folder: Path, tmp_path: Path, changes: dict[str, Any], fresh: set[str]
) -> None:
    form, cache = ("csv", "parquet")[len(fresh) % 2], tmp_path / "shared"
    files, first = (form, folder), folder / f"stored-{form}"
    if not first.exists():
        _opened(_config(files, first))
    shutil.copytree(first, cache)
    before = _converted(cache)
    reports, found = _alike(files, tmp_path, **changes), _converted(cache)
    assert before.items() <= found.items(), "what is stored stays as it is"
    added = [path for path in found.keys() - before.keys() if not path.startswith("held-")]
    assert {*_names(added)} == fresh and {report.partition(".")[0] for report in reports} == {
        *(["reading train"] if fresh else []),
        *(["reading held"] if "held" in changes else []),
    }
    assert not _opened(_config(files, cache, **changes))[1] and _converted(cache) == found


def test_lists_that_are_pooled_cut_or_ordered_otherwise_are_the_same_column(folder: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {"ids": {"s1": "c"}, "numbers": ["s2"], "max_length": 2, "separator": "|"}
    for number, (pooling, more) in enumerate([("sum", {}), ("mean", {"max_length": 1}), ("max", {"newest": "first"})]):
        sparse = ["c", {"column": "m", "separator": "|", "pooling": pooling}]
        changes = {"dense": [], "sparse": sparse, "sequences": {"seen": base | more}}
        assert bool(_alike(("csv", folder), tmp_path, **changes)) == (number == 0)


SPLITS: list[dict[str, Any]] = [
    {},
    {"held": True},
    {"split": {"by": "c", "test": 0.2}},
    {"split": {"by": "time"}, "time": "t"},
    {"split": {"by": "random", "test": 0.2}},
    {"time": "t"},
]
LABELS: list[dict[str, Any]] = [
    {},
    {"label": {"column": "k", "missing": "skip"}},
    {"label": {"column": "y2", "kind": "number"}},
    {"label": None, "labels": ["y", {"column": "k", "missing": "mask"}]},
]
JOB = st.fixed_dictionaries(
    {
        "dense": st.permutations(DENSE).flatmap(lambda every: st.integers(0, len(every)).map(lambda n: every[:n])),
        "sparse": st.permutations(["c", "d"]),
        "split": st.sampled_from(SPLITS),
        "label": st.sampled_from(LABELS),
        "more": st.sampled_from([{}, {"sequences": {}}, {"missing": ["", "7"]}, {"scale": "log_standard"}]),
        "weight": st.sampled_from([None, "w"]),
        "continues": st.booleans(),
    }
)


@hypothesis_settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(["csv", "parquet"]), jobs=st.lists(JOB, min_size=2, max_size=3))
def test_any_jobs_one_after_the_other_see_what_each_alone_would(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, form: str, jobs: list[dict[str, Any]]
) -> None:
    caches, inputs = tmp_path_factory.mktemp("jobs"), None
    for job in jobs:
        changes = {"dense": job["dense"], "sparse": job["sparse"], "weight": job["weight"]}
        changes |= job["split"] | job["label"] | job["more"]
        if job["continues"] and inputs is not None:
            changes["fitted"] = inputs
        _alike((form, folder), caches, **changes)
        inputs = _opened(_config((form, folder), caches / "shared", **changes))[0].inputs


def test_a_job_that_continues_a_model_reads_as_that_model(files: tuple[str, Path], tmp_path: Path) -> None:
    first, _ = _opened(_config(files, tmp_path / "shared"))
    fitted = json.loads(json.dumps(first.inputs))
    fitted["scales"]["x"][2] = 5.0
    fitted["kinds"] |= {"c": "texts", "s1": "texts"}
    before = _converted(tmp_path / "shared")
    for changes, fresh in (({}, True), ({"dense": DENSE[:2]}, False), ({"split": {"by": "random"}}, False)):
        assert bool(_alike(files, tmp_path, fitted=fitted, **changes)) == fresh
    data, _ = _opened(_config(files, tmp_path / "shared", fitted=fitted))
    assert data.inputs is not None and data.inputs["scales"] == fitted["scales"]
    added = _names(_converted(tmp_path / "shared").keys() - before.keys())
    assert sorted(added) == ["ids-c", "ids-s1", "numbers-s2"]


def test_fewer_features_of_a_user_leave_the_catalogue_as_it_is(files: tuple[str, Path], tmp_path: Path) -> None:
    def opened(cache: str, **changes: Any) -> Data:
        config = _config(files, tmp_path / cache, label=None, sequences={}, **changes)
        return _opened(config, items=TwoTowerConfig(item=["d"]))[0]

    opened("shared")
    data, own = (opened(cache, sparse=["d"], dense=["x"]) for cache in ("shared", "own"))
    assert _all(data) == _all(own) and data.catalogue is not None and own.catalogue is not None
    assert data.catalogue.values == own.catalogue.values
    assert np.array_equal(data.catalogue.ids_M, own.catalogue.ids_M)


@every(
    ("changes", "why"),
    [
        ({"label": "k", "dense": DENSE[:1]}, r"column k: the label is"),
        ({"label": "z", "dense": DENSE[:1]}, r"column z: the label is"),
        ({"label": {"column": "d", "positive": ["a", "none"]}, "sparse": ["c"]}, "positive: no row .* has 'none'"),
        ({"dense": ["d"], "sparse": []}, "column d: 'US|column d: '(a|b|us)' is not a number"),
    ],
)
def test_a_job_that_cannot_be_read_has_its_error_each_time_beside_stored_columns(
    files: tuple[str, Path], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    before = _all(_opened(_config(files, tmp_path))[0])
    for _ in range(2):
        with pytest.raises(DataError, match=why):
            _opened(_config(files, tmp_path, **changes))
    assert not list(tmp_path.glob("*/.*.partial"))
    data, reports = _opened(_config(files, tmp_path))
    assert _all(data) == before and not reports


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
    train = opened(tmp_path, train=["*.parquet"], dense=["x", "z"], sparse=["m", "c", "d"]).train
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
    batch = train.gather(np.empty(0, np.int64))
    assert batch.dense_BI.shape == (0, 2) and batch.label_BT.shape == (0, 1) and len(batch.ids["c"]) == 0


def test_a_conversion_needs_memory_for_a_few_chunks_only(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 10**9, 300_000)
    table = pa.table({"x": x, "c": x % 99_991, "y": x % 2})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25_000)
    size, seen = table.nbytes, list[int]()
    del table
    before = pa.total_allocated_bytes()

    def report(_text: str, _share: float) -> None:
        seen.append(pa.total_allocated_bytes() - before)

    data = opened(tmp_path, train="a.parquet", dense=["x"], sparse=["c"], progress=report)
    assert len(data.train) == 300_000 and max(seen) < size


def test_progress_is_the_share_of_the_bytes_of_all_files_and_a_large_store_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path)
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    reports: list[tuple[str, float]] = []
    _open(tmp_path, train=["a.csv", "b.csv"], progress=lambda *report: reports.append(report))
    assert reports == sorted(reports) and reports[-1] == ("reading b.csv", 1.0)
    assert max(share for text, share in reports if text == "reading a.csv") == 0.5
    (tmp_path / "b.csv").unlink()
    assert "shardkeep cache" not in _open(tmp_path, cache="own").describe()
    monkeypatch.setattr("shardkeep.workers.data.store.opening.LARGE_BYTES", 1)
    text, (entry,) = _open(tmp_path, cache="own").describe(), list((tmp_path / "own").iterdir())
    place = rf"cached in {re.escape(str(entry))} \([\d.]+ k?B; `shardkeep cache` shows and cleans it\)"
    assert re.search(place, text), text


def test_jobs_with_the_same_rows_share_their_files(files: tuple[str, Path], tmp_path: Path) -> None:
    for dense in (DENSE, [{"column": "x", "scale": "log"}]):
        data, _ = _opened(_config(files, tmp_path / "store", dense=dense, split={"by": "c"}))
        assert data.eval is not None
        assert len([*tmp_path.glob("store/*/rows-*")]) == 2 + (data.test is not None)


# Damage

KINDS = ("ids-c", "ids-m", "numbers-v", "label", "rows", "sides", "columns", "files", "catalogue")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[int(np.random.default_rng(len(content)).integers(len(content)))] ^= 1
    path.write_bytes(content)


def _flip_a_digit(path: Path) -> None:
    """Of the last number in the file: of a footer, or of JSON."""
    content = bytearray(path.read_bytes())
    content[max(i for i, byte in enumerate(content[:-24]) if chr(byte) in "0123456789")] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


DAMAGES = (_flip, _cut, lambda path: path.write_bytes(b""), Path.unlink)


def test_damage_to_any_file_of_the_store_changes_no_value(files: tuple[str, Path], tmp_path: Path) -> None:
    def opened(cache: str, **changes: Any) -> list[Any]:
        config = _config(files, tmp_path / cache, label=None, sequences={}, split={"by": "random"}, **changes)
        data = _opened(config, items=TwoTowerConfig(item=["d"]))[0]
        assert data.catalogue is not None
        return [_all(data), data.catalogue.values.to_pylist(), data.catalogue.ids_M.tolist()]

    cases = [*zip(KINDS, itertools.cycle(DAMAGES), strict=False), *((kind, _flip_a_digit) for kind in KINDS)]
    another = {"dense": DENSE[1:3]}
    expected, other = opened("whole"), opened("other", **another)
    for number, (kind, damage) in enumerate(cases):
        shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")
        path = min(tmp_path.glob(f"{number}/*/{kind}[-.]*"))
        before = path.stat()
        damage(path)
        if path.exists() and kind != "sides":  # a disk that loses bits does not change times
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert opened(f"{number}", **another) == other, (kind, damage)
            os.utime(path)
        assert opened(f"{number}") == expected, (kind, damage)


def test_a_full_disk_is_an_error_of_a_line_and_the_next_job_is_right(files: tuple[str, Path], tmp_path: Path) -> None:
    for changes in ({}, {"dense": DENSE[1:]}, {"label": "y2"}, {"split": {"by": "c"}}, {"scale": "log"}):
        before = _converted(tmp_path / "shared")
        with full_disk(), pytest.raises(DataError) as caught:
            _opened(_config(files, tmp_path / "shared", **changes))
        assert "the cache cannot be written (" in str(caught.value) and "\n" not in str(caught.value)
        assert _converted(tmp_path / "shared") == before and not list(tmp_path.glob("shared/*/.*.partial"))
        _alike(files, tmp_path, **changes)
        with full_disk():
            assert not _opened(_config(files, tmp_path / "shared", **changes))[1], "what is there is read"


# Several jobs at once, and jobs that die


def test_jobs_that_begin_at_once_see_what_each_alone_would(files: tuple[str, Path], tmp_path: Path) -> None:
    changes = [{}, *({"label": label, "dense": DENSE[n:]} for n in (1, 2) for label in ("y", "y2"))]
    expected = [_all(_opened(_config(files, tmp_path / f"own{n}", **c))[0]) for n, c in enumerate(changes)]
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda n: _all(_opened(_config(files, tmp_path / "shared", **changes[n % 5]))[0]), range(10))
        assert [expected[n % 5] for n in range(10)] == list(found)
    names = _names(_converted(tmp_path / "shared"))
    assert sorted(names) == sorted([*{*names} - {"label"}, "label", "label"])


def test_processes_that_begin_at_once_convert_once_and_agree(files: tuple[str, Path], tmp_path: Path) -> None:
    context, config = fork_context(), _config(files, tmp_path / "shared")
    start, results = context.Barrier(3), [tmp_path / f"{n}.json" for n in range(3)]
    jobs = [context.Process(target=open_in_process, args=(config, result, start)) for result in results]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(100.0)
    marks, reports = zip(*(json.loads(result.read_text()) for result in results), strict=True)
    assert {*marks} == {_opened(config)[0].fingerprint}
    assert sum(any(text.startswith("reading") for text in own) for own in reports) == 1, reports


def test_a_job_that_is_killed_leaves_parts_which_the_next_one_removes(files: tuple[str, Path], tmp_path: Path) -> None:
    config = _config(files, tmp_path / "shared")
    job = fork_context().Process(target=open_in_process, args=(config, tmp_path / "none", None, 2))
    job.start()
    job.join(100.0)
    assert job.exitcode == -signal.SIGKILL and not _converted(tmp_path / "shared")
    parts = list(tmp_path.glob("shared/*/.*.partial"))
    assert parts and any(path.stat().st_size for path in parts)
    assert _alike(files, tmp_path, dense=DENSE[:1])  # which writes no part of the others
    assert not list(tmp_path.glob("shared/*/.*.partial"))


# Files that change


def _write(folder: Path, num_rows: int = 40, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(f"{i},{i % 7},{i % 2}\n" for i in range(first, first + num_rows))
    (folder / "a.csv").write_text("x,c,y\n" + lines)


def _open(folder: Path, *, reports: list[str] | None = None, **settings: Any) -> Data:
    progress = {} if reports is None else {"progress": lambda text, _: reports.append(text)}
    return opened(folder, **{"dense": ["x"], "sparse": ["c"]} | settings | progress)


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / ".shardkeep-cache").iterdir() if p.is_dir())


class Acting(list[str]):
    """Does something at the first report of progress, or `always`."""

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


@every("name", ["a.csv", "a[1].csv", "ä" * 125 + ".csv"])
def test_changed_files_replace_their_columns_and_open_readers_keep_the_old_ones(tmp_path: Path, name: str) -> None:
    def opened(first: float) -> Data:
        (tmp_path / name).write_text(f"x,c,y\n{first},1,1\n1,1,0\n")
        return _open(tmp_path, train=name.replace("[", "[[]"))

    old, new = opened(5.0), opened(1000.0)
    assert (first_column(old.train)[0], first_column(new.train)[0], len(_entries(tmp_path))) == (5.0, 1000.0, 1)


def test_a_file_replaced_while_it_is_converted_is_converted_again(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"
    new = path.read_text().replace("7,0,1\n", "7,0,0\n")  # of the same size, and given the same time
    data = _open(tmp_path, reports=Acting(lambda: _replace(path, new)))
    assert data.train.gather(np.array([7])).label_BT[0, 0] == 0.0
    _replace(path, path.read_text().replace("\n0,0,0", "\n9,0,0"))
    assert first_column(_open(tmp_path).train)[0] == 9.0, "another file of the same size and time has another entry"
    assert len(_entries(tmp_path)) == 1


def test_columns_of_two_states_of_a_file_are_not_mixed(tmp_path: Path) -> None:
    old, new = (f"x,z,y\n{n},{n},0\n9,9,1\n" for n in (1, 2))
    path, columns = tmp_path / "a.csv", {"dense": ["x", "z"], "sparse": []}
    path.write_text(old)
    _open(tmp_path, sparse=[])
    data = _open(tmp_path, **columns, reports=Acting(lambda: _replace(path, new)))
    assert data.train.gather(np.array([0])).dense_BI.tolist() == [[2.0, 2.0]]
    _replace(path, old)
    assert _open(tmp_path, **columns).train.gather(np.array([0])).dense_BI.tolist() == [[1.0, 1.0]]


def test_an_error_leaves_no_column_and_is_forgotten_with_the_file_that_changes_meanwhile(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "a.csv"
    whole = path.read_text()
    with pytest.raises(DataError, match=r"a.csv: changed while it was read, 3 times; wait until it is written"):
        _open(tmp_path, reports=Acting(lambda: path.write_text(path.read_text() + "1,1,1\n"), always=True))
    path.write_text(whole[:-1] + ",x,y,z\n")
    assert "has 6 fields" in refusal(tmp_path, dense=["x"], sparse=["c"])
    assert not list(tmp_path.glob("*/*/*.column")) + list(tmp_path.glob("*/*/.*.partial"))
    # with two files the first is read before the second's error shows
    (tmp_path / "0.csv").write_text("x,c,y\n1,1,1\n")
    data = _open(tmp_path, reports=Acting(lambda: path.write_text(whole)), train=["0.csv", "a.csv"])
    assert len(data.train) == 41


def test_many_files_are_compared_by_size_and_time_alone(tmp_path: Path) -> None:
    for name in range(70):
        (tmp_path / f"{name:02}.csv").write_text(f"x,c,y\n{name},1,{name % 2}\n")
    assert first_column(_open(tmp_path, train=["*.csv"]).train)[0] == 0.0
    (tmp_path / "00.csv").write_text("x,c,y\n10,1,0\n")
    assert first_column(_open(tmp_path, train=["*.csv"]).train)[0] == 10.0


# Folders


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of data; the user's own store is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "data"
    _write(folder)
    return folder


def test_a_folder_in_which_nothing_can_be_written_is_left_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.chmod(0o555)
    try:
        _open(data)
        assert [p.name for p in data.iterdir()] == ["a.csv"]
        assert list(data.parent.glob("home/shardkeep/data/a-*/numbers-x-*.column"))
    finally:
        data.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "~")
    assert own_folders() == [data.parent / f"shardkeep-data-{os.geteuid()}"], "there is no home"


def test_a_folder_beside_the_data_is_ours_alone_and_a_named_one_stays_as_it_is(data: Path, tmp_path: Path) -> None:
    before, cache = os.umask(0o000), data / ".shardkeep-cache"
    try:
        for mode in (None, 0o777):  # ours, and open to others: it is closed to them
            if mode is not None:
                cache.chmod(mode)
            _open(data)
            assert cache.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    for mode in (0o755, 0o777):
        named = tmp_path / f"{mode:o}"
        named.mkdir()
        named.chmod(mode)
        assert str(named) in _open(data, cache=str(named)).source and named.stat().st_mode & 0o777 == mode
        assert len(list(named.glob("a-*/numbers-x-*.column"))) == 1
    _open(data, cache="beside/it")
    assert list(data.glob("beside/it/a-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_beside_the_data_is_left_alone(data: Path, tmp_path: Path) -> None:
    _open(data)
    cache = data / ".shardkeep-cache"
    os.chown(cache, STRANGER, STRANGER)
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*"))
    reports: list[str] = []
    assert str(tmp_path / "home") in _open(data, reports=reports).source and reports
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*")) == before
    (tmp_path / "home").chmod(0o555)
    shutil.rmtree(tmp_path / "home" / "shardkeep")
    planted = tmp_path / f"shardkeep-data-{os.geteuid()}"
    planted.mkdir()
    os.chown(planted, STRANGER, STRANGER)
    with pytest.raises(DataError, match=r"the cache folder cannot be made \(another user made it.*\); set data.cache"):
        _open(data)
    planted.rmdir()
    assert str(planted) in _open(data).source and planted.stat().st_mode & 0o777 == 0o700


@every(
    ("cache", "why"),
    [
        ("a.csv", "File exists"),
        ("a.csv/x", "File exists|Not a directory"),
        ("loop", "a link that leads to itself|File exists|Too many levels"),
        ("a/" * 1500, "too many folders|File name too long"),
        ("/proc/x", "No such file"),
        ("/dev/full", "File exists|Not a directory"),
    ],
)
def test_a_name_that_can_be_no_folder_is_refused(data: Path, cache: str, why: str) -> None:
    if not (data / "loop").is_symlink():
        (data / "loop").symlink_to(data / "loop")
    with pytest.raises(DataError, match=why) as caught:
        _open(data, cache=cache)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


# The fingerprint of data

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
    train, held = _mark(tmp_path / "three", held=LINES[:20]).split("-")
    other_train, other_held = _mark(tmp_path / "four", held=LINES[:19]).split("-")
    assert train == other_train == _mark(tmp_path / "five") and held != other_held


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

    def mark(seed: int = 0, **settings: Any) -> str:
        return open_data(DataConfig.model_validate({"synthetic": settings}), seed=seed).fingerprint

    assert mark() == mark()
    others = [mark(), mark(1), mark(zipf=1.1), mark(num_dense=3), mark(train_samples=9), mark(ids="numbered")]
    assert len({m.split("-")[0] for m in others}) == len(others)
    assert mark().split("-")[0] == mark(eval_samples=9).split("-")[0]
