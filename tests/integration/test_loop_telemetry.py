"""A training loop of the user's own with servers: its records, page, status and metrics agree with its client."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.compression.ledger import merge_totals
from shardkeep.page.state import RunState
from shardkeep.records.telemetry import check_record
from shardkeep.run.folder import RunFolder
from shardkeep.trust.view import view_token
from tests.support.cluster import Cluster, kinds, within
from tests.support.http_get import get

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
TABLES = [TableSpec(name="user", dim=4, optimizer={"name": "adagrad", "lr": 0.1})]
OFTEN = {"telemetry": {"every_s": 0.05}, "web": {"page": "off"}}
STEPS = 40


def train(client: EmbeddingClient, steps: int) -> None:
    for number in range(client.step, client.step + steps):
        rows = client.lookup({"user": (torch.arange(12) * number) % 50})
        loss = rows["user"].square().mean()
        loss.backward()
        client.apply(rows)
        client.report(loss=loss, samples=12)


def expected_digest() -> str:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        train(client, STEPS)
        return str(client.summary(digest=True)["state_digest"])


def telemetry(folder: RunFolder, role: str = "worker") -> list[dict[str, Any]]:
    records = [json.loads(line) for line in folder.telemetry_path.read_text().splitlines()]
    return [record for record in records if record["role"] == role]


def check_against(summary: dict[str, Any], records: list[dict[str, Any]], *, trainers: int = 1) -> None:
    """The last records of trainers add up to the summary."""
    for record in records:
        check_record(record, "the file")
    last = list({record["index"]: record for record in records}.values())
    assert len(last) == trainers and {record["step"] for record in last} == {summary["steps"]}
    totals = merge_totals(record["bytes"] for record in last)
    for way in ("push", "pull", "read"):
        assert totals[way] == summary["bytes"][way], way
        if way != "read":  # nothing is compressed; a reply that a death took counts among the retries alone
            sent, fp32 = sum(totals[way].values()), sum(r["fp32_bytes"][way] for r in last)
            assert sent <= fp32 <= sent + totals[way].get("retries", 0), way
            assert summary["bytes"]["fp32"][way] == fp32, way
    assert sum(sum(r["staleness"].values()) for r in last) == sum(summary["staleness"].values())
    for index in range(trainers):
        assert sum(r["steps"] for r in records if r["index"] == index) == summary["steps"]


@pytest.mark.slow
def test_a_killed_server_is_in_the_records_and_on_the_page_and_no_bit_changes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with EmbeddingClient.serve(
        TABLES, servers=2, seed=5, consistency="sync", run_dir=run, **OFTEN, quiet=True
    ) as client:
        train(client, STEPS // 2)
        pid = next(m["pid"] for m in RunFolder(run).member_list() if (m["role"], m["index"]) == ("server", 1))
        os.kill(pid, signal.SIGKILL)
        train(client, STEPS // 2)
        client.report(eval={"auc": 0.75})
        assert client.summary(digest=True)["state_digest"] == expected_digest()
        assert client.page is None
    folder = RunFolder(run)
    records, summary = telemetry(folder), folder.summary() or {}
    check_against(summary, records)
    assert records[-1]["generation"] == 2
    assert sum(summary["bytes"][way].get("retries", 0) for way in ("push", "pull")) > 0
    assert (summary["samples"], records[-1]["samples"]) == (12 * STEPS, 12 * STEPS)
    assert summary["loop"] and {p["role"] for p in summary["processes"]} == {"coordinator", "server", "worker"}
    assert {"progress", "eval"} <= set(kinds(folder))

    seen = RunState(run).sections()
    assert seen["overview"]["loop"] and seen["overview"]["step"] == STEPS and seen["overview"]["recoveries"] == 1
    assert seen["overview"]["evaluation"] == [{"key": "auc", "name": "AUC", "value": 0.75}]
    assert seen["overview"]["loss"] is not None and seen["overview"]["samples_per_s"] > 0
    assert {d["name"] for d in seen["bytes"]["directions"] if d["fp32"]} == {"pull", "push"}
    assert seen["steps"][0]["parts"]["pull_wait"] > 0 and seen["staleness"]["counts"] == [[0, STEPS]]
    assert not [w for w in seen["warnings"] if "shardkeep train" in w["advice"] or w["level"] == "bad"]


def test_the_page_and_the_metrics_of_a_loop_are_where_it_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"telemetry": {"every_s": 0.05}, "web": {"metrics": "127.0.0.1:0"}}
    run = tmp_path / "run"
    with EmbeddingClient.serve(TABLES, servers=1, run_dir=run, **settings) as client:
        printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("page")]
        assert printed == [f"page      shardkeep view {run}"] and client.page is not None
        address, _, token = client.page.partition("?token=")
        assert token == view_token(RunFolder(run).token_path.read_text().strip())
        train(client, 10)

        def shown() -> int | None:
            overview = json.loads(get(f"{address}state", token).body)["runs"][0]["overview"]
            return overview["step"] if overview["loop"] else None

        train_until(client, lambda: bool(shown()))
        within(90, lambda: bool(telemetry(RunFolder(run))), "the trainer makes no record", lambda: True)
        text = get(telemetry(RunFolder(run))[0]["metrics"], token).text
        assert f'shardkeep_train_step{{index="0",role="worker"}} {client.step}' in text.replace(".0\n", "\n")
        for name in ("pull_wait_seconds_count", "fp32_bytes_total", "train_loss", "unique_ids_total"):
            assert f"shardkeep_{name}" in text, name


def train_until(client: EmbeddingClient, seen: Any) -> None:
    def look() -> bool:
        train(client, 5)
        return bool(seen())

    within(60, look, "the page does not show the loop's steps", lambda: True)


SCRIPT = """
import os, torch, shardkeep
from shardkeep import TableSpec
with shardkeep.connect(tables=[TableSpec(name="user", dim=4)]) as client:
    for number in range(20):
        rows = client.lookup({"user": torch.arange(10) + number * client.rank})
        rows["user"].square().mean().backward()
        client.apply(rows, scale=0.5)
        client.report(loss=1.0, samples=10)
"""


@pytest.mark.chaos  # torchrun starts two trainers
def test_the_records_of_all_trainers_under_torchrun_add_up_to_the_summary(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "train.py"))
    options = ("--run-dir", str(run), "--servers", "2", "--set", "telemetry.every_s=0.05")
    done = cluster.command("with", *options, "--", *command).end(limit_s=120)
    assert done.code == 0, done.err
    assert done.err.splitlines().count(f"page: shardkeep view {run}") == 1
    folder = RunFolder(run)
    summary = folder.summary() or {}
    check_against(summary, telemetry(folder), trainers=2)
    assert summary["samples"] == 2 * 10 * 20
    status = cluster.command("status", str(run)).end()
    assert status.code == 0 and "20 (400 samples in " in status.out and "mean step" in status.out
    report = cluster.command("report", str(run), "--html", str(tmp_path / "report.html")).end()
    assert report.code == 0 and '"loop":true' in (tmp_path / "report.html").read_text().replace(" ", "")
