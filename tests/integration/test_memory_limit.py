"""A server near the limit of its control group warns: in the events of its run, and where `shardkeep status` looks.

The files of control groups are this test's own, in a mount namespace: a group of the kernel would need rights over the
groups of the machine. So the limit is read as always, and nothing enforces it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, records, within
from tests.support.configs import LASTING

pytestmark = [pytest.mark.chaos, pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
NO_NAMESPACE = not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode


@pytest.mark.skipif(bool(NO_NAMESPACE), reason="needs the right to make a mount namespace")
def test_a_server_near_the_limit_of_its_group_warns(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    (groups / "memory").mkdir(parents=True)
    (groups / "memory.max").write_text("60000000\n")  # of version 2
    (groups / "memory" / "memory.limit_in_bytes").write_text("60000000\n")  # of version 1
    script = f'mount --bind {groups} /sys/fs/cgroup && exec "$@"'
    with Cluster(tmp_path) as cluster:
        job, folder = cluster.job(LASTING, prefix=("unshare", "-m", "sh", "-c", script, "sh"))

        def warnings() -> list[dict[str, Any]]:
            return [r for r in records(folder) if r["kind"] == "event" and "memory" in r]

        cluster.training(folder)
        within(60, lambda: bool(warnings()), "no warning", lambda: job.running)
        (warning, *_) = warnings()
        assert warning["text"].startswith("warning: server 0 has ") and " of the limit of 60.0 MB" in warning["text"]
        assert warning["memory"]["near"] and warning["memory"]["bytes"] > 0.9 * 60_000_000
        status = cluster.command("status", str(folder.path)).end()
        assert status.code == 0 and "of the limit of 60.0 MB" in status.out, status.out
