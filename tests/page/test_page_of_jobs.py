"""The page of real jobs in Chromium: from the start over a killed server and a killed coordinator to the end."""

from __future__ import annotations

import json

import pytest

from shardkeep.page.of_job import page_line
from tests.support.browser import Chromium
from tests.support.cluster import Cluster, within
from tests.support.configs import TINY
from tests.support.pages import DRAWN, LIVE, PageAddress, number, rows_of, tile

pytestmark = [pytest.mark.slow, pytest.mark.waits_for_processes]

WATCHED = {
    **TINY,
    "train": {"batch_size": 50, "epochs": 200, "report_every_s": 0.2},
    "eval": {"every_steps": 500},
    "checkpoint": {"every_steps": 500},
    "telemetry": {"every_s": 0.5},
    "web": {"page": "127.0.0.1:0"},
}


def test_the_page_follows_a_job_over_a_killed_server_and_a_killed_coordinator_to_its_end(
    browser: Chromium, cluster: Cluster
) -> None:
    job, folder = cluster.job(WATCHED)
    within(120, lambda: page_line(folder.path) is not None, "no page", lambda: job.running)
    address = PageAddress(page_line(folder.path) or "")
    with browser.visit() as visit:
        visit.open(address.url)
        visit.wait(LIVE)
        visit.wait(DRAWN)
        members = cluster.training(folder)
        checkpoints = folder.path / "checkpoints"
        within(60, lambda: any(checkpoints.glob("step-*/manifest.json")), "no checkpoint", lambda: job.running)
        visit.wait("document.querySelector('#state').innerText === 'training'", limit_s=60)
        visit.wait("document.querySelector('#steps table') !== null", limit_s=60)
        members["server 1"].kill()
        visit.wait("document.querySelector('#warnings').innerText.includes('server 1 died')", limit_s=60)
        visit.wait("document.querySelector('#state').innerText === 'training'", limit_s=60)
        assert visit.problems == []
        members["coordinator 0"].kill()
        visit.wait(f"!({LIVE})", limit_s=60)
        visit.wait(LIVE, limit_s=120)
        visit.wait("document.querySelector('#state').innerText === 'training'", limit_s=60)
        visit.wait("document.querySelector('#state').innerText === 'completed'", limit_s=200)
        assert job.end().code == 0, job.printed()
        summary = folder.summary() or {}
        assert number(tile(visit, "Step")) == summary["steps"]
        assert number(tile(visit, "AUC")) == pytest.approx(summary["eval"]["auc"], abs=5e-5)
        assert number(tile(visit, "Recoveries")) == len(summary["recoveries"]) > 1
        tables = {table["name"]: table["rows"] for table in summary["tables"]}
        assert {row[0]: number(row[1]) for row in rows_of(visit, "tables")} == tables
        assert visit.hosts() == {address.netloc}
        unreachable = [problem for problem in visit.problems if "ERR_CONNECTION_REFUSED" in problem]
        assert [p for p in visit.problems if p not in unreachable and "ERR_INCOMPLETE_CHUNKED" not in p] == []


def test_the_page_of_a_job_in_one_process_shows_its_last_state_when_it_has_ended(
    browser: Chromium, cluster: Cluster
) -> None:
    alone = {
        "servers": 0,
        "workers": 1,
        "web": {**WATCHED["web"], "metrics": "127.0.0.1:0"},
    }  # whose token is kept in a file
    job, folder = cluster.job({**WATCHED, **alone, "train": {**TINY["train"], "epochs": 40}})
    job.line("page")
    with browser.visit() as visit:
        visit.open(page_line(folder.path) or "")
        visit.wait(DRAWN, limit_s=60)
        visit.wait("document.querySelector('#state').innerText === 'completed'", limit_s=200)
        summary = folder.summary() or {}
        assert job.end().code == 0, job.printed()
        assert number(tile(visit, "Step")) == json.loads((folder.path / "summary.json").read_text())["steps"]
        assert number(tile(visit, "AUC")) == pytest.approx(summary["eval"]["auc"], abs=5e-5)
        assert "this is its last state" in visit.text("#connection")
