"""A real Prometheus scrapes a real job whose server and coordinator are killed. No panel of the dashboard is empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.metrics.names import METRICS, series_names
from tests.support.cluster import Cluster, Command
from tests.support.configs import TINY, TRAIN
from tests.support.http_get import get
from tests.support.prometheus import PROGRAM, Prometheus
from tests.support.reserved import reserved_address

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="prometheus: make test LONG=1"),
]
MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
JOB: dict[str, Any] = {
    **TINY,
    "name": "watched",
    "train": {**TRAIN, "epochs": 100_000},
    "eval": {"every_steps": 200},
    "checkpoint": {"every_steps": 150},
    "compression": {"push": {"keep_rows": 0.25}},
    "tables": {"C2": {"admit": {"min_count": 3}, "evict": {"ttl_steps": 200}}},
    "telemetry": {"every_s": 1.0},
}
PROCESSES = 5
RATE = "20s"
"""In place of Grafana's $__rate_interval, which is four times the scrape interval and at least its own step."""


def panels() -> dict[str, str]:
    """Each expression of the dashboard, by its panel's title and its own place."""
    board = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", RATE).replace("$run", ".*")
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def addresses(job: Command) -> tuple[str, Path]:
    """The URL of the targets and the file with the view token, as the screen of `shardkeep train` has them."""
    line = job.line("metrics ")
    found = re.search(r"all processes (http://\S+/sd); the token is in (\S+)", line)
    assert found is not None, line
    return found[1], Path(found[2])


def test_prometheus_finds_every_process_and_fills_every_panel_over_a_recovery(cluster: Cluster, tmp_path: Path) -> None:
    with reserved_address() as address:  # a coordinator that replaces another needs the same one
        check_over_a_recovery(cluster, tmp_path, address)


def check_over_a_recovery(cluster: Cluster, tmp_path: Path, address: str) -> None:
    job, folder = cluster.job({**JOB, "web": {"metrics": address}})
    targets, credentials = addresses(job)
    with Prometheus(tmp_path / "prometheus", targets, credentials, MONITORING / "alerts.yaml") as prometheus:
        members = cluster.training(folder)
        prometheus.until("count(up == 1)", PROCESSES)
        prometheus.until("sum(shardkeep_recoveries_total)", 0)

        members["server 1"].kill()
        prometheus.until("sum(shardkeep_recoveries_total)", 1)
        prometheus.until('max(shardkeep_job_state{state="training"})', 1)
        prometheus.until("count(up == 1)", PROCESSES)
        prometheus.until("count(up)", PROCESSES)

        assert not prometheus.empty(list(panels().values()), limit_s=90.0), panels()
        listed = [name for metric in METRICS.values() for name in series_names(metric)]
        assert not prometheus.empty(listed, limit_s=30.0)
        seconds = prometheus.value("sum(shardkeep_recovery_seconds_total)")
        assert seconds is not None and 0 < seconds < 120
        assert prometheus.value("sum(shardkeep_generations_total)") == 2

        (coordinator,) = folder.coordinator_pids()
        psutil.Process(coordinator).kill()
        prometheus.until("sum(shardkeep_recoveries_total)", 2)
        prometheus.until("count(up == 1)", PROCESSES)
        assert prometheus.value("max(shardkeep_checkpoint_step)"), "a coordinator that takes over knows the checkpoint"

        rules = prometheus.rules()
        assert len(rules) == 7
        assert {(rule["name"], rule["health"], rule.get("lastError")) for rule in rules} == {
            (rule["name"], "ok", None) for rule in rules
        }
        firing = {rule["name"] for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"}
        assert not firing - {"ShardkeepHeartbeatOld"}  # of the processes that were killed

        urls = [f"http://{labels['instance']}/metrics" for labels, _ in prometheus.query("up")]
        assert [get(url).status for url in [*urls, targets]] == [401] * (PROCESSES + 1)
        token = credentials.read_text()
        assert [get(url, token).status for url in [*urls, targets]] == [200] * (PROCESSES + 1)
