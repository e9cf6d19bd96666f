"""Profiled jobs: every worker and server leaves a trace, and the summary has the parts of a step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from shardkeep import train
from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.workers.timing.clock import PARTS
from tests.support.cluster import records
from tests.support.configs import TINY
from tests.support.golden import Golden

pytestmark = pytest.mark.waits_for_processes


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
