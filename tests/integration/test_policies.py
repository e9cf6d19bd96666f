"""Tables that admit some ids and let rows go, in modes in which arrival or the clock decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import RowBlock, stream_rows
from shardkeep.ps.placement import bucket_of
from shardkeep.ps.server import tables
from tests.support.cases import every
from tests.support.chaos import JOB, hurt_job
from tests.support.cluster import Cluster
from tests.support.golden import STEPS
from tests.support.hurt import Hurt, in_turn

BUCKETS = 4
CROWD = np.flatnonzero(bucket_of(np.arange(1_200_000)) < BUCKETS)
"""About 290 ids in each of a few placement buckets: more than the 64 of the least capacity."""
POPULAR = CROWD[:20]


@every("mode", ["bounded", "async"])
def test_rows_go_by_the_clock(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Whatever the steps: row 1 is 16 s old in the end, row 2 is 8 s old."""
    now = 1_700_000_000.0
    monkeypatch.setattr(tables, "time", SimpleNamespace(time=lambda: now))
    spec = TableSpec(name="user", dim=2, evict={"ttl_s": 10.0, "sweep_steps": 1})

    def push(client: EmbeddingClient, *ids: int) -> None:
        rows = client.lookup({"user": torch.tensor(ids)})
        rows["user"].sum().backward()
        client.apply(rows)

    with EmbeddingClient.local([spec], consistency=mode) as client:
        ids = {"user": torch.tensor([1, 2, 3])}
        initial = client.read(ids)["user"]
        for step in range(30):
            push(client, *([1, 2] if step < 10 else [2, 3] if step < 20 else [3]))
            now += 8.0 if step in (9, 19) else 0.0
        (figures,) = client.summary()["tables"]
        assert (figures["rows"], figures["evicted_rows"]) == (2, 1)
        same = (client.read(ids)["user"] == initial).all(dim=1)
        assert same.tolist() == [True, False, False], "a row that went is initial again"


def clicks(folder: Path, users: np.ndarray) -> dict[str, Any]:
    """The data of a job: a sample for each user, with one that is always popular."""
    rng = np.random.default_rng(5)
    for name, user_N in (("train", users), ("eval", users[-500:])):
        columns = {
            "user": user_N.astype(np.int64),
            "friend": rng.choice(POPULAR, user_N.size),
            "price": rng.normal(size=user_N.size).astype(np.float32),
            "clicked": rng.integers(0, 2, user_N.size),
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    sparse = ["user", {"column": "friend", "table": "user"}]
    files = {"train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet")}
    return {**files, "label": "clicked", "dense": ["price"], "sparse": sparse}


@pytest.mark.chaos
@pytest.mark.waits_for_processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_in_bounded_a_table_stays_within_its_capacity_whoever_dies(
    cluster: Cluster, tmp_path: Path, policy: str
) -> None:
    users = np.random.default_rng(7).choice(CROWD, 100 * STEPS)
    config = {
        **JOB,
        "data": clicks(tmp_path, users),
        "model": {**JOB["model"], "dropout": 0.0},
        "train": {**JOB["train"], "order": "stored"},
        "consistency": {"mode": "bounded"},
        "checkpoint": {"every_steps": 60, "full_every": 3},
        "tables": {
            "default": {"dim": 4},
            "user": {"admit": {"min_count": 2}, "evict": {"max_rows": 262_144, "policy": policy}},
        },
    }
    kills = in_turn(
        Hurt("server 0", "push received", 90),
        Hurt("worker 1", "pushing", 90),
        Hurt("server 1", "push received", 90, companions=("coordinator 0",)),
    )
    summary = hurt_job(cluster, config, kills)
    assert len(summary["recoveries"]) >= 3
    (figures,) = summary["tables"]
    assert figures["evicted_rows"] > 500 and figures["refused_rows"] > 500 and figures["candidates"] > 0
    rows = rows_at_end(tmp_path / "hurt")
    assert figures["rows"] == figures["admitted_rows"] - figures["evicted_rows"]
    in_bucket = np.bincount(bucket_of(rows.ids_N), minlength=BUCKETS)
    # The last pushes may add rows, and no step comes after them.
    assert in_bucket.size == BUCKETS and in_bucket.max() < 64 + 40 and in_bucket.min() >= 64 - 64 // 8
    assert rows.ids_N.size == figures["rows"] and set(rows.ids_N.tolist()) <= set(CROWD.tolist())
    assert np.isfinite(rows.rows_ND).all() and np.isfinite(rows.slots_NS).all()
    assert set(POPULAR.tolist()) <= set(rows.ids_N.tolist())  # pushed in every step, so never the lowest


def rows_at_end(run: Path) -> RowBlock:
    checkpoint = Checkpoints(run / "checkpoints").latest()
    assert checkpoint is not None and checkpoint.step == STEPS
    blocks = list(stream_rows(checkpoint, "user", counters=True))
    return RowBlock(*(np.concatenate(each) for each in zip(*blocks, strict=True)))
