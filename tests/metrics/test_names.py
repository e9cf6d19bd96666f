"""Every metric that processes export is listed and documented, and every listed one is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from shardkeep.base.errors import ConfigError
from shardkeep.config import parse_config
from shardkeep.metrics.job_samples import STATES, JobCounts
from shardkeep.metrics.names import METRICS, OF_EVERY_SERIES, series_names
from shardkeep.roles.in_process import run_in_process
from shardkeep.trust.tokens import keep_token
from shardkeep.trust.view import view_token
from tests.support.control_job import Job, ListSink
from tests.support.http_get import get

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
servers: 0
workers: 1
consistency: {mode: bounded, staleness: 2}
data: {synthetic: {train_samples: 300, eval_samples: 30, num_dense: 2, table_sizes: [40, 90]}}
model: {bottom: [4], hidden: [4]}
tables: {default: {dim: 4, evict: {ttl_steps: 5}}}
tower: {compile: off}
train: {batch_size: 10}
eval: {every_steps: 10}
checkpoint: {every_steps: 10}
compression: {push: {keep: 0.25, pool_rows: 9}}
web: {metrics: "127.0.0.1:0"}
telemetry: {every_s: 0.01}
"""
ONLY_WITH_A_COORDINATOR = {"shardkeep_job_members", "shardkeep_member_heartbeat_age_seconds"}

Series = tuple[str, dict[str, str], float]


