"""A simulated run folder has the files and the keys of a real job's, or pages are tested with what no job writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkeep.config import load_config
from tests.support.cases import every
from tests.support.cluster import Cluster, within
from tests.support.configs import TINY
from tests.support.simulated_runs import STATES, Scene, State, write_simulated_run

OPEN_KEYS = ("bytes", "train_bytes", "fp32_bytes", "wait_ms", "staleness", "sockets", "versions", "machine", "tower")
"""Mappings whose keys depend on the job."""
HIDDEN = ("recovery", "profile")
"""Folders that no page reads."""


def shape(value: Any) -> Any:
    """The keys of a JSON value, and of the first item of its lists, without the values."""
    if isinstance(value, dict):
        return {key: "..." if key in OPEN_KEYS else shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None


def files(run: Path) -> set[str]:
    """The files of a run folder for readers; those of a checkpoint are its manifest alone."""
    found = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    kept = {p for p in found if p.parts[0] not in HIDDEN and not p.name.startswith(("standing", "owner-", ".shared"))}
    shown = {p for p in kept if p.parts[0] != "checkpoints" or p.name == "manifest.json"}
    return {str(p) if p.parts[0] != "checkpoints" else "checkpoints/step-N/manifest.json" for p in shown}


def record_shapes(path: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """The shape of one record of each kind: by phase, by what an event carries, by role of telemetry."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        what = [record["kind"], record.get("phase", ""), "lost" if "lost" in record else ""]
        if record["kind"] == "event":
            what.append("tables" if "tables" in record else "")
        if record["kind"] == "telemetry":
            what.append(record["role"])
        found[tuple(what)] = shape(record)
    return found


@pytest.mark.waits_for_processes
def test_a_simulated_folder_has_the_files_and_keys_of_a_real_job_that_lost_a_server(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = {
        **TINY,
        "train": {"batch_size": 50, "epochs": 16, "report_every_s": 0.1},
        "checkpoint": {"every_steps": 100},
        "eval": {"every_steps": 100},
        "telemetry": {"every_s": 0.5},
    }
    job, folder = cluster.job(config)
    members = cluster.training(folder)
    checkpoints = folder.path / "checkpoints"
    within(60, lambda: any(checkpoints.glob("step-*/manifest.json")), "no checkpoint", lambda: job.running)
    members["server 1"].kill()
    assert job.end().code == 0, job.printed()
    simulated = write_simulated_run(tmp_path / "simulated", Scene(restarted_server=1, tables=3))
    assert files(simulated) >= files(folder.path)
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        ours_by_kind = record_shapes(simulated / name)
        for what, keys in record_shapes(folder.path / name).items():
            assert ours_by_kind[what] == keys, what
    for name in ("coordinator.json", "members.json", "summary.json"):
        real, ours = (json.loads((run / name).read_text()) for run in (folder.path, simulated))
        assert shape(ours) == shape(real), name
    real_bytes, our_bytes = (
        json.loads((run / "summary.json").read_text())["bytes"] for run in (folder.path, simulated)
    )
    assert our_bytes.keys() == real_bytes.keys()


def test_a_folder_is_the_same_for_the_same_scene_and_another_for_another_seed(tmp_path: Path) -> None:
    first, second, other = (
        write_simulated_run(tmp_path / name, Scene(state="running", slow_worker=1, seed=seed))
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert files(first) == files(second)
    for name in files(first) - {"checkpoints/step-N/manifest.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert (first / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes()


@every("state", STATES)
@every(("servers", "workers"), [(0, 1), (2, 2), (8, 64)], ids=["one process", "small", "large"])
def test_every_state_has_a_config_that_a_job_accepts_and_a_summary_only_at_its_end(
    tmp_path: Path, state: State, servers: int, workers: int
) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(state=state, servers=servers, workers=workers, steps=300))
    assert load_config(run / "config.yaml").workers == workers
    assert (run / "summary.json").exists() == (state in ("finished", "failed", "stopped"))


def test_a_slow_worker_makes_the_others_wait_and_a_high_rate_makes_the_loss_rise(tmp_path: Path) -> None:
    run = write_simulated_run(tmp_path / "run", Scene(workers=4, slow_worker=2, rate_too_high=True))
    telemetry = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    steps = {r["index"]: r["step_ms"] for r in telemetry if r["role"] == "worker"}
    assert steps[2]["backward"] > 2 * steps[0]["backward"]
    assert steps[0]["dense_reduce"] > 2 * steps[2]["dense_reduce"]
    assert abs(steps[0]["total"] - steps[2]["total"]) < 0.1 * steps[2]["total"]
    losses = [r["loss"] for r in telemetry if r["role"] == "worker" and r["index"] == 0]
    assert losses[-1] > losses[0] > min(losses)
