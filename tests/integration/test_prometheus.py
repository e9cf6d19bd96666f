"""A real Prometheus scrapes a real job whose server and coordinator are killed. No panel of the dashboard is empty."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shardkeep.metrics.names import METRICS, series_names
from tests.support.cluster import Cluster, listening_ports, within
from tests.support.configs import TINY, TRAIN
from tests.support.http_get import get
from tests.support.reserved import reserved_address

PROGRAM = shutil.which("prometheus")
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
    "compression": {"push": {"keep": 0.25, "pool_rows": 1000}},
    "tables": {"C2": {"admit": {"min_count": 3}, "evict": {"ttl_steps": 200}}},
    "telemetry": {"every_s": 1.0},
}
PROCESSES = 5


class Prometheus:
    """The answers of a running one, on loopback alone."""

    def __init__(self, process: psutil.Popen) -> None:
        self._process = process
        within(60, lambda: bool(listening_ports(process)), "prometheus does not listen", process.is_running)
        self._url = f"http://127.0.0.1:{listening_ports(process)[0]}"

    def get(self, what: str, **arguments: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=90) as reply:
            return dict(json.load(reply)["data"])

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The values of an expression now that are numbers. Fails for an expression that is none."""
        reply = self.get("query", query=expression)
        assert reply["resultType"] in ("vector", "scalar"), expression
        found = [(one["metric"], float(one["value"][1])) for one in reply["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def value(self, expression: str) -> float | None:
        """The only value of an expression; None = there is none."""
        found = self.query(expression)
        assert len(found) < 2, f"{expression}: {found}"
        return found[0][1] if found else None

    def until(self, expression: str, value: float) -> None:
        within(120, lambda: self.value(expression) == value, f"{expression} is not {value}", self._process.is_running)

    def empty(self, expressions: list[str]) -> list[str]:
        """Waits until no expression is without a value; those that are after 90 s."""
        end = time.monotonic() + 90.0
        while (left := [one for one in expressions if not self.query(one)]) and time.monotonic() < end:
            time.sleep(0.5)
        return left


@contextlib.contextmanager
def scraping(folder: Path, targets: str, credentials: Path) -> Iterator[Prometheus]:
    """Scrapes what `targets`, the URL of a job's /sd, names, once a second."""
    assert PROGRAM is not None
    folder.mkdir()
    access = {"authorization": {"type": "Bearer", "credentials_file": str(credentials)}}
    discovery = {"url": targets, "refresh_interval": "1s", **access}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [{"job_name": "shardkeep", **access, "http_sd_configs": [discovery]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0")
    with (folder / "prometheus.log").open("wb") as log:
        process = psutil.Popen([PROGRAM, *options], stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            yield Prometheus(process)
        finally:
            process.kill()
            process.wait()
            print(f"---- prometheus: {Path(log.name).read_text(errors='replace')[-4000:]}")


def panels() -> list[str]:
    """Each expression of the dashboard, with a rate interval in place of Grafana's, four times the scrape interval."""
    board = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "20s").replace("$run", ".*") for each in found]


def test_prometheus_finds_every_process_and_fills_every_panel_over_a_recovery(cluster: Cluster, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(reserved_address())  # a coordinator that replaces another needs the same one
        job, folder = cluster.job({**JOB, "web": {"metrics": address}})
        line = job.line("metrics ")
        shown = re.search(r"all processes (http://\S+/sd); the token is in (\S+)", line)
        assert shown is not None, line
        targets, credentials = shown[1], Path(shown[2])
        prometheus = stack.enter_context(scraping(tmp_path / "prometheus", targets, credentials))
        members = cluster.training(folder)
        prometheus.until("count(up == 1)", PROCESSES)
        prometheus.until("sum(shardkeep_recoveries_total)", 0)

        members["server 1"].kill()
        prometheus.until("sum(shardkeep_recoveries_total)", 1)
        prometheus.until('max(shardkeep_job_state{state="training"})', 1)
        prometheus.until("count(up == 1)", PROCESSES)
        prometheus.until("count(up)", PROCESSES)
        assert not prometheus.empty(panels())
        assert not prometheus.empty([name for metric in METRICS.values() for name in series_names(metric)])
        seconds = prometheus.value("sum(shardkeep_recovery_seconds_total)")
        assert seconds is not None and 0 < seconds < 120
        assert prometheus.value("sum(shardkeep_generations_total)") == 2

        (coordinator,) = folder.coordinator_pids()
        psutil.Process(coordinator).kill()
        prometheus.until("sum(shardkeep_recoveries_total)", 2)
        prometheus.until("count(up == 1)", PROCESSES)
        assert prometheus.value("max(shardkeep_checkpoint_step)"), "a coordinator that takes over knows the checkpoint"

        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) == 7 and {(rule["health"], rule.get("lastError")) for rule in rules} == {("ok", None)}
        firing = {rule["name"] for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"}
        assert not firing - {"ShardkeepHeartbeatOld"}  # of the processes that were killed

        urls = [f"http://{labels['instance']}/metrics" for labels, _ in prometheus.query("up")]
        assert [get(url).status for url in [*urls, targets]] == [401] * (PROCESSES + 1)
        assert [get(url, credentials.read_text()).status for url in [*urls, targets]] == [200] * (PROCESSES + 1)