class Scraping(ListSink):
    """Scrapes the job that reports to it at each of its evaluations."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token, self.scrapes, self.targets = token, list[list[Series]](), list[str]()

    def event(self, record: dict[str, Any]) -> None:
        super().event(record)
        if record["kind"] != "eval":
            return
        (address,) = {e["text"].split(",")[0] for _, e in self.of("event") if e.get("phase") == "metrics"}
        families = text_string_to_metric_families(get(address, self._token).text)
        self.scrapes.append([(s.name, s.labels, s.value) for family in families for s in family.samples])
        self.targets.append(get(address.replace("/metrics", "/sd"), self._token).text)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraping:
    """A job in one process, scraped while it trains."""
    folder = tmp_path_factory.mktemp("job")
    sink = Scraping(view_token(keep_token(folder)))
    run_in_process(parse_config(CONFIG), sink, folder=folder)
    return sink


@pytest.fixture(scope="module")
def last(scraped: Scraping) -> list[Series]:
    assert len(scraped.scrapes) == 3
    return scraped.scrapes[-1]


def test_a_job_exports_every_listed_metric_and_no_other_with_the_listed_labels(last: list[Series]) -> None:
    of_series = {name: metric for metric in METRICS.values() for name in series_names(metric)}
    assert {name for name, _, _ in last} == of_series.keys() - ONLY_WITH_A_COORDINATOR
    for name, labels, _ in last:
        metric = of_series[name]
        assert labels.keys() - {"le"} == {*OF_EVERY_SERIES, *metric.labels}, name
        assert labels["role"] in metric.roles and labels["index"] == "0", name


def test_the_reference_has_every_metric_and_no_other_and_names_follow_prometheus() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(shardkeep_\w+)`", page, re.MULTILINE)) == set(METRICS)
    for metric in METRICS.values():
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|s|us|mb|gb|percent|count|sum|bucket|info_total)$", metric.name), metric.name


def test_metrics_change_no_bit_of_the_model(tmp_path: Path) -> None:
    config = CONFIG.replace("mode: bounded, staleness: 2", "mode: sync").replace("evict: {ttl_steps: 5}", "")
    off = config.replace('"127.0.0.1:0"', "off").replace("every_s: 0.01", "every_s: off")
    digests = set()
    for name, text in (("on", config), ("off", off)):
        (tmp_path / name).mkdir()
        digests.add(run_in_process(parse_config(text), ListSink(), folder=tmp_path / name)["state_digest"])
    assert len(digests) == 1


def test_the_figures_are_the_job_s(last: list[Series], scraped: Scraping) -> None:
    def value(name: str, **wanted: str) -> float:
        found, *others = [v for n, labels, v in last if n == f"shardkeep_{name}" and wanted.items() <= labels.items()]
        assert not others, name
        return found

    evaluations = [call[1] for call in scraped.of("event") if call[1]["kind"] == "eval"]
    assert value("evaluation", metric="auc") == evaluations[-1]["auc"]
    assert value("evaluation_step") == value("train_step") == value("server_step") == 30
    assert value("train_samples") == 300
    assert value("step_duration_seconds_count") == value("pull_wait_seconds_count") == 30
    assert value("job_planned_steps") == 30
    assert value("job_state", state="training") == 1
    assert value("ids_total") == 600 and 0 < value("unique_ids_total") <= 600
    assert value("staleness_bound_steps") == 2
    assert value("pulls_total") == value("pushes_total") == 30
    assert value("checkpoint_period_steps") == 10
    assert value("table_rows", table="C1") > 0
    assert value("bytes_total", direction="push", kind="ids") > 0
    assert 0 < value("unsent_gradient_ratio") < 1


def test_histograms_are_cumulative_and_no_count_falls_between_scrapes(last: list[Series], scraped: Scraping) -> None:
    for metric in (one for one in METRICS.values() if one.kind == "histogram"):
        buckets = [(float(labels["le"]), v) for n, labels, v in last if n == f"{metric.name}_bucket"]
        (count,) = [v for n, _, v in last if n == f"{metric.name}_count"]
        counts = [v for _, v in sorted(buckets)]
        assert counts == sorted(counts) and counts[-1] == count > 0, metric.name
    growing = {name for metric in METRICS.values() if metric.kind != "gauge" for name in series_names(metric)}
    before: dict[Any, float] = {}
    for scrape in scraped.scrapes:
        now = {(name, *sorted(labels.items())): value for name, labels, value in scrape if name in growing}
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert scraped.targets[-1].count("127.0.0.1") == 1, "one process"


def test_the_coordinator_s_state_members_and_recoveries_are_exported() -> None:
    counts = JobCounts(ListSink(), lease_s=15.0, period_steps=None)
    job = Job(sink=counts)  # type: ignore[arg-type]
    counts.watch(job.coordinator.status)
    job.form()
    job.pass_time(3, alive=[("server", 0), ("worker", 0)], step=5)

    def values(name: str) -> dict[tuple[str, ...], float]:
        return {tuple(s.labels.values()): s.value for s in counts.samples() if s.name == name}  # type: ignore[misc]

    assert values("job_members") == {("server",): 1, ("worker",): 2}
    assert values("member_heartbeat_age_seconds") == {("server", "0"): 0, ("worker", "0"): 0, ("worker", "1"): 3}
    assert values("job_state") == {(state,): float(state == "training") for state in STATES}
    assert values("generations_total") == {(): 1}
    assert values("checkpoint_period_steps") == {}
    job.coordinator.report(
        "worker-0-100", sequence=1, kind="phase", record={"phase": "checkpoint", "every_steps": 70, "step": 5}
    )
    assert values("checkpoint_period_steps") == {(): 70}


def test_an_address_that_is_none_is_refused() -> None:
    for listen in ("9100", "host", "127.0.0.1:70000", "7"):
        with pytest.raises(ConfigError, match=r"web\.metrics: .*allowed: off, or HOST:PORT"):
            parse_config(CONFIG.replace('"127.0.0.1:0"', f'"{listen}"'))
    with pytest.raises(ConfigError, match=r"telemetry\.every_s: off with web\.metrics"):
        parse_config(CONFIG.replace("every_s: 0.01", "every_s: off"))


# ---- examples/monitoring: the rules fire when they should, and ask for metrics that exist, as the dashboard does ----

FOLDER = ROOT / "examples" / "monitoring"
TESTS = Path(__file__).with_name("alert_rules_test.yaml")
ALERTS = {
    "ShardkeepNoStep",
    "ShardkeepHeartbeatOld",
    "ShardkeepManyRecoveries",
    "ShardkeepDroppedRows",
    "ShardkeepCheckpointOld",
    "ShardkeepStalenessAtBound",
    "ShardkeepMemoryNearLimit",
}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))["panels"]:
        yield from (panel, *panel.get("panels", ()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool: scripts/install-all")
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    command = ["promtool", "test", "rules", str(TESTS)]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert {rule["alert"] for rule in rules()} == ALERTS
    cases = [case for test in yaml.safe_load(TESTS.read_text("utf-8"))["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == ALERTS


def test_rules_and_panels_ask_for_listed_metrics_and_every_one_is_on_the_dashboard() -> None:
    listed = {name for metric in METRICS.values() for name in series_names(metric)}
    shown = " ".join(str(target["expr"]) for panel in panels() for target in panel.get("targets", ()))
    asked = re.findall(r"\bshardkeep_\w+", " ".join([shown, *(str(rule["expr"]) for rule in rules())]))
    assert {*asked} - {"shardkeep_job"} <= listed
    missing = [m.name for m in METRICS.values() if not any(re.search(rf"\b{n}\b", shown) for n in series_names(m))]
    assert not missing


def test_every_panel_has_a_unit_and_a_word_of_explanation() -> None:
    shown = [panel for panel in panels() if panel["type"] != "row"]
    assert shown
    for panel in shown:
        assert len(panel.get("description", "")) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]
