"""Columns that jobs of the same files share in the cache: as of a conversion of its own, to the last bit."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
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
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import TwoTowerConfig
from tests.support.cases import every
from tests.support.data_files import first_column, opened
from tests.support.full_disk import full_disk

ROWS = {"train": 400, "held": 60}
DENSE = ["x", {"column": "z", "scale": "log"}, {"column": "v", "width": 3}, {"column": "q", "fill": 0.0}, "same"]


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
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=300)
        texts = {name: _as_texts(values) for name, values in zip(table.column_names, table.columns, strict=True)}
        pacsv.write_csv(pa.table(texts), folder / f"{name}.csv")
    return folder


@pytest.fixture
def files(folder: Path) -> tuple[str, Path]:
    """Those of one form, for what does not depend on it."""
    return "parquet", folder


def _config(kind: tuple[str, Path], cache: Path, **changes: Any) -> DataConfig:
    form, folder = kind
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
    """What a job sees of its data; notes in any order."""
    parts = [_samples(part) for part in (data.train, data.eval, data.test)]
    return [data.fingerprint, parts, data.inputs, sorted(data.notes), data.source.partition(";")[2]]


def _opened(config: DataConfig, **more: Any) -> tuple[Data, list[str]]:
    told: list[str] = []
    return open_data(config, seed=3, progress=lambda text, _: told.append(text), **more), told


def _alike(files: tuple[str, Path], folder: Path, **changes: Any) -> list[str]:
    """Opens with the cache that jobs share, `folder/shared`, and with one of its own, which give the same; returns what
    was told of the former."""
    data, told = _opened(_config(files, folder / "shared", **changes))
    own, _ = _opened(_config(files, Path(tempfile.mkdtemp(dir=folder)), **changes))
    assert _all(data) == _all(own), changes
    return told


def _own_bytes(cache: Path) -> int:
    """Of the columns that no entry shares."""
    return sum(p.stat().st_size for p in cache.glob("*/*.arrow*") if p.stat().st_nlink == 1)


FEWER: list[dict[str, Any]] = [
    {"dense": DENSE[1:]},
    {"dense": [DENSE[3], DENSE[0]]},
    {"dense": [DENSE[0], DENSE[2]]},
    {"dense": []},
    {"sparse": ["c", "d"]},
    {"sparse": ["d", "c"]},
    {"sequences": {}},
    {"dense": DENSE[::-1]},
    {"sparse": [], "sequences": {}},
    {"sparse": [{"column": "c", "table": "other"}, "d"], "sequences": {}},
]

SPLITS: list[dict[str, Any]] = [
    {},
    {"held": True},
    {"split": {"by": "c", "test": 0.0}},
    {"split": {"by": "time"}, "time": "t"},
    {"split": {"by": "c", "test": 0.2}},
    {"label": {"column": "k", "missing": "skip"}},
    {"weight": "w", "time": "t"},
    {"split": {"by": "random", "test": 0.2}},
    {"label": None, "labels": ["y", {"column": "k", "missing": "mask"}]},
]


@every(("first", "split"), list(enumerate(SPLITS)))
def test_fewer_columns_or_another_order_convert_and_store_nothing(
    folder: Path, tmp_path: Path, first: int, split: dict[str, Any]
) -> None:
    kind = ("csv", "parquet")[first % 2], folder
    _opened(_config(kind, tmp_path / "shared", **split))
    for fewer in FEWER[first::8]:  # each once
        assert not _alike(kind, tmp_path, **split, **fewer) and _own_bytes(tmp_path / "shared") == 0, fewer


TARGETS: list[dict[str, Any]] = [
    {"label": "y2"},
    {"label": {"column": "d", "positive": ["a", "us"]}, "sparse": ["c"], "sequences": {}},
    {"label": {"column": "x", "kind": "number"}, "dense": DENSE[1:]},
    {"label": None, "labels": ["y2", "y"]},
    {"label": None, "labels": ["y2", {"column": "k", "missing": "mask"}], "weight": "w"},
    {"weight": "w"},
    {"time": "t"},
    {"label": "y2", "weight": "t", "dense": DENSE[1:], "time": "t"},
]


@every(("first", "split"), list(enumerate(SPLITS[:3] + SPLITS[4:5])))
def test_another_label_weight_or_time_is_converted_alone(
    folder: Path, tmp_path: Path, first: int, split: dict[str, Any]
) -> None:
    for number, targets in enumerate(TARGETS[first::4]):
        kind, caches = (("csv", "parquet")[(first + number) % 2], folder), tmp_path / str(number)
        caches.mkdir()
        _opened(_config(kind, caches / "shared", **split))
        assert _alike(kind, caches, **split | targets), targets
        assert not _opened(_config(kind, caches / "shared", **split | targets))[1], targets
        assert _own_bytes(caches / "shared") < 40 * sum(ROWS.values()), targets


@every(
    ("changes", "why"),
    [
        ({"label": "k", "dense": DENSE[:1]}, r"column k: the label is"),
        ({"label": "z", "dense": DENSE[:1]}, r"column z: the label is"),
        ({"label": {"column": "d", "positive": ["a", "none"]}, "sparse": ["c"]}, "positive: no row .* has 'none'"),
    ],
)
def test_a_label_that_cannot_be_one_has_its_error(
    files: tuple[str, Path], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    _opened(_config(files, tmp_path))
    before = {path for path in tmp_path.iterdir() if path.is_dir()}
    with pytest.raises(DataError, match=why):
        _opened(_config(files, tmp_path, **changes))
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == before or "none" in why


def test_labels_that_leave_out_as_many_other_rows_share_nothing_and_a_changed_file_is_converted_for_each(
    tmp_path: Path,
) -> None:
    files = {"a.csv": "x,y,k\n1,,0\n2,0,\n3,1,1\n4,0,0\n"}
    for label, rows in (("y", [2.0, 3.0, 4.0]), ("k", [1.0, 3.0, 4.0])):
        data = opened(tmp_path, files, label={"column": label, "missing": "skip"}, dense=["x"])
        assert first_column(data.train) == rows
    for first, dense in ((1, ["x", "z"]), (5, ["x"]), (7, ["x"])):
        data = opened(tmp_path, {"a.csv": f"x,z,y\n{first},2,0\n3,4,1\n"}, dense=dense)
        assert first_column(data.train) == [first, 3.0]


@every(
    ("before", "after"),
    [
        ({"label": {"column": "k", "missing": "skip"}}, {"label": "y"}),
        ({"label": "y"}, {"label": {"column": "k", "missing": "skip"}}),
        ({"split": {"by": "random"}}, {"split": {"by": "random"}, "dense": DENSE[1:]}),
        ({"split": {"by": "random"}}, {"split": {"by": "random"}, "label": "y2"}),
        ({"split": {"by": "time"}, "time": "t"}, {"split": {"by": "time"}, "time": "w"}),
        ({"split": {"by": "c"}}, {"split": {"by": "c", "eval": 0.3}}),
        ({"dense": DENSE[1:]}, {}),
        ({"missing": ["", "7"]}, {"dense": DENSE[1:]}),
        ({"scale": "none"}, {"dense": DENSE[1:]}),
        ({"dense": [{"column": "x", "fill": 1.0}]}, {"dense": ["x"]}),
    ],
)
def test_other_rows_rules_and_more_columns_are_converted(
    files: tuple[str, Path], tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    _opened(_config(files, tmp_path / "shared", **before))
    assert _alike(files, tmp_path, **after)


JOB = st.tuples(
    st.permutations(DENSE).flatmap(lambda all_: st.integers(0, len(all_)).map(lambda n: list(all_[:n]))),
    st.permutations(["c", "d"]),
    st.sampled_from(["y", "y2"]),
    st.sampled_from([None, "w"]),
)


@hypothesis_settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(["csv", "parquet"]), jobs=st.lists(JOB, min_size=2, max_size=4))
def test_any_jobs_one_after_the_other_see_what_each_alone_would(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, form: str, jobs: list[Any]
) -> None:
    caches = tmp_path_factory.mktemp("jobs")
    for dense, sparse, label, weight in jobs:
        _alike((form, folder), caches, dense=dense, sparse=sparse, label=label, weight=weight, sequences={})


def test_rows_of_several_chunks_are_shared(tmp_path: Path) -> None:
    rows = np.arange(70_000)
    table = {"x": rows / 3, "z": rows % 11, "q": -rows, "c": rows % 7, "d": rows % 5, "y": rows % 2, "y2": rows % 3 % 2}
    pq.write_table(pa.table(table | {"t": -rows}), tmp_path / "train.parquet")
    files, wide = ("parquet", tmp_path), {"dense": ["x", "z", "q"], "sparse": ["c", "d"], "sequences": {}}
    _opened(_config(files, tmp_path / "shared", **wide))
    for changes in ({"dense": ["q", "x"]}, {"sparse": ["d"], "label": "y2", "time": "t"}):
        _alike(files, tmp_path, **wide | changes)
    assert _own_bytes(tmp_path / "shared") < 70_000 * 10


def test_a_job_that_continues_a_model_reads_fewer_columns_as_that_model(
    files: tuple[str, Path], tmp_path: Path
) -> None:
    first, _ = _opened(_config(files, tmp_path / "shared"))
    fitted = json.loads(json.dumps(first.inputs))
    fitted["transform"]["shift_I"][0] = 5.0
    for fewer in ({}, *FEWER[:3]):
        _alike(files, tmp_path, fitted=fitted, **fewer)


def test_fewer_features_of_a_user_leave_the_catalogue_as_it_is(files: tuple[str, Path], tmp_path: Path) -> None:
    def opened(cache: str, **changes: Any) -> Data:
        config = _config(files, tmp_path / cache, label=None, sequences={}, **changes)
        return _opened(config, items=TwoTowerConfig(item=["d"]))[0]

    opened("shared")
    data, own = (opened(cache, sparse=["d"], dense=["x"]) for cache in ("shared", "own"))
    assert _all(data) == _all(own) and data.catalogue is not None and own.catalogue is not None
    assert data.catalogue.values == own.catalogue.values
    assert np.array_equal(data.catalogue.ids_M, own.catalogue.ids_M)


# Entries that cannot be shared


@every(
    "damage",
    [
        lambda file, _: file.write_bytes(file.read_bytes()[:-100]),
        lambda file, _: file.write_bytes(bytes(file.stat().st_size)),
        lambda file, _: file.unlink(),
        lambda file, _: file.chmod(0o666),
        lambda _, meta: meta.write_text(meta.read_text().replace('"dense"', '"sparse"')),
        lambda _, meta: meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 6})),
        None,
    ],
    ids=["truncated", "zeros", "gone", "others can write it", "meta", "version", "of another disk"],
)
def test_a_damaged_or_foreign_entry_is_not_shared(
    files: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path, Path], Any] | None
) -> None:
    def no_link(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    _opened(_config(files, tmp_path / "shared"))
    (file,) = (tmp_path / "shared").glob("*/train.arrow")
    with monkeypatch.context() as patch:
        if damage is None:
            patch.setattr(os, "link", no_link)
        else:
            damage(file, file.with_name("meta.json"))
        assert _alike(files, tmp_path, dense=DENSE[1:])
    assert len(_opened(_config(files, tmp_path / "shared"))[0].train) == ROWS["train"]


def test_a_full_disk_is_an_error_of_a_line_and_the_next_job_is_right(files: tuple[str, Path], tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {"dense": DENSE[1:]}, {"label": "y2"}, {"label": "y2", "weight": "w"}]):
        with full_disk(), pytest.raises(DataError) as caught:
            _opened(_config(files, tmp_path / "shared", **changes))
        assert "the cache cannot be written (" in str(caught.value) and "\n" not in str(caught.value)
        assert len(list((tmp_path / "shared").glob("[!.]*"))) == number and not list((tmp_path / "shared").glob(".*/"))
        _alike(files, tmp_path, **changes)


@every("label", ["y", "y2"])
def test_a_file_that_several_entries_share_is_written_again_for_each_when_it_is_cut(
    files: tuple[str, Path], tmp_path: Path, label: str
) -> None:
    configs = [_config(files, tmp_path / "shared", **changes) for changes in ({}, {"dense": DENSE[1:], "label": label})]
    before = [_all(_opened(config)[0]) for config in configs]
    file = next((tmp_path / "shared").glob("*/train.arrow"))
    assert file.stat().st_nlink == 2
    os.truncate(file, file.stat().st_size // 2)
    assert [_all(_opened(config)[0]) for config in configs] == before
    assert all(not _opened(config)[1] for config in configs)


def test_evaluation_rows_are_stored_as_other_training_rows_decide(tmp_path: Path) -> None:
    files = {"e.csv": "x,z,y\n1e9,1,0\n2e9,2,1\n"}
    files |= {f"{name}.csv": f"x,z,y\n{x},0,0\n{x + 2},5,1\n" for name, x in (("a", 1), ("b", 10**9))}

    def of(name: str, dense: list[str], cache: str) -> Data:
        return opened(tmp_path, files, train=f"{name}.csv", eval="e.csv", cache=cache, dense=dense, scale=None)

    of("a", ["x", "z"], "shared")
    assert _all(of("b", ["x"], "shared")) == _all(of("b", ["x"], "own"))


def test_an_entry_stays_whole_when_the_one_it_shares_with_goes(files: tuple[str, Path], tmp_path: Path) -> None:
    shared, changes = tmp_path / "shared", {"dense": DENSE[1:], "label": "y2"}
    _opened(_config(files, shared))
    (first,) = (path for path in shared.iterdir() if path.is_dir())
    before = _all(_opened(_config(files, shared, **changes))[0])
    for path in (*first.iterdir(), first):
        path.rmdir() if path.is_dir() else path.unlink()
    data, told = _opened(_config(files, shared, **changes))
    assert _all(data) == before and not told
    for label in ("y2", "y"):  # in a file beside the others
        _alike(files, tmp_path, dense=DENSE[2:], label=label)
    assert _all(_opened(_config(files, shared, **changes))[0]) == before


def test_jobs_that_begin_at_once_see_what_each_alone_would(files: tuple[str, Path], tmp_path: Path) -> None:
    changes = [{}, *({"label": label, "dense": DENSE[n:]} for n in (1, 2) for label in ("y", "y2"))]
    expected = [_all(_opened(_config(files, tmp_path / f"own{n}", **c))[0]) for n, c in enumerate(changes)]
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda n: _all(_opened(_config(files, tmp_path / "shared", **changes[n % 5]))[0]), range(10))
        assert [expected[n % 5] for n in range(10)] == list(found)
    assert len(list((tmp_path / "shared").glob("*/meta.json"))) == 5
