"""Real jobs: simulated run folders have their files and keys, or pages are tested with what no job writes; and their
page in Chromium, over a killed server and a killed coordinator to the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from shardkeep.page.of_job import page_line
from tests.support.browser import Chromium
from tests.support.cluster import Cluster, records, within
from tests.support.configs import TINY
from tests.support.golden import Golden
from tests.support.pages import DRAWN, LIVE, PageAddress, number, rows_of, tile
from tests.support.simulated_runs import Scene, write_simulated_run

OPEN_KEYS = ("bytes", "train_bytes", "fp32_bytes", "wait_ms", "staleness", "sockets", "versions", "machine", "tower")
"""Mappings whose keys depend on the job."""
WATCHED = {
    **TINY,
    "train": {"batch_size": 50, "epochs": 100_000, "report_every_s": 0.2},
    "eval": {"every_steps": 100},
    "checkpoint": {"every_steps": 100},
    "telemetry": {"every_s": 0.5},
    "web": {"page": "127.0.0.1:0"},
}
STATE = "document.querySelector('#state').innerText"


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
    unread = ("recovery", "profile")
    kept = {p for p in found if p.parts[0] not in unread and not p.name.startswith(("standing", "owner-", ".shared"))}
    shown = {p for p in kept if p.parts[0] != "checkpoints" or p.name == "manifest.json"}
    return {str(p) if p.parts[0] != "checkpoints" else "checkpoints/step-N/manifest.json" for p in shown}


def record_shapes(path: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """The shape of one record of each kind: by phase, and by role of telemetry."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        role = record["role"] if record["kind"] == "telemetry" else ""
        found[record["kind"], record.get("phase", ""), role] = shape(record)
    return found


def differences(real: Path, simulated: Path) -> list[str]:
    """What a real job's folder has, and a simulated one has not or has otherwise."""
    found = [f"no file {name}" for name in files(real) - files(simulated)]
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        ours = record_shapes(simulated / name)
        theirs = record_shapes(real / name)
        found += [f"{name}: {kind}: {keys}" for kind, keys in theirs.items() if ours.get(kind) != keys]
    for name in ("coordinator.json", "members.json", "summary.json"):
        theirs, ours = (json.loads((run / name).read_text()) for run in (real, simulated))
        found += [f"{name}: {shape(theirs)}"] if shape(ours) != shape(theirs) else []
        if name == "summary.json" and ours["bytes"].keys() != theirs["bytes"].keys():
            found.append(f"{name}: {list(theirs['bytes'])}")
    return found


@pytest.mark.waits_for_processes
def test_a_simulated_folder_has_the_files_and_keys_of_a_real_job(golden: Golden, tmp_path: Path) -> None:
    simulated = write_simulated_run(tmp_path / "simulated", Scene(tables=3))
    assert differences(golden.folder.path, simulated) == []
    known = {kind for name in ("metrics.jsonl", "telemetry.jsonl") for kind in record_shapes(golden.folder.path / name)}
    assert {kind[0] for kind in known} >= {"event", "progress", "eval", "phase", "telemetry"}


@pytest.mark.slow
@pytest.mark.waits_for_processes
def test_the_page_follows_a_job_over_a_killed_server_and_a_killed_coordinator_to_its_end(
    browser: Chromium, cluster: Cluster, tmp_path: Path
) -> None:
    job, folder = cluster.job(WATCHED)
    within(120, lambda: page_line(folder.path) is not None, "no page", lambda: job.running)
    address = PageAddress(page_line(folder.path) or "")
    with browser.visit() as visit:
        visit.open(address.url)
        visit.wait(LIVE)
        visit.wait(DRAWN)
        members = cluster.training(folder)
        visit.wait(f"{STATE} === 'training'", limit_s=60)
        visit.wait("document.querySelector('#steps table') !== null", limit_s=60)
        visit.wait("document.querySelector('#checkpoints table') !== null", limit_s=60)
        members["server 1"].kill()
        visit.wait("document.querySelector('#warnings').innerText.includes('server 1 died')", limit_s=60)
        visit.wait(f"{STATE} === 'training'", limit_s=60)
        assert visit.problems == []
        members["coordinator 0"].kill()
        visit.wait(f"!({LIVE})", limit_s=60)
        visit.wait(LIVE, limit_s=120)
        visit.wait(f"{STATE} === 'training'", limit_s=60)
        job.signal(signal.SIGINT)
        visit.wait(f"{STATE} === 'stopped'", limit_s=200)
        assert job.end().code == 1, job.printed()
        summary, evaluations = folder.summary() or {}, [r for r in records(folder) if r["kind"] == "eval"]
        assert number(tile(visit, "Step")) == summary["steps"]
        assert number(tile(visit, "AUC")) == pytest.approx(evaluations[-1]["auc"], abs=5e-5)
        assert number(tile(visit, "Recoveries")) == len(summary["recoveries"]) > 1
        assert {row[0]: number(row[1]) > 0 for row in rows_of(visit, "tables")} == dict.fromkeys(
            ("C1", "C2", "C3"), True
        )
        assert visit.hosts() == {address.netloc}
        unreachable = [problem for problem in visit.problems if "ERR_CONNECTION_REFUSED" in problem]
        assert [p for p in visit.problems if p not in unreachable and "ERR_INCOMPLETE_CHUNKED" not in p] == []
    simulated = write_simulated_run(tmp_path / "simulated", Scene(restarted_server=1, tables=3, steps=600))
    real = [shape(record) for record in records(folder)]
    ours = [json.loads(line) for line in (simulated / "metrics.jsonl").read_text().splitlines()]
    of_loss = [record for record in ours if record.get("phase") in ("lost", "recovering", "recovery")]
    assert len(of_loss) == 3 and [record for record in of_loss if shape(record) not in real] == []
