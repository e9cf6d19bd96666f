"""Jobs in sync with all features that keep a state of their own: whoever dies, they end as undisturbed ones.

Each job has several features at once. Take the state of one of them out of recovery, and a digest differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.placement import BUCKETS
from tests.support.chaos import JOB, JOB as REPLICATED, causes, hurt_job
from tests.support.cluster import Cluster
from tests.support.golden import STEPS
from tests.support.hurt import Hurt, in_turn
from tests.support.records import records_in

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
IDS = np.arange(0, 3000, 2)
ROWS = np.random.default_rng(0).normal(scale=0.1, size=(IDS.size, 8)).astype(np.float32)
SERVERS = in_turn(
    Hurt("server 1", "push received", 50),
    Hurt("server 0", "applied", 20, "SIGSTOP"),
    Hurt("coordinator 0", "progress", 3),
    Hurt("server 1", "snapshotting", 2, companions=("server 0",)),
)
SERVERS_AGAIN = in_turn(
    Hurt("server 2", "push staged", 50),
    Hurt("server 0", "rows ready", 40, "SIGSTOP"),
    Hurt("server 1", "push received", 40, "SIGTERM"),
    Hurt("server 2", "applied", 20, companions=("coordinator 0",)),
)
WORKERS = in_turn(
    Hurt("worker 1", "pushing", 50),
    Hurt("worker 0", "pull sent", 40, companions=("worker 1", "server 1")),
    Hurt("worker 1", "forming"),
    Hurt("worker 0", "pushing", 40, "SIGTERM"),
)


def write_rows(folder: Path) -> str:
    rows = pa.array(list(ROWS), pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": IDS, "row": rows}), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def whole_and_hurt(
    cluster: Cluster, config: dict[str, Any], first: list[Hurt], second: list[Hurt], *arguments: str, steps: int = STEPS
) -> list[dict[str, Any]]:
    """The summaries of a job, and of two that are hurt, the last with three servers. All have the same model."""
    jobs = {"whole": (config, []), "hurt": (config, first), "of three": ({**config, "servers": 3}, second)}
    found = [hurt_job(cluster, job, hurts, *arguments, name=name, steps=steps) for name, (job, hurts) in jobs.items()]
    assert len({summary["state_digest"] for summary in found}) == 1
    whole, *hurt = found
    assert all(summary["eval"] == whole["eval"] for summary in hurt)
    assert all(len(summary["recoveries"]) >= 2 for summary in hurt)
    assert "left on SIGTERM" in causes(hurt[1])
    return found


@pytest.mark.group("recovery: compression")
@pytest.mark.slow
def test_compressed_gradients_and_frozen_rows_outlive_deaths_of_servers(cluster: Cluster, tmp_path: Path) -> None:
    """Residual pool, second moments, coded ids, the example of PowerSGD, settings of single tables. What a
    worker has not sent dies with it."""
    compression = {
        "ids": "coded",
        "push": {"values": "int4", "keep": 0.3, "pool_rows": 3000, "second_moment": True},
        "pull": {"values": "int8"},
        "tower": {"name": "shardkeep.examples.compression.powersgd_adaptive:AdaptivePowerSGD"},
    }
    tables = {
        "default": {"dim": 8},
        "C1": {"compression": "none"},
        "C2": {"compression": "balanced"},
        "C3": {"freeze": True, "init": {"name": "file", "path": write_rows(tmp_path)}},
    }
    checkpoint = {"every_steps": 30, "full_every": 3, "keep": 3}
    config = {**JOB, "compression": compression, "tables": tables, "checkpoint": checkpoint}
    whole, *_ = whole_and_hurt(cluster, config, SERVERS, SERVERS_AGAIN)
    assert whole["bytes"]["push"]["moments"] > 0 and whole["bytes"]["tower"]["values"] > 0
    assert {table["name"]: table["rows"] for table in whole["tables"]}["C3"] == IDS.size
    ids_N, rows_ND = rows_at_end(tmp_path / "of three", "C3")
    assert np.array_equal(ids_N, IDS) and np.array_equal(rows_ND, ROWS), "frozen rows are those of the file"


@pytest.mark.group("recovery: policies")
@pytest.mark.slow
def test_policies_packed_rows_and_scores_of_the_stream_outlive_deaths(cluster: Cluster, tmp_path: Path) -> None:
    """Admission, eviction, rows of int8 and fp16 with a state of bf16, progressive validation, increments, the example
    of a lossless tower."""
    tables = {
        "default": {"dim": 8, "dtype": "int8", "evict": {"ttl_steps": 2, "sweep_steps": 3}},
        "C1": {"admit": {"min_count": 2, "window_steps": 5}},
        "C2": {
            "dtype": "fp16",
            "optimizer": "adam",
            "state_dtype": "bf16",
            "admit": {"min_count": 3},
            "evict": {"ttl_steps": 4, "decay": 0.8, "decay_steps": 2, "sweep_steps": 4, "max_rows": 262_144},
        },
    }
    config = {
        **JOB,
        "train": {**JOB["train"], "order": "time"},
        "eval": {"every_steps": 40},
        "checkpoint": {"every_steps": 25, "full_every": 4},
        "tables": tables,
        "compression": {"tower": "shardkeep.examples.compression.lossless:Lossless"},
    }
    points = {"rows go": 20, "rows gone": 20, "writing removed": 2}
    sweeps = [Hurt("server 1", point, times) for point, times in points.items()]
    whole, *hurt = whole_and_hurt(cluster, config, in_turn(*sweeps, *SERVERS[1:]), WORKERS)
    figures = {table["name"]: table for table in whole["tables"]}
    assert all(table["evicted_rows"] > 50 for table in figures.values()), figures
    assert figures["C1"]["refused_rows"] > 50 and figures["C1"]["candidates"] > 0
    assert figures["C2"]["refused_rows"] > 50 and figures["C2"]["admitted_rows"] > 50
    assert whole["progressive"]["samples"] == whole["samples"] and whole["progressive"]["auc"] > 0.5
    for name, summary in zip(("hurt", "of three"), hurt, strict=True):
        assert summary["progressive"] == whole["progressive"]
        records = [r for r in records_in(tmp_path / name / "metrics.jsonl") if r.get("phase") == "progressive"]
        by_step = {r["step"]: r["samples"] for r in records}  # one may die with the worker that reports it
        assert 3 <= len(by_step) <= 5 and set(by_step.values()) == {40 * 100}
        same = [[{**t, "bytes": 0, "load_factor": 0} for t in one["tables"]] for one in (summary, whole)]
        assert same[0] == same[1]


@pytest.mark.group("recovery: warm start")
@pytest.mark.slow
def test_a_warm_start_whole_decay_early_stopping_and_a_norm_outlive_deaths_before_any_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Nothing but what the job began with is in a checkpoint: the rows of another run, some of them of a file."""
    tables = {
        "default": {"dim": 8, "optimizer": {"name": "adam", "weight_decay": 1e-3, "weight_decay_on": "table"}},
        "C3": {"init": {"name": "file", "path": write_rows(tmp_path)}},
    }
    model = {**JOB["model"], "norm": "batch", "activation": "dice"}
    config = {**JOB, "model": model, "tables": tables, "checkpoint": {"every_steps": 1000}}
    before = hurt_job(cluster, {**config, "servers": 1, "seed": 4}, [], name="before")
    stopping = {"metric": "logloss", "patience": 4, "min_delta": 1.0}  # the first evaluation stays the best
    falling = {"metric": "auc", "patience": 2, "min_delta": 1.0, "factor": 0.3}
    config["train"] = {**JOB["train"], "early_stopping": stopping, "plateau": falling}
    config["eval"] = {"every_steps": 30}
    whole, *hurt = whole_and_hurt(
        cluster, config, SERVERS[:3], WORKERS, "--from", str(tmp_path / "before"), steps=30 * 5
    )
    assert whole["state_digest"] != before["state_digest"] and whole["best"]["step"] == 30
    for summary, name in zip(hurt, ("hurt", "of three"), strict=True):
        assert summary["best"] == whole["best"]
        records = records_in(tmp_path / name / "metrics.jsonl")
        assert {r["lr_factor"] for r in records if r.get("phase") == "plateau"} == {0.3, 0.09}
    ids_N, _ = rows_at_end(tmp_path / "of three", "C3")
    assert set(IDS.tolist()) <= set(ids_N.tolist())


