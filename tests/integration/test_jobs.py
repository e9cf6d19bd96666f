"""Whole jobs as real processes: they complete, they are alike, they end in order, and they leave nothing behind."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep import train
from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.estimate.estimate import estimate
from shardkeep.run.folder import NO_SUMMARY, RunFolder
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.timing.clock import PARTS
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
    control = summary["bytes"]["control"] / summary["samples"]  # grows with the time that a job takes
    assert found["bytes_per_sample"] == pytest.approx(summary["bytes"]["per_sample"] - control, rel=0.03)
    assert [t["rows"] for t in found["tables"]] == [t["rows"] for t in summary["tables"]]
    reported, held = (sum(t["bytes"] for t in tables) for tables in (found["tables"], summary["tables"]))
    assert reported == pytest.approx(held, rel=0.25)


# ---- profiles ----


def ranges(path: Path) -> Counter[str]:
    """How often each named range is in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(e["name"] for e in events if e.get("cat") == "user_annotation")


def handled(found: Counter[str], kind: str) -> int:
    """Messages of a kind, whether they came alone or together with another."""
    return sum(times for name, times in found.items() if kind in name.removeprefix("shardkeep:").split(" and "))


def test_a_profiled_job_leaves_a_trace_of_each_process(golden: Golden) -> None:
    """That it trains the same model shows in test_chaos.py, whose job is not profiled and has the same digest."""
    traces = golden.folder.path / "profile"
    members = ("server-0", "server-1", "worker-0", "worker-1")
    assert {path.name for path in traces.iterdir()} == {f"{member}.pt.trace.json" for member in members}
    worker, server = (ranges(traces / f"{role}-0.pt.trace.json") for role in ("worker", "server"))
    steps = {f"ProfilerStep#{step}" for step in (5, 6, 7, 8)}
    assert {name for name in worker if name.startswith("ProfilerStep")} == steps
    always = (*(part for part in PARTS if part != "data"), "prepare")  # nobody waits for data that is ready
    assert {f"shardkeep:{part}" for part in always} <= set(worker)
    assert worker["shardkeep:dense_reduce"] == 2 * 4  # within the backward pass, and before the optimizer
    assert handled(server, "pull") >= 2 * 4 <= handled(server, "push")
    logs = "".join(log.read_text() for log in golden.folder.logs.glob("*.log"))
    assert logs.count(" profile first=5 steps=4 path=") == 4
    assert "\nprofile " in golden.ended.out and "USDT" not in logs + golden.ended.out


def test_the_summary_tells_of_each_process_and_of_the_parts_of_a_step(golden: Golden) -> None:
    summary, found = golden.summary, golden.summary["processes"]
    roles = [("coordinator", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1)]
    assert [(p["role"], p["index"]) for p in found] == roles
    assert all(10e6 < p["peak_rss_bytes"] < 10e9 for p in found)
    assert all(p["kernels_s"] > 0 for p in found[1:])
    workers = found[3:]
    assert [worker["compile_s"] for worker in workers] == [0.0, 0.0]  # sync: the tower is not compiled
    for part, ms in summary["step_ms"].items():
        assert ms == pytest.approx(sum(worker["step_ms"][part] for worker in workers) / 2, abs=1e-3)
    for record in [summary, *(r for r in records(golden.folder) if r["kind"] == "progress")]:
        parts = dict(record["step_ms"])
        total = parts.pop("total")
        assert list(parts) == list(PARTS)
        assert total == pytest.approx(sum(parts.values()), abs=0.001)
        assert min(parts[name] for name in ("lookup", "forward", "backward", "push")) > 0
    assert 0 < summary["step_ms"]["total"] <= 1.05e3 * 100 / summary["samples_per_s"]  # which ends with the last push


def test_a_job_in_one_process_leaves_one_trace_that_shows_the_messages_too(tmp_path: Path) -> None:
    config = {**TINY, "servers": 0, "workers": 1, "consistency": {"mode": "sync"}}
    config["train"] = {"batch_size": 50, "max_steps": 20}
    refused = JobConfig.model_validate({**config, "profile": {"start": 20, "steps": 1}})
    with pytest.raises(ConfigError, match=r"profile\.start: 20 is not allowed: the job has 20 steps, counted from 0"):
        train(refused, run_dir=tmp_path / "refused", quiet=True)
    profiled = JobConfig.model_validate({**config, "profile": {"start": 5, "steps": 4}})
    summary = train(profiled, run_dir=tmp_path / "run", quiet=True).to_dict()
    found = ranges(tmp_path / "run" / "profile" / "worker-0.pt.trace.json")
    assert {"ProfilerStep#5", "shardkeep:forward"} <= set(found)
    assert min(handled(found, "pull"), handled(found, "push")) >= 3  # of 4 steps; the first may be pulled before
    assert [(p["role"], p["index"]) for p in summary["processes"]] == [("worker", 0)]
