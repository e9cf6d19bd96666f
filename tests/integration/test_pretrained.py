"""Tables that begin with the rows of a file, in `sync`: the same bits for any number of servers and through deaths."""

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
from tests.support.chaos import SHORT, SHORT_STEPS
from tests.support.cluster import Cluster, Command, RunFolder
from tests.support.faults import Fault, play

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.slow, pytest.mark.timeout(600)]


STRANGERS = np.arange(10**6, 10**6 + 500)
"""Ids that are not in the data: no push changes their rows."""
IDS = np.concatenate([np.arange(0, 3000, 2), STRANGERS])
ROWS = np.random.default_rng(0).normal(scale=0.1, size=(IDS.size, 16)).astype(np.float32)


def ended(job: Command, folder: RunFolder) -> dict[str, Any]:
    done = job.end(limit_s=200)
    assert (done.code, done.err) == (0, ""), job.printed()
    return folder.summary() or {}


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job whose table C3 begins with the rows of a file."""
    rows = pa.array(list(ROWS), pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": IDS, "row": rows}), folder / "rows.parquet")
    tables = {"C3": {"init": {"name": "file", "path": "rows.parquet"}}}
    return {**SHORT, "tables": tables, "checkpoint": {"every_steps": 1000}, **changes}


def test_deaths_before_the_first_checkpoint_and_other_servers_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole = ended(*cluster.job(config, name="whole"))
    assert ended(*cluster.job({**config, "servers": 1}, name="one server"))["state_digest"] == whole["state_digest"]
    job, folder = cluster.job({**config, "servers": 3}, name="disturbed")
    faults = [
        Fault.kill("server 0", at=40),
        Fault.kill("coordinator 0", at=80),
        Fault.kill("worker 0", "worker 1", "server 1", at=140),
    ]
    assert not play(job, folder, faults, limit_s=200)
    (tmp_path / "rows.parquet").unlink()  # nothing needs it any more
    assert ended(job, folder)["state_digest"] == whole["state_digest"]
    for name in ("whole", "disturbed"):
        last = Checkpoints(tmp_path / name / "checkpoints").latest()
        assert last is not None and last.step == SHORT_STEPS
        (block,) = stream_rows(last, "C3", [(0, BUCKETS)])
        untouched = np.isin(block.ids_N, STRANGERS)
        assert untouched.sum() == STRANGERS.size and block.ids_N.size > 2000
        order = np.argsort(block.ids_N[untouched])
        assert np.array_equal(block.rows_ND[untouched][order], ROWS[-STRANGERS.size :])


def test_roles_that_are_started_by_hand_begin_with_the_same_rows(cluster: Cluster, tmp_path: Path) -> None:
    config = config_of(tmp_path, servers=1, workers=1)
    whole = ended(*cluster.job(config, name="launched"))
    coordinator, address, folder = cluster.coordinator(config, name="by hand")
    roles = [cluster.role(role, 0, address) for role in ("server", "worker")]
    for command in (*roles, coordinator):
        assert command.end(limit_s=200).code == 0, command.printed()
    assert (folder.summary() or {})["state_digest"] == whole["state_digest"]