def rows_at_end(run: Path, table: str) -> tuple[np.ndarray, np.ndarray]:
    last = Checkpoints(run / "checkpoints").latest()
    assert last is not None
    blocks = list(stream_rows(last, table, [(0, BUCKETS)]))
    ids_N, rows_ND = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("ids_N", "rows_ND"))
    order = np.argsort(ids_N)
    return ids_N[order], rows_ND[order]


# ---- jobs whose tower is in shards ----


SHARDED: dict[str, Any] = {
    **REPLICATED,
    "model": {"bottom": [8], "hidden": [300, 260]},
    "tower": {**REPLICATED["tower"], "parallel": "fsdp"},
    "consistency": {"mode": "bounded", "staleness": 1},
    "train": {"batch_size": 25, "accumulate": 2, "clip_norm": 1.0, "max_steps": STEPS, "report_every_s": 0.02},
    "eval": {"every_steps": 100},
    "checkpoint": {"every_steps": 40},
}


@pytest.mark.slow
def test_workers_keep_their_parts_when_a_server_dies_and_go_back_to_the_checkpoint_when_one_of_them_dies(
    cluster: Cluster,
) -> None:
    """The server dies while the first evaluation reads, so while no step is under way."""
    hurts = in_turn(Hurt("server 0", "read received", 1), Hurt("worker 1", "pushing", 120))
    summary = hurt_job(cluster, SHARDED, hurts)
    assert 0.55 < summary["eval"]["auc"] <= summary["eval"]["best_auc"]
    kept, *_, back = summary["recoveries"]
    assert (kept["step"], kept["went_back"], kept["lost_steps"]) == (100, False, 0) and "server 0" in kept["cause"]
    assert back["went_back"] and back["step"] in (80, 120, 160) and "worker 1" in causes(summary)
