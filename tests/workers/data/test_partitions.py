"""Partitions: folders called KEY=VALUE are columns of the files in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.dataset as pads  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.input_files import find_files
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig

Write = Callable[[pa.Table, Path], None]
FORMS = [
    pytest.param("parquet", pq.write_table, id="parquet"),
    pytest.param("csv", pacsv.write_csv, id="csv"),
]
PLACES = ("dt=2024-05-01/country=DE", "dt=2024-05-01/country=FR", "dt=2024-05-02/country=DE")


def _write(root: Path, form: str, write: Write, places: tuple[str, ...] = PLACES, **columns: Any) -> None:
    """log/PLACE/part-0 in each place: x = 0, 1, then 2, 3, and so on."""
    for p, place in enumerate(places):
        folder = root / "log" / place
        folder.mkdir(parents=True)
        write(pa.table({"x": [2 * p, 2 * p + 1], "y": [0, 1]} | columns), folder / f"part-0.{form}")


def _open(root: Path, form: str, **settings: Any) -> Data:
    base = {"root": str(root), "source": form, "train": ["log"], "label": "y", "dense": ["x"], "scale": "none"}
    return open_data(DataConfig.model_validate(base | settings), seed=0)


def _ids(data: Data, name: str) -> list[int]:
    return data.train.gather(np.arange(len(data.train))).ids[name].values_N.tolist()


def _numbers(data: Data) -> list[list[float]]:
    return data.train.gather(np.arange(len(data.train))).dense_BI.T.tolist()


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_values_of_partitions_are_texts_in_each_row(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write)
    data = _open(tmp_path, form, sparse=["country", "dt"])
    de, fr = hash_text(b"DE"), hash_text(b"FR")
    assert _ids(data, "country") == [de, de, fr, fr, de, de]
    assert _ids(data, "dt") == [hash_text(b"2024-05-01")] * 4 + [hash_text(b"2024-05-02")] * 2
    assert _numbers(data) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_every_role_of_a_column_may_be_one_of_a_partition(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write, ("click=0/price=1.5/w=2", "click=1/price=7/w=1"))
    roles = {"label": "click", "dense": ["price"], "weight": "w", "sparse": ["x"]}
    batch = (data := _open(tmp_path, form, **roles)).train.gather(np.arange(4))
    assert batch.label_BT[:, 0].tolist() == [0, 0, 1, 1] and _numbers(data) == [[1.5, 1.5, 7, 7]]
    assert batch.weight_B is not None and batch.weight_B.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_a_partition_may_hold_the_time(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write, ("dt=2024-05-02", "dt=2024-05-01"))
    assert _numbers(_open(tmp_path, form, train=["log/dt=2024-05-02", "log/dt=2024-05-01"], time="dt")) == [
        [2, 3, 0, 1]
    ]


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_a_column_of_the_file_comes_before_that_of_its_folder(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write, country=["US", "IT"])
    assert _ids(_open(tmp_path, form, sparse=["country"]), "country")[:2] == [hash_text(b"US"), hash_text(b"IT")]


def test_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = ["a/b=c", "50 %", "ä", None]
    table = pa.table({"y": [0, 1, 0, 1], "x": [0, 1, 2, 3], "c d": values})
    by = pads.partitioning(pa.schema([("c d", pa.string())]), flavor="hive")
    pads.write_dataset(table, tmp_path / "log", format="parquet", partitioning=by)
    data = _open(tmp_path, "parquet", sparse=["c d"])
    ids = [MISSING_ID if value is None else hash_text(value.encode()) for value in values]
    assert dict(zip(_numbers(data)[0], _ids(data, "c d"), strict=True)) == dict(enumerate(ids))


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_patterns_lead_to_partitions_too(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write)
    for entries in (["log/**/*.*"], ["log/dt=*"], ["log/dt=2024-05-0[12]"], ["log/*/*/part-0.*"]):
        data = _open(tmp_path, form, train=entries, sparse=["country"])
        assert _numbers(data) == [[0, 1, 2, 3, 4, 5]] and hash_text(b"FR") in _ids(data, "country")


def test_folders_that_are_no_partitions_stay_out(tmp_path: Path) -> None:
    _write(tmp_path, "csv", pacsv.write_csv, ("dt=1", "_delta_log", ".hidden=1", "old", "=1"))
    (tmp_path / "log" / "_SUCCESS").touch()
    (tmp_path / "log" / "dt=2").mkdir()
    found = find_files(tmp_path, ["log"], key="data.train", kind="csv")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["log/dt=1/part-0.csv"]


@pytest.mark.parametrize(("form", "write"), FORMS)
def test_a_file_outside_of_its_partition_lacks_the_column(tmp_path: Path, form: str, write: Write) -> None:
    _write(tmp_path, form, write, ("dt=1", "dt=1/other"))
    with pytest.raises(DataError, match=r"other/part-0.*has no column dt; it has: x, y"):
        _open(tmp_path, form, train=["log/dt=1/other"], sparse=["dt"])


def test_a_link_to_a_partition_has_the_value_of_its_own_name(tmp_path: Path) -> None:
    _write(tmp_path, "csv", pacsv.write_csv, ("c=DE",))
    (tmp_path / "log" / "c=FR").symlink_to(tmp_path / "log" / "c=DE")
    for value in ("DE", "FR"):
        data = _open(tmp_path, "csv", train=[f"log/c={value}"], sparse=["c"], cache="cache")
        assert _ids(data, "c") == [hash_text(value.encode())] * 2
