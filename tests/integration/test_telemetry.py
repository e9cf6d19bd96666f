"""Telemetry of whole jobs and loops as real processes: the records agree with the summary, and a full disk ends no
job."""

from __future__ import annotations

import json
import os
import signal
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
from tests.support.chaos import JOB, hurt_job
from tests.support.cluster import Cluster, kinds, within
from tests.support.configs import TINY
from tests.support.golden import Golden
from tests.support.http_get import get
from tests.support.hurt import Hurt, in_turn
from tests.support.records import records_in

pytestmark = [pytest.mark.waits_for_processes, pytest.mark.timeout(300)]
OFTEN = {"every_s": 0.05}


def last_of(records: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """The last record of each process of a role, by index."""
    newest = {record["index"]: record for record in records if record["role"] == role}
    return [newest[index] for index in sorted(newest)]


def check_workers(summary: dict[str, Any], records: list[dict[str, Any]], *, workers: int) -> None:
    """The last records of workers add up to what the summary says. Nothing is compressed."""
    for record in records:
        check_record(record, "the file")
    last = last_of(records, "worker")
    assert len(last) == workers and {record["step"] for record in last} == {summary["steps"]}
    totals = merge_totals(record["bytes"] for record in last)
    for way in totals.keys() & {"push", "pull", "tower", "read"}:
        assert totals[way] == summary["bytes"][way], way
    for way in totals.keys() & {"push", "pull", "tower"}:
        sent, fp32 = sum(totals[way].values()), summary["bytes"]["fp32"][way]
        assert sum(record["fp32_bytes"][way] for record in last) == fp32, way
        assert sent <= fp32 <= sent + totals[way].get("retries", 0), way  # so a reply counts that a death took
    assert sum(sum(r["staleness"].values()) for r in last) == sum(summary["staleness"].values())
    for index in range(workers):
        mine = [record for record in records if (record["role"], record["index"]) == ("worker", index)]
        assert sum(record["steps"] for record in mine) == summary["steps"]
        parts = [record["step_ms"] for record in mine if record["steps"]]
        assert all(abs(part["total"] - sum(part.values()) / 2) < 0.01 for part in parts)


def check_servers(summary: dict[str, Any], records: list[dict[str, Any]]) -> None:
    last = last_of(records, "server")
    assert {r["step"] for r in last} == {summary["steps"]}
    for number, table in enumerate(summary["tables"]):
        parts = [record["tables"][number] for record in last]
        assert {part["name"] for part in parts} == {table["name"]}
        assert sum(part["rows"] for part in parts) == table["rows"] == sum(part["created"] for part in parts)
        assert sum(part["bytes"] for part in parts) == table["bytes"]


def test_the_records_of_a_job_add_up_to_its_summary(golden: Golden) -> None:
    folder, summary = golden.folder, golden.summary
    records = records_in(folder.telemetry_path)
    check_workers(summary, records, workers=2)
    check_servers(summary, records)
    assert {record["samples"] for record in last_of(records, "worker")} == {summary["samples"]}
    pids = {(m["role"], m["index"]): m["pid"] for m in folder.member_list()}
    assert {(r["role"], r["index"]): r["pid"] for r in records} == pids
    assert {(r["host"], r["generation"]) for r in records if r["role"] != "coordinator"} == {("127.0.0.1", 1)}
    for server in last_of(records, "server"):
        assert (server["pulls"], server["pushes"]) == (2 * summary["steps"], 2 * summary["steps"])
        assert server["request_ms"] is None or server["request_ms"] > 0
        assert server["checkpoint"]["step"] == summary["steps"] and server["journal_bytes"] > 0
    assert last_of(records, "coordinator")[0]["members"] >= 1
    assert "telemetry" not in kinds(folder)


def test_a_job_in_one_process_writes_its_records_beside_a_full_file_of_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    head = {"time": "2026-01-01T00:00:00.000", "kind": "telemetry", "role": "worker", "index": 0, "pid": 1}
    line = json.dumps(head | {"every_s": 5.0, "steps": 1, "host": "x" * 800}) + "\n"
    before = 990_000 // len(line)
    cluster.folder("run").joinpath("telemetry.jsonl").write_text(line * before)
    job, folder = cluster.job({**TINY, "servers": 0, "workers": 1, "telemetry": {**OFTEN, "max_bytes": 1_000_000}})
    assert job.end().code == 0
    records = records_in(folder.telemetry_path)
    assert sum(record["steps"] for record in records if record["pid"] == 1) == before
    assert folder.telemetry_path.stat().st_size < 500_000
    own = [record for record in records if record["pid"] != 1]
    assert {(record["role"], record["index"]) for record in own} == {("worker", 0), ("server", 0)}
    assert len({record["pid"] for record in own}) == 1
    summary = folder.summary() or {}
    check_workers(summary, own, workers=1)
    check_servers(summary, own)


@pytest.mark.slow  # a job that loses two processes
def test_over_recoveries_the_summary_has_the_bytes_of_the_last_records(cluster: Cluster, tmp_path: Path) -> None:
    compressed = {"push": {"values": "fp16", "keep": 0.25, "pool_rows": 1000}, "pull": {"values": "fp16"}}
    hurts = in_turn(Hurt("server 1", "push received", 60), Hurt("worker 1", "pushing", 60))
    summary = hurt_job(cluster, {**JOB, "telemetry": OFTEN, "compression": compressed}, hurts)
    last = last_of(records_in(tmp_path / "hurt" / "telemetry.jsonl"), "worker")
    assert len(summary["recoveries"]) >= 2
    totals = merge_totals(record["bytes"] for record in last)
    for way in ("push", "pull", "tower"):
        assert totals[way] == summary["bytes"][way], way
        assert sum(record["fp32_bytes"][way] for record in last) == summary["bytes"]["fp32"][way], way
    assert sum(summary["bytes"]["push"].values()) < 0.7 * summary["bytes"]["fp32"]["push"]


# ---- loops of the user's own ----

TABLES = [TableSpec(name="user", dim=4, optimizer={"name": "adagrad", "lr": 0.1})]


def train(client: EmbeddingClient, steps: int) -> None:
    for number in range(client.step, client.step + steps):
        rows = client.lookup({"user": (torch.arange(12) * number) % 50})
        loss = rows["user"].square().mean()
        loss.backward()
        client.apply(rows)
        client.report(loss=loss, samples=12)


def check_page_and_metrics(client: EmbeddingClient, run: Path, printed: str) -> None:
    """They are where the client says, and show the loop."""
    assert [line for line in printed.splitlines() if line.startswith("page")] == [f"page      shardkeep view {run}"]
    address, _, token = (client.page or "").partition("?token=")
    assert token == view_token(RunFolder(run).token_path.read_text().strip())
    records = lambda: [r for r in records_in(RunFolder(run).telemetry_path) if r["role"] == "worker"]  # noqa: E731

    def shown() -> bool:
        train(client, 5)
        overview = json.loads(get(f"{address}state", token).body)["runs"][0]["overview"]
        return bool(overview["loop"] and overview["step"]) and bool(records())

    within(90, shown, "the page does not show the loop's steps", lambda: True)
    text = get(records()[0]["metrics"], token).text
    assert f'shardkeep_train_step{{index="0",role="worker"}} {client.step}' in text.replace(".0\n", "\n")
    for name in ("pull_wait_seconds_count", "fp32_bytes_total", "train_loss", "unique_ids_total"):
        assert f"shardkeep_{name}" in text, name


@pytest.mark.slow
def test_a_killed_server_is_in_the_records_and_on_the_page_and_no_bit_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = {"telemetry": OFTEN, "web": {"metrics": "127.0.0.1:0"}, "seed": 5, "consistency": "sync"}
    with EmbeddingClient.serve(TABLES, servers=2, run_dir=run, **settings) as client:
        check_page_and_metrics(client, run, capfd.readouterr().err)
        pid = next(m["pid"] for m in RunFolder(run).member_list() if (m["role"], m["index"]) == ("server", 1))
        os.kill(pid, signal.SIGKILL)
        train(client, 20)
        client.report(eval={"auc": 0.75})
        digest, steps = client.summary(digest=True)["state_digest"], client.step
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as alone:
        train(alone, steps)
        assert digest == alone.summary(digest=True)["state_digest"]
    folder = RunFolder(run)
    summary = folder.summary() or {}
    records = [record for record in records_in(folder.telemetry_path) if record["role"] == "worker"]
    check_workers(summary, records, workers=1)
    assert records[-1]["generation"] == 2
    assert sum(summary["bytes"][way].get("retries", 0) for way in ("push", "pull")) > 0
    assert (summary["samples"], records[-1]["samples"]) == (12 * steps, 12 * steps)
    assert summary["loop"] and {p["role"] for p in summary["processes"]} == {"coordinator", "server", "worker"}
    assert {"progress", "eval"} <= set(kinds(folder))

    seen = RunState(run).sections()
    assert seen["overview"]["loop"] and seen["overview"]["step"] == steps and seen["overview"]["recoveries"] == 1
    assert seen["overview"]["evaluation"] == [{"key": "auc", "name": "AUC", "value": 0.75}]
    assert seen["overview"]["loss"] is not None and seen["overview"]["samples_per_s"] > 0
    assert {d["name"] for d in seen["bytes"]["directions"] if d["fp32"]} == {"pull", "push"}
    assert seen["steps"][0]["parts"]["pull_wait"] > 0 and seen["staleness"]["counts"] == [[0, steps]]
    assert not [w for w in seen["warnings"] if "shardkeep train" in w["advice"] or w["level"] == "bad"]
