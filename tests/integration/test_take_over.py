"""A coordinator that is replaced where the files that it kept for that were damaged."""

from __future__ import annotations

import re

import psutil
import pytest

from shardkeep.run.folder import RunFolder
from shardkeep.run.json_files import numbered
from shardkeep.run.state_files import NAMES
from tests.support.cluster import Cluster, records, within
from tests.support.configs import LASTING

pytestmark = pytest.mark.waits_for_processes


def last_step(folder: RunFolder) -> int:
    return max(r["step"] for r in records(folder) if r["kind"] == "progress")


@pytest.mark.slow  # with stand-ins: tests/launch/test_supervised_jobs.py
def test_a_job_outlives_its_coordinator_and_one_damaged_file_but_not_both(cluster: Cluster) -> None:
    job, folder = cluster.job(LASTING)
    first = cluster.training(folder)["coordinator 0"]
    numbered(folder.path, NAMES[0], folder.number()).write_bytes(b"")
    first.kill()
    within(60, lambda: bool(folder.coordinator_pids() - {first.pid}), "no other coordinator", lambda: job.running)
    (second,) = folder.coordinator_pids()
    reached = last_step(folder)
    within(60, lambda: last_step(folder) > reached + 5, "no more steps", lambda: job.running)

    psutil.Process(second).suspend()  # it would write the files again
    for name in NAMES:
        numbered(folder.path, name, folder.number()).unlink()
    psutil.Process(second).kill()
    ended = job.end(limit_s=90)
    assert (ended.code, ended.err.count("\n")) == (1, 1), job.printed()
    assert re.match(
        rf"error: coordinator 0 \(pid {second}\) ended: killed by SIGKILL, last step \d+; no coor", ended.err
    )
    assert f"shardkeep train --resume {folder.path}" in ended.err
