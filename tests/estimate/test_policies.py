"""The estimate of tables with policies: ids that get a row, ids that are only counted, capacities."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardkeep.config import JobConfig
from shardkeep.estimate.dry_run import Seen, TableRows
from shardkeep.estimate.estimate import estimate, memory_of, table_bytes
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.embeddings.plan import Planner
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.one_table import OneTable


def rows_of(steps: list[np.ndarray], admit: AdmitConfig | None, *, passes: int = 1) -> TableRows:
    table = TableSpec(name="t", dim=4, admit=admit)
    planner, seen = (
        Planner(Schema((), (Feature("f", "t"),)), Catalog([table])),
        Seen([table], passes=passes),
    )
    for ids_N in steps:
        size = ids_N.size
        batch = Batch(np.zeros((size, 0), np.float32), {"f": Ragged(ids_N)}, np.zeros((size, 1), np.float32))
        seen.add([planner.plan(batch)])
    return seen.rows(1)["t"]


def steps_of(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [(random.random(1000) ** 4 * 200_000).astype(np.int64) for _ in range(count)]


@every("passes", [1, 2])
def test_ids_below_the_bar_of_pushes_get_no_row(passes: int) -> None:
    steps = steps_of(64)
    pushes = Counter(int(i) for ids_N in steps for i in np.unique(ids_N))
    found = rows_of(steps, AdmitConfig(min_count=3), passes=passes)
    rows = sum(count * passes >= 3 for count in pushes.values())
    assert 0 < rows < len(pushes)
    assert found.rows == rows and found.candidates == len(pushes) - rows


def test_rows_by_chance_are_as_many_as_their_pushes_let_expect() -> None:
    steps = steps_of(64)
    pushes = Counter(int(i) for ids_N in steps for i in np.unique(ids_N))
    expected = sum(1 - 0.7**count for count in pushes.values())
    assert rows_of(steps, AdmitConfig(probability=0.3)).rows == pytest.approx(expected)


def test_a_table_has_no_more_rows_than_its_capacity() -> None:
    tables = [
        TableSpec(name="a", dim=4, evict=EvictConfig(max_rows=262_144)),
        TableSpec(name="b", dim=4, evict=EvictConfig(max_bytes=30_000_000)),
        TableSpec(name="c", dim=4),
    ]
    rows = dict.fromkeys("abc", TableRows(5e6, np.array([0.5, 0.5])))
    found = {table["name"]: table for table in memory_of(tables, rows)["tables"]}
    assert found["a"]["rows"] == found["a"]["capacity"] == 262_144
    assert found["b"]["rows"] == found["b"]["capacity"] and 25e6 < found["b"]["bytes"] < 36e6
    assert found["c"]["rows"] == 5_000_000 and "capacity" not in found["c"]


def test_counters_and_counted_ids_are_in_the_bytes_of_a_table() -> None:
    plain, spec = (TableSpec(name="t", dim=5, evict=evict) for evict in (None, EvictConfig(ttl_steps=9)))
    assert table_bytes(spec, 100_000)["counters"] == 800_000 and "counters" not in table_bytes(plain, 100_000)
    assert table_bytes(spec, 100_000)["bytes"] - table_bytes(plain, 100_000)["bytes"] == pytest.approx(8e5, abs=5000)
    ids = np.arange(70_000, dtype=np.int64)
    table = OneTable(spec, seed=1)
    for part in np.array_split(ids, 70):
        table.apply(part, np.ones((part.size, 5), np.float32), step=0)
    assert table_bytes(spec, 70_000)["bytes"] == pytest.approx(table.size_bytes, rel=0.15)


def test_the_rows_and_counted_ids_are_those_of_a_job() -> None:
    job: dict[str, Any] = {
        "seed": 3,
        "servers": 2,
        "workers": 1,
        "consistency": {"mode": "sync"},
        "data": {
            "synthetic": {"train_samples": 4100, "eval_samples": 100, "num_dense": 3, "table_sizes": [50, 900, 90_000]}
        },
        "model": {"bottom": [8], "hidden": [8]},
        "tables": {"default": {"dim": 8, "evict": {"ttl_steps": 1000}}, "C3": {"admit": {"min_count": 2}}},
        "tower": {"compile": "off"},
        "train": {"batch_size": 64},
    }
    config = JobConfig.model_validate(job)
    found = {table["name"]: table for table in estimate(config, gbit_per_s=1.0)["tables"]}
    summary = LocalJob(config, open_data(config.data, seed=config.seed)).run()
    for table in summary["tables"]:
        told = found[table["name"]]
        assert told["rows"] == table["rows"] and told.get("candidates") == table.get("candidates")
    assert found["C3"]["candidates"] > 100
