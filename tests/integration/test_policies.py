"""Jobs of real processes whose tables admit some ids and let rows go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import RowBlock, stream_rows
from shardkeep.ps.placement import bucket_of
from shardkeep.run.folder import RunFolder
from tests.support.chaos import JOB, SHORT, SHORT_STEPS, completed
from tests.support.cluster import Cluster
from tests.support.faults import Fault, play
from tests.support.hurt import MAIN, Hurt, environment, missed

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
POLICIES: dict[str, Any] = {
    **SHORT,
    "checkpoint": {"every_steps": 25, "full_every": 4},
    "tables": {
        "default": {"dim": 8, "evict": {"ttl_steps": 2, "sweep_steps": 3}},
        "C1": {"admit": {"min_count": 2, "window_steps": 5}},
        "C2": {
            "admit": {"probability": 0.5},
            "evict": {"delete_below": 0.9, "decay": 0.8, "decay_steps": 2, "sweep_steps": 4, "max_rows": 262_144},
        },
    },
}


BUCKETS = 4
CROWD = np.flatnonzero(bucket_of(np.arange(1_200_000)) < BUCKETS)
"""About 290 ids in each of a few placement buckets: more than the 64 of the least capacity."""
POPULAR = CROWD[:20]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Cluster(tmp_path_factory.mktemp("whole")) as cluster:
        return completed(*cluster.job(POLICIES), steps=SHORT_STEPS)


def check_policies(summary: dict[str, Any]) -> None:
    tables = {table["name"]: table for table in summary["tables"]}
    assert all(table["evicted_rows"] > 50 for table in tables.values()), tables
    assert tables["C1"]["refused_rows"] > 50 and tables["C1"]["candidates"] > 0
    assert tables["C2"]["refused_rows"] > 50 and tables["C2"]["admitted_rows"] > 50


@pytest.mark.slow
def test_kills_and_other_numbers_of_servers_change_no_decision(cluster: Cluster, whole: dict[str, Any]) -> None:
    check_policies(whole)
    job, folder = cluster.job(POLICIES, name="killed")
    kills = [Fault.kill("server 0", at=45), Fault.kill("coordinator 0", "worker 1", "server 1", at=120)]
    assert not play(job, folder, kills, limit_s=200.0)
    killed = completed(job, folder, steps=SHORT_STEPS)
    assert len(killed["recoveries"]) >= 2
    assert killed["state_digest"] == whole["state_digest"] and killed["eval"] == whole["eval"]
    for servers in (1, 3):
        other = completed(*cluster.job({**POLICIES, "servers": servers}, name=f"servers-{servers}"), steps=SHORT_STEPS)
        assert other["state_digest"] == whole["state_digest"]
        assert other["tables"] == [
            {**table, "bytes": mine["bytes"], "load_factor": mine["load_factor"]}
            for table, mine in zip(whole["tables"], other["tables"], strict=True)
        ]


def test_a_clock_in_sync_is_refused_in_one_line(cluster: Cluster) -> None:
    job, _ = cluster.job({**POLICIES, "tables": {"default": {"evict": {"ttl_s": 60}}}}, name="wrong")
    ended = job.end()
    assert ended.code == 2 and "tables.default.evict.ttl_s with consistency.mode: sync" in ended.err, ended.err
    assert len(ended.err.strip().splitlines()) == 1 and "Traceback" not in ended.err


# ---- a death in the middle ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [{"rows go": 60, "rows gone": 60}, {"writing removed": 2, "snapshotting": 4}],
    ids=["during a sweep", "during an increment"],
)
def test_a_server_that_dies_meanwhile_changes_no_bit(
    cluster: Cluster, whole: dict[str, Any], tmp_path: Path, points: dict[str, int]
) -> None:
    hurts = [Hurt("server 1", point, times) for point, times in points.items()]
    job, folder = cluster.job(POLICIES, env=environment(tmp_path, hurts), main=MAIN)
    summary = completed(job, folder, steps=SHORT_STEPS)
    assert not missed(tmp_path, hurts)
    assert len(summary["recoveries"]) >= 1
    assert summary["state_digest"] == whole["state_digest"] and summary["eval"] == whole["eval"]
    counts = [[{**table, "bytes": 0} for table in one["tables"]] for one in (summary, whole)]
    assert counts[0] == counts[1]


# ---- modes in which arrival decides ----


def clicks(folder: Path, users: np.ndarray) -> dict[str, Any]:
    """The data of a job: a sample for each user, with one that is always popular."""
    rng, columns = np.random.default_rng(5), {}
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


def arrival(folder: Path, mode: str, users: np.ndarray, table: dict[str, Any]) -> dict[str, Any]:
    return {
        **JOB,  # all of the data: SHORT_STEPS
        "data": clicks(folder, users),
        "model": {**JOB["model"], "dropout": 0.0},
        "train": {**JOB["train"], "order": "stored"},
        "consistency": {"mode": mode},
        "checkpoint": {"every_steps": 60, "full_every": 3},
        "tables": {"default": {"dim": 4}, "user": table},
    }


def killed(cluster: Cluster, config: dict[str, Any], *faults: Fault) -> tuple[dict[str, Any], RunFolder]:
    job, folder = cluster.job(config)
    assert not play(job, folder, faults, limit_s=200.0)
    return completed(job, folder, steps=SHORT_STEPS), folder


def rows_at_end(folder: RunFolder) -> RowBlock:
    checkpoint = Checkpoints(folder.path / "checkpoints").latest()
    assert checkpoint is not None and checkpoint.step == SHORT_STEPS
    blocks = list(stream_rows(checkpoint, "user", counters=True))
    return RowBlock(*(np.concatenate(each) for each in zip(*blocks, strict=True)))


KILLS = [Fault.kill("server 0", at=45), Fault.kill("worker 1", at=90), Fault.kill("server 1", "coordinator 0", at=135)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_in_bounded_a_table_stays_within_its_capacity_whoever_dies(
    cluster: Cluster, tmp_path: Path, policy: str
) -> None:
    users = np.random.default_rng(7).choice(CROWD, 100 * SHORT_STEPS)
    table = {"admit": {"min_count": 2}, "evict": {"max_rows": 262_144, "policy": policy}}
    summary, folder = killed(cluster, arrival(tmp_path, "bounded", users, table), *KILLS)
    assert len(summary["recoveries"]) >= 3
    (figures,) = summary["tables"]
    assert figures["evicted_rows"] > 500 and figures["refused_rows"] > 500 and figures["candidates"] > 0
    rows = rows_at_end(folder)
    assert figures["rows"] == figures["admitted_rows"] - figures["evicted_rows"]
    in_bucket = np.bincount(bucket_of(rows.ids_N), minlength=BUCKETS)
    # The last pushes may add rows, and no step comes after them.
    assert in_bucket.size == BUCKETS and in_bucket.max() < 64 + 40 and in_bucket.min() >= 64 - 64 // 8
    assert rows.ids_N.size == figures["rows"] and set(rows.ids_N.tolist()) <= set(CROWD.tolist())
    assert np.isfinite(rows.rows_ND).all() and np.isfinite(rows.slots_NS).all()
    assert set(POPULAR.tolist()) <= set(rows.ids_N.tolist())  # pushed in every step, so never the lowest


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_rows_go_by_the_clock_whoever_dies(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """The ids of the first tenth come no more; the job takes seconds, and more for its recoveries."""
    users = np.random.default_rng(7).choice(CROWD[-200:], 100 * SHORT_STEPS)
    users[: 10 * SHORT_STEPS] = np.random.default_rng(8).choice(CROWD[20:520], 10 * SHORT_STEPS)
    config = arrival(tmp_path, mode, users, {"evict": {"ttl_s": 1.0, "sweep_steps": 4}})
    summary, folder = killed(cluster, config, *KILLS)
    (figures,) = summary["tables"]
    rows = rows_at_end(folder)
    assert figures["evicted_rows"] >= 400 and figures["rows"] == rows.ids_N.size
    assert not set(rows.ids_N.tolist()) & set(CROWD[20:520].tolist())
    assert set(POPULAR.tolist()) <= set(rows.ids_N.tolist())
    assert rows.counters_NC[:, 0].min() > 1_700_000_000  # seconds, not steps
