"""Jobs of real processes with a frozen table of pretrained rows and tables with compression of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.placement import BUCKETS
from tests.support.chaos import SHORT, SHORT_STEPS, completed
from tests.support.cluster import Cluster, gone, within
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(600)]
IDS = np.arange(0, 3000, 2)
ROWS = np.random.default_rng(0).normal(scale=0.1, size=(IDS.size, 8)).astype(np.float32)
SETTINGS: dict[str, Any] = {
    **SHORT,
    "checkpoint": {"every_steps": 30, "full_every": 3, "keep": 3},
    "compression": {"ids": "coded", "push": {"values": "int4", "pool_rows": 2000, "second_moment": True}},
    "tables": {
        "default": {"dim": 8},
        "C1": {"compression": {"push": {"values": "fp32"}}},
        "C2": {"compression": {"push": {"keep_rows": 0.1, "rounding": "stochastic"}, "pull": {"values": "int8"}}},
        "C3": {"freeze": True, "init": {"name": "file", "path": "rows.parquet"}},
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    rows = pa.array(list(ROWS), pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": IDS, "row": rows}), tmp_path / "rows.parquet")
    with Cluster(tmp_path) as cluster:
        yield cluster


def check_frozen(folder: Path) -> None:
    """The rows of C3 in the last checkpoint are those of the file, to the last bit."""
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None and last.step == SHORT_STEPS
    blocks = list(stream_rows(last, "C3", [(0, BUCKETS)]))
    ids_N, rows_ND = np.concatenate([b.ids_N for b in blocks]), np.concatenate([b.rows_ND for b in blocks])
    order = np.argsort(ids_N)
    assert np.array_equal(ids_N[order], IDS) and np.array_equal(rows_ND[order], ROWS)


@pytest.mark.slow
def test_kills_a_resumed_run_and_other_numbers_of_servers_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    whole = completed(*cluster.job(SETTINGS, name="whole"), steps=SHORT_STEPS)
    check_frozen(tmp_path / "whole")
    assert {table["name"]: table["rows"] for table in whole["tables"]}["C3"] == IDS.size
    assert whole["bytes"]["push"]["moments"] > 0
    job, folder = cluster.job({**SETTINGS, "servers": 3}, name="killed")
    assert not play(job, folder, [Fault.kill("server 0", at=20)], limit_s=200.0)
    found = Checkpoints(folder.path / "checkpoints")
    within(60.0, lambda: len(found.complete()) >= 3, "no third checkpoint", lambda: job.running)
    members = cluster.training(folder)
    for process in (job.process, *members.values()):
        process.send_signal(signal.SIGKILL)
    assert not gone(members.values(), limit_s=90)
    kept = found.latest()
    assert kept is not None and 0 < kept.step < SHORT_STEPS
    ended = cluster.command("train", "--resume", str(folder.path), "--set", "servers=1").end(limit_s=200)
    assert (ended.code, ended.err) == (0, "")
    summary = folder.summary() or {}
    assert summary["state_digest"] == whole["state_digest"] and summary["eval"] == whole["eval"]
    check_frozen(folder.path)


@pytest.mark.slow
def test_a_job_in_one_process_keeps_frozen_rows_too(cluster: Cluster, tmp_path: Path) -> None:
    train = {**SETTINGS["train"], "batch_size": 100}
    config = {**SETTINGS, "servers": 0, "workers": 1, "train": train}
    summary = completed(*cluster.job(config, name="alone"), steps=SHORT_STEPS)
    check_frozen(tmp_path / "alone")
    served = completed(*cluster.job({**config, "servers": 2}, name="served"), steps=SHORT_STEPS)
    assert summary["state_digest"] == served["state_digest"]
