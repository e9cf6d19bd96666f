"""Whole jobs as real processes: they complete, they are alike, they end in order, and they leave nothing behind."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from shardkeep.run.folder import NO_SUMMARY, RunFolder
from shardkeep.workers.data.sources.registry import open_data
from tests.support.cases import every
from tests.support.cluster import Cluster, Ended, gone, kinds, listening, records, within
from tests.support.configs import ENDLESS, TINY
from tests.support.golden import STEPS, Golden
from tests.support.local_job import LocalJob

pytestmark = pytest.mark.waits_for_processes


def check_completed(ended: Ended, folder: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
    """What every completed job leaves: code 0, quiet screen and logs, all files, all keys. Returns the summary."""
    assert (ended.code, ended.err) == (0, "")
    summary = folder.summary() or {}
    assert set(NO_SUMMARY) | {"status", "versions", "machine"} <= set(summary)
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 20, 1950)
    assert summary["wall_s"] > 0 and summary["samples_per_s"] > 0
    assert 0.5 < summary["eval"]["auc"] < summary["eval"]["best_auc"] and summary["eval"]["samples"] == 300
    counted = summary["bytes"]
    parts = [sum(counted[name].values()) for name in ("push", "pull", "tower", "read")] + [counted["control"]]
    assert min(parts) > 0 and counted["total"] == sum(parts)
    assert counted["per_sample"] == (counted["total"] - sum(counted["read"].values())) / summary["samples"]
    assert sum(summary["staleness"].values()) == summary["steps"] * config["workers"]
    assert [t["name"] for t in summary["tables"]] == ["C1", "C2", "C3"]
    assert all(t["rows"] > 0 and t["bytes"] > 64 * t["rows"] for t in summary["tables"])
    assert re.fullmatch("[0-9a-f]{64}", summary["state_digest"])
    roles = [("coordinator", 0)] + [(r, i) for r in ("server", "worker") for i in range(config[f"{r}s"])]
    members = folder.member_list()
    assert [(m["role"], m["index"]) for m in members] == roles
    assert {(m["host"], m["generation"]) for m in members} == {("127.0.0.1", 1)}
    assert {"progress", "eval", "phase", "event"} <= kinds(folder)
    assert not [m["pid"] for m in members if psutil.pid_exists(m["pid"])]
    return summary


def check_logs(folder: RunFolder) -> None:
    """Only our own lines: no warnings of libraries, no tracebacks, nothing of C++."""
    for log in folder.logs.glob("*.log"):
        ours = re.compile(rf"(\{{|{log.stem.replace('-', '/')} )")
        strange = [line for line in log.read_text().splitlines() if not ours.match(line) or "level=" in line]
        assert not strange, f"{log.name}: {strange}"


@pytest.mark.parametrize(("servers", "start"), [(2, "auto"), pytest.param(1, "spawn", marks=pytest.mark.slow)])
def test_a_sync_job_has_the_model_of_one_in_this_process_whatever_the_servers_and_their_start(
    cluster: Cluster, servers: int, start: str
) -> None:
    """The long one is the job that starts everything by exec, as a user's command does."""
    config = {**TINY, "servers": servers, "consistency": {"mode": "sync"}, "launch": {"start": start}}
    job, folder = cluster.job(config, fresh=start == "spawn")
    summary = check_completed(job.end(), folder, config)
    check_logs(folder)
    assert summary["staleness"] == {"0": 40}
    parsed = JobConfig.model_validate({**TINY, "consistency": {"mode": "sync"}})
    here = LocalJob(parsed, open_data(parsed.data, seed=parsed.seed)).run()
    assert summary["state_digest"] == here["state_digest"]


def test_a_killed_process_ends_the_job_and_one_line_names_it(cluster: Cluster) -> None:
    """Long before its lease is over. All processes listen on loopback alone."""
    job, folder = cluster.job({**ENDLESS, "liveness": {"lease_s": 150.0}})
    members = cluster.training(folder)
    assert set(members) == {"coordinator 0", "server 0", "worker 0", "worker 1"}
    hosts = {name: listening(process) for name, process in members.items()}
    assert {host for found in hosts.values() for host in found} == {"127.0.0.1"} and all(hosts.values()), hosts
    members["worker 1"].kill()
    ended, summary = job.end(limit_s=90), folder.summary() or {}
    line = rf"error: worker 1 \(pid {members['worker 1'].pid}.*\) ended: killed by SIGKILL, .*step \d+"
    assert ended.code == 1 and re.match(line, ended.err) and ended.err.count("\n") == 1, ended.err
    assert not gone(members.values(), limit_s=0)
    assert summary["status"] == "failed" and summary["message"] in ended.err


