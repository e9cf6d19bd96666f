"""Telemetry of whole jobs as real processes: the records agree with the summary, and a full disk ends no job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkeep.compression.ledger import merge_totals
from shardkeep.records.telemetry import check_record
from shardkeep.run.folder import RunFolder
from tests.support.chaos import JOB, hurt_job
from tests.support.cluster import Cluster, kinds
from tests.support.configs import TINY
from tests.support.golden import Golden
from tests.support.hurt import Hurt, in_turn
from tests.support.records import records_in

pytestmark = pytest.mark.waits_for_processes
OFTEN = {"every_s": 0.05}


def telemetry(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.telemetry_path.read_text().splitlines()]


def last_of(records: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """The last record of each process of a role, by index."""
    newest = {record["index"]: record for record in records if record["role"] == role}
    return [newest[index] for index in sorted(newest)]


def check_against(summary: dict[str, Any], records: list[dict[str, Any]], *, workers: int) -> None:
    """The last records of workers and servers add up to what the summary says."""
    of_workers, of_servers = last_of(records, "worker"), last_of(records, "server")
    assert len(of_workers) == workers
    totals = merge_totals(record["bytes"] for record in of_workers)
    for way in ("push", "pull", "tower", "read"):
        assert totals[way] == summary["bytes"][way], way
    for way in ("push", "pull", "tower"):  # nothing is compressed
        assert sum(record["fp32_bytes"][way] for record in of_workers) == summary["bytes"]["fp32"][way], way
        assert summary["bytes"]["fp32"][way] == sum(summary["bytes"][way].values()), way
    assert {(r["step"], r["samples"]) for r in of_workers} == {(summary["steps"], summary["samples"])}
    assert {r["step"] for r in of_servers} == {summary["steps"]}
    staleness = [times for r in of_workers for times in r["staleness"].values()]
    assert sum(staleness) == sum(summary["staleness"].values())
    for number, table in enumerate(summary["tables"]):
        parts = [record["tables"][number] for record in of_servers]
        assert {part["name"] for part in parts} == {table["name"]}
        assert sum(part["rows"] for part in parts) == table["rows"] == sum(part["created"] for part in parts)
        assert sum(part["bytes"] for part in parts) == table["bytes"]
    for index in range(workers):
        mine = [record for record in records if (record["role"], record["index"]) == ("worker", index)]
        assert sum(record["steps"] for record in mine) == summary["steps"]
        parts = [record["step_ms"] for record in mine if record["steps"]]
        assert all(abs(part["total"] - sum(part.values()) / 2) < 0.01 for part in parts)


def test_the_records_of_a_job_add_up_to_its_summary(golden: Golden) -> None:
    folder = golden.folder
    records, summary = telemetry(folder), golden.summary
    for record in records:
        check_record(record, "the file")
    check_against(summary, records, workers=2)
    pids = {(m["role"], m["index"]): m["pid"] for m in folder.member_list()}
    assert {(r["role"], r["index"]): r["pid"] for r in records} == pids
    assert {(r["host"], r["generation"]) for r in records if r["role"] != "coordinator"} == {("127.0.0.1", 1)}
    for server in last_of(records, "server"):
        assert (server["pulls"], server["pushes"]) == (2 * summary["steps"], 2 * summary["steps"])
        assert server["request_ms"] is None or server["request_ms"] > 0
        assert server["checkpoint"]["step"] == summary["steps"] and server["journal_bytes"] > 0
    assert last_of(records, "coordinator")[0]["members"] >= 1
    assert "telemetry" not in kinds(folder)


def test_a_job_in_one_process_writes_the_records_of_its_worker_and_its_server(cluster: Cluster) -> None:
    job, folder = cluster.job({**TINY, "servers": 0, "workers": 1, "telemetry": OFTEN})
    assert job.end().code == 0
    records = telemetry(folder)
    check_against(folder.summary() or {}, records, workers=1)
    assert {(record["role"], record["index"]) for record in records} == {("worker", 0), ("server", 0)}
    assert len({record["pid"] for record in records}) == 1


@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_without_an_interval_there_is_no_file(cluster: Cluster, servers: int) -> None:
    job, folder = cluster.job({**TINY, "servers": servers, "workers": 1, "telemetry": {"every_s": "off"}})
    assert job.end().code == 0
    assert not folder.telemetry_path.exists()


@pytest.mark.parametrize("servers", [0, 1])
def test_a_disk_that_is_full_for_telemetry_ends_no_job(cluster: Cluster, servers: int) -> None:
    config = {**TINY, "servers": servers, "workers": 1, "telemetry": OFTEN}
    job, folder = cluster.job(config)
    folder.telemetry_path.symlink_to("/dev/full")
    ended = job.end()
    assert ended.code == 0 and (folder.summary() or {})["status"] == "completed"
    said = ended.err if not servers else folder.log_path("coordinator", 0).read_text()
    assert said.count("telemetry is not written (No space left on device)") == 1


@pytest.mark.slow  # a job that loses two processes
def test_over_recoveries_the_summary_has_the_bytes_of_the_last_records(cluster: Cluster, tmp_path: Path) -> None:
    compressed = {"push": {"values": "fp16", "keep_rows": 0.25}, "pull": {"values": "fp16"}}
    hurts = in_turn(Hurt("server 1", "push received", 60), Hurt("worker 1", "pushing", 60))
    summary = hurt_job(cluster, {**JOB, "telemetry": OFTEN, "compression": compressed}, hurts)
    last = last_of(telemetry(RunFolder(tmp_path / "hurt")), "worker")
    assert len(summary["recoveries"]) >= 2
    totals = merge_totals(record["bytes"] for record in last)
    for way in ("push", "pull", "tower"):
        assert totals[way] == summary["bytes"][way], way
        assert sum(record["fp32_bytes"][way] for record in last) == summary["bytes"]["fp32"][way], way
    assert sum(summary["bytes"]["push"].values()) < 0.7 * summary["bytes"]["fp32"]["push"]


def test_a_job_whose_telemetry_is_full_keeps_it_beside_its_own_records(cluster: Cluster, tmp_path: Path) -> None:
    steps = fill(tmp_path / "run" / "telemetry.jsonl", 990_000)
    job, folder = cluster.job({**TINY, "servers": 0, "workers": 1, "telemetry": {**OFTEN, "max_bytes": 1_000_000}})
    assert job.end().code == 0
    assert sum(record["steps"] for record in records_in(folder.telemetry_path) if record.get("pid") == 1) == steps
    assert folder.telemetry_path.stat().st_size < 500_000
    check_against(folder.summary() or {}, telemetry(folder), workers=1)


def fill(path: Path, size: int) -> int:
    """Writes records of another process to a file that does not exist; their number, and that of their steps."""
    path.parent.mkdir()
    head = {"time": "2026-01-01T00:00:00.000", "kind": "telemetry", "role": "worker", "index": 0, "pid": 1}
    line = json.dumps(head | {"every_s": 5.0, "steps": 1, "host": "x" * 800}) + "\n"
    path.write_text(line * (size // len(line)))
    return size // len(line)
