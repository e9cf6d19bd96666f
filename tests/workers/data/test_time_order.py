"""`data.time`: training samples in the order of a column."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

BASE: dict[str, Any] = {"label": "y", "dense": ["x"], "scale": "none", "time": "ts"}


def _opened(folder: Path, lines: list[str], **settings: Any) -> Data:
    (folder / "a.csv").write_text("\n".join(["x,y,ts", *lines]) + "\n")
    return open_data(DataConfig.model_validate(BASE | {"root": str(folder), "train": "a.csv"} | settings), seed=0)


def _order(data: Data) -> list[float]:
    found: list[float] = data.train.gather(np.arange(len(data.train))).dense_BI[:, 0].tolist()
    return found


@every(
    "stamps",
    [
        ["30", "4.5", "200", "4.5"],
        ["2026-03-01", "2025-12-31", "2026-10-01", "2025-12-31"],
        ["2026-01-01 09:00:00", "2026-01-01T08:59:59.5", "2026-01-02", "2026-01-01T08:59:59.5"],
        ["1790000000000000000", "1780000000000000000", "1800000000000000000", "1780000000000000000"],
    ],
    ids=["numbers", "dates", "times", "nanoseconds"],
)
def test_samples_come_by_time_and_equal_times_in_their_order(tmp_path: Path, stamps: list[str]) -> None:
    lines = [f"{x},{x % 2},{stamp}" for x, stamp in enumerate(stamps)]
    assert _order(_opened(tmp_path, lines)) == [1.0, 3.0, 0.0, 2.0]
    assert _order(_opened(tmp_path, lines, time=None)) == [0.0, 1.0, 2.0, 3.0]


def test_the_order_goes_across_chunks_and_files_of_different_units(tmp_path: Path) -> None:
    days = pa.array([dt.date(2026, 5, 2), dt.date(1969, 5, 2), dt.date(2026, 5, 1)])
    pq.write_table(pa.table({"x": [0.0, 1.0, 2.0], "y": [0, 1, 0], "ts": days}), tmp_path / "days.parquet")
    config = DataConfig.model_validate(BASE | {"root": str(tmp_path), "train": "days.parquet"})
    assert _order(open_data(config, seed=0)) == [1.0, 2.0, 0.0]
    start = np.datetime64("2026-01-01T00:00:00", "s")
    rng = np.random.default_rng(0)
    second_N = rng.permutation(80_000)
    for name, part_N, unit in (("a", second_N[:70_000], "ms"), ("b", second_N[70_000:], "ns")):
        times = pa.array((start + part_N).astype(f"datetime64[{unit}]"))
        table = pa.table({"x": pa.array(part_N.astype(np.float32)), "y": pa.array(part_N % 2), "ts": times})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    config = BASE | {"root": str(tmp_path), "train": ["a.parquet", "b.parquet"], "eval_fraction": 0.1}
    data = open_data(DataConfig.model_validate(config), seed=0)
    found = _order(data)
    assert len(found) > 70_000 and found == sorted(found)
    assert data.eval is not None and not set(found) & set(data.eval.gather(np.arange(100)).dense_BI[:, 0].tolist())


def test_evaluation_files_need_no_order_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("x,y,ts\n7,0,2\n8,1,1\n")
    data = _opened(tmp_path, ["0,0,5", "1,1,4"], eval="e.csv")
    assert _order(data) == [1.0, 0.0]
    assert data.eval is not None and data.eval.gather(np.arange(2)).dense_BI[:, 0].tolist() == [7.0, 8.0]


@every(
    ("lines", "settings", "why"),
    [
        (["0,0,5", "1,1,"], {}, r"a.csv, row 2, column ts: the time is missing; allowed: numbers, dates"),
        (["0,0,soon", "1,1,4"], {}, r"row 1, column ts: 'soon' is not a number"),
        (["0,0,5", "1,1,4"], {"time": "when"}, r"has no column when; it has: x, y, ts"),
        ([], {"source": "criteo", "label": None, "dense": []}, r"data.time: has no effect with source: criteo"),
        ([], {"source": "synthetic", "train": [], "label": None, "dense": [], "scale": None},
         r"data.time: has no effect with source: synthetic"),
    ],
)  # fmt: skip
def test_a_time_that_cannot_be_read_is_refused(
    tmp_path: Path, lines: list[str], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=why):
        _opened(tmp_path, lines, **settings)