def test_ctrl_c_stops_a_job_in_order(cluster: Cluster) -> None:
    job, folder = cluster.job({**ENDLESS, "workers": 1})
    members = cluster.training(folder)
    job.signal(signal.SIGINT)
    ended = job.end(limit_s=90)
    assert ended.code == 1
    assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM\n", ended.err)
    assert (folder.summary() or {})["status"] == "stopped"
    assert not gone(members.values(), limit_s=0)


def test_ctrl_c_after_the_last_step_leaves_a_completed_job(cluster: Cluster) -> None:
    """In one process, without telemetry; of processes with stand-ins: tests/launch/test_supervised_stops.py."""
    evaluated = 60_000  # so many that Ctrl-C comes before they are evaluated
    data = {"synthetic": {**TINY["data"]["synthetic"], "eval_samples": evaluated}}
    config = {**TINY, "servers": 0, "workers": 1, "data": data, "checkpoint": {"every_steps": 1000}}
    job, folder = cluster.job({**config, "telemetry": {"every_s": "off"}})
    within(60, lambda: any(r.get("step") == 39 for r in records(folder)), "no last step", lambda: job.running)
    job.signal(signal.SIGINT)
    ended = job.end()
    notice = "stopping after the running step; press Ctrl-C again to end it at once\n"
    assert (ended.code, ended.err) == (0, notice), job.printed()
    summary = folder.summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", 39)
    assert summary["eval"]["samples"] == evaluated and summary["state_digest"]
    assert not folder.telemetry_path.exists()


@every("place", ["file/run", "/proc/run"])
def test_a_run_folder_that_cannot_be_made_is_one_line(cluster: Cluster, tmp_path: Path, place: str) -> None:
    """Below a file, and where nobody may write."""
    (tmp_path / "file").write_text("")
    ended = cluster.command("train", str(cluster.write(TINY)), "--run-dir", place, cwd=tmp_path).end()
    assert ended.code == 2
    assert re.fullmatch(rf"error: --run-dir {place}: cannot be written \(.+\)\n", ended.err)


# ---- what the golden job left ----


def test_a_job_shows_its_phases_and_its_result_and_writes_records_with_a_time(golden: Golden) -> None:
    check_logs(golden.folder)
    lines = [line.split()[0] for line in golden.ended.out.splitlines() if line]
    assert [line for line in lines if line in ("data", "start", "train")][:3] == ["data", "start", "train"]
    assert "tower" not in lines and "kernels" not in lines, "what nobody can use"
    assert {"train", "evaluate", "AUC", "logloss", "bytes", "speed", "run"} <= set(lines)
    told = records(golden.folder)
    assert all({"time", "kind"} <= set(record) for record in told)
    assert json.loads((golden.folder.path / "summary.json").read_text()) == golden.summary
    steps = [r["step"] for r in told if r["kind"] == "progress" and r["index"] == 0]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket")
def test_the_ledger_agrees_with_the_sockets_counters(golden: Golden) -> None:
    counted, sockets = golden.summary["bytes"], golden.summary["sockets"]
    ways = {
        "to_servers": ("servers", "sent"), "from_servers": ("servers", "received"),
        "between_workers": ("workers", "sent"),
    }  # fmt: skip
    for way, (group, field) in ways.items():
        assert counted[way] == pytest.approx(sockets[group][field], rel=0.01) and counted[way] > 300_000, way
    control = sum(sockets["control"][field] for field in ("sent", "received"))
    data = sum(sum(counted[name].values()) for name in ("push", "pull", "tower", "read"))
    assert control <= counted["control"] == counted["total"] - data


def test_it_moved_as_many_bytes_per_sample_as_was_estimated(golden: Golden) -> None:
    found, summary = estimate(JobConfig.model_validate(golden.config), gbit_per_s=10.0), golden.summary
    assert found["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"], rel=0.05)
    assert [t["rows"] for t in found["tables"]] == [t["rows"] for t in summary["tables"]]
    reported, held = (sum(t["bytes"] for t in tables) for tables in (found["tables"], summary["tables"]))
    assert reported == pytest.approx(held, rel=0.25)
