"""`shardkeep node` on hosts: the first machine is cut off, and lives on beside the one that replaces it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkeep.base.exit_codes import START_AGAIN
from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.reader import RunReader
from tests.support.cluster import records, stalled, within
from tests.support.golden import Golden
from tests.support.hosts import Host, hosts, missing, worker_on
from tests.support.import_path import IMPORT_PATH

REASON = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
LIMIT_S = 200.0


class Nodes:
    """Machines of one job, and an engine that starts what ends with 143 again. Leaves none behind a `with`."""

    def __init__(self, shared: Path, golden: Golden) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.config, self.run = shared / "job.yaml", RunReader(shared / "run")
        liveness = {"lease_s": 30.0, "step_timeout_s": 30.0}
        self.config.write_text(write_yaml({**golden.config, "profile": {}, "liveness": liveness}))

    def start(self, host: Host, rank: int) -> subprocess.Popen[bytes]:
        place = ("--run-dir", self.run.path, "--rank", str(rank), "--nodes", "2", "--advertise", host.address)
        command = (sys.executable, "-m", "shardkeep", "node", self.config, *place, "--insecure-data-plane")
        with self.log(host).open("ab") as errors:
            env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
            self._started.append(subprocess.Popen([*host.prefix, *command], stderr=errors, env=env))
        return self._started[-1]

    def log(self, host: Host) -> Path:
        return self.config.with_name(f"{host.name}.err")

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for log in sorted(self.config.parent.glob("*.err")):
            print(f"---- {log.name}\n{log.read_text()}")


def test_of_two_first_machines_one_leads_and_no_step_is_applied_twice(golden: Golden) -> None:
    with hosts(3) as (cut, other, new), Nodes(cut.shared, golden) as nodes:
        first, second = nodes.start(cut, 0), nodes.start(other, 1)
        trains = lambda: "progress" in {record["kind"] for record in records(nodes.run)}  # noqa: E731
        within(LIMIT_S, trains, "no step", lambda: first.poll() is None)
        with stalled(worker_on(other, nodes.run)):  # or the job might end first
            cut.cut()
        replacement = nodes.start(new, 0)
        assert second.wait(LIMIT_S) == 0, "it starts its roles again, without an engine"
        while (code := replacement.wait(LIMIT_S)) == START_AGAIN:
            replacement = nodes.start(new, 0)
        assert code == 0
        assert first.wait(LIMIT_S) == 0 and "another coordinator leads the job" in nodes.log(cut).read_text()
        assert not cut.pids
        summary = nodes.run.summary() or {}
        assert (summary["status"], summary["state_digest"]) == ("completed", golden.summary["state_digest"])
        assert len(list(nodes.run.path.glob("summary.*.json"))) == 1
        told = [record["text"] for record in records(nodes.run) if record.get("phase") == "journal"]
        assert [text.split(":")[0] for text in told] == ["fsync"], "both hosts see the run folder"
        assert [recovery["lost_steps"] for recovery in summary["recoveries"]] == [0] * len(summary["recoveries"])
        servers = [process for process in summary["processes"] if process["role"] == "server"]
        assert [server["applied_steps"] for server in servers] == [summary["steps"]] * 2
