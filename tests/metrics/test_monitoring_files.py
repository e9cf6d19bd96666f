"""examples/monitoring: the alert rules fire when they should, and rules and dashboard ask for metrics that exist."""

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

from shardkeep.metrics.names import METRICS, series_names

ROOT = Path(__file__).resolve().parents[2]
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


def expressions() -> list[str]:
    found = [str(rule["expr"]) for rule in rules()]
    return found + [str(target["expr"]) for panel in panels() for target in panel.get("targets", ())]


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
    asked = {name for expression in expressions() for name in re.findall(r"\bshardkeep_\w+", expression)}
    assert asked - {"shardkeep_job"} <= listed
    shown = " ".join(str(target["expr"]) for panel in panels() for target in panel.get("targets", ()))
    missing = [m.name for m in METRICS.values() if not any(re.search(rf"\b{n}\b", shown) for n in series_names(m))]
    assert not missing


def test_every_panel_has_a_unit_and_a_word_of_explanation() -> None:
    shown = [panel for panel in panels() if panel["type"] != "row"]
    assert shown
    for panel in shown:
        assert len(panel.get("description", "")) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]
