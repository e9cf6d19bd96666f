"""The board of `shardkeep status`: with many processes, on a terminal and through a pipe, and as JSON."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkeep.cli.board import COLUMNS, RoleLine, board, lines_of
from shardkeep.cli.status import StatusView, show_job, show_run
from shardkeep.cli.status_facts import EMPTY, of_running
from shardkeep.cli.status_text import show
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.records import JobStatus, MemberStatus
from shardkeep.records.json_text import to_json
from shardkeep.run.folder import RunFolder
from shardkeep.run.summary import Summary
from shardkeep.view.run_view import RunView
from shardkeep.view.screen import console
from tests.support.cases import every
from tests.support.control_job import Job

BEFORE = Path(__file__).resolve().parents[1] / "config" / "golden" / "run"
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "status.md"
WORKER = {
    "kind": "telemetry",
    "role": "worker",
    "pid": 7,
    "step": 1200,
    "step_ms": {"total": 40.0},
    "rss_bytes": 512_000_000,
    "limit_bytes": 16_000_000_000,
}


def job_of(workers: int) -> JobStatus:
    """Of a job that trains, with one server."""
    members = [MemberStatus("server", 0, "10.9.0.1", 6, "joined", 0.2)]
    members += [
        MemberStatus("worker", i, "10.9.0.2", 7, "joined", 0.4, 1200 + i % 2, "training") for i in range(workers)
    ]
    server = {"role": "server", "index": 0, "pid": 6, "step": 1199, "request_ms": 0.4567, "rss_bytes": 3e9}
    own = {"role": "coordinator", "index": 0, "pid": 5, "host": "10.9.0.1", "rss_bytes": 90e6, "state": "training"}
    records = (own, server, *({**WORKER, "index": i, "step_ms": {"total": 40.0 + i}} for i in range(workers)))
    return JobStatus("training", "", None, 3, members=tuple(members), telemetry=records)


def shown(lines: list[RoleLine], *, width: int = 200, terminal: bool = True) -> list[str]:
    view = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    return [line.plain for line in board(lines, view)]


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line)


def test_each_process_has_a_line_with_its_figures() -> None:
    assert [cells(line) for line in shown(lines_of(RunView.of(None, job_of(2))))] == [
        list(COLUMNS),
        ["coordinator", "training", "-", "-", "90.0 MB", "0.0 s ago", "5", "10.9.0.1"],
        ["server 0", "joined", "1,199", "0.46 ms/request", "3.0 GB", "0.2 s ago", "6", "10.9.0.1"],
        ["worker 0", "training", "1,200", "25.0 steps/s", "512.0 MB (3 %)", "0.4 s ago", "7", "10.9.0.2"],
        ["worker 1", "training", "1,201", "24.4 steps/s", "512.0 MB (3 %)", "0.4 s ago", "7", "10.9.0.2"],
    ]


def test_figures_of_the_process_before_are_not_shown() -> None:
    status = job_of(1)
    after = replace(status, members=(*status.members[:1], replace(status.members[1], pid=8, step=-1)))
    lines = shown(lines_of(RunView.of(None, after)))
    assert cells(lines[-1]) == ["worker 0", "training", "-", "-", "-", "0.4 s ago", "8", "10.9.0.2"]


def test_64_workers_share_a_line_on_a_terminal_but_for_those_that_differ() -> None:
    status = job_of(64)
    members = list(status.members)
    members[1 + 12] = replace(members[1 + 12], condition="lost", age_s=16.0)
    members[1 + 40] = replace(members[1 + 40], age_s=5.5)
    lines = shown(lines_of(RunView.of(None, replace(status, members=tuple(members)))))
    assert [cells(line) for line in lines[3:]] == [
        [
            "workers 0-11, 13-39, 41-63", "training", "1,200 to 1,201", "9.7 to 25.0 steps/s", "up to 512.0 MB (3 %)",
            "up to 0.4 s ago", "62 processes", "10.9.0.2",
        ],
        ["worker 12", "lost", "1,200", "19.2 steps/s", "512.0 MB (3 %)", "16.0 s ago", "7", "10.9.0.2"],
        ["worker 40", "training", "1,200", "12.5 steps/s", "512.0 MB (3 %)", "5.5 s ago", "7", "10.9.0.2"],
    ]  # fmt: skip


def test_a_pipe_gets_every_process_and_every_column() -> None:
    lines = shown(lines_of(RunView.of(None, job_of(64))), width=80, terminal=False)
    assert len(lines) == 1 + 66 and all(len(cells(line)) == len(COLUMNS) for line in lines)


@every(("width", "last"), [(120, "host"), (84, "pid"), (80, "pid"), (76, "heartbeat")])
def test_a_narrow_terminal_drops_the_last_columns(width: int, last: str) -> None:
    lines = shown(lines_of(RunView.of(None, job_of(2))), width=width)
    assert cells(lines[0])[-1] == last and max(map(len, lines)) <= width


def test_no_line_is_wrapped_or_cut_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a_long_name_of_a_table_{i}" for i in range(300)]
    tables = [{"name": name, "dim": 8, "optimizer": "adam"} for name in names]
    status = replace(job_of(64), message="why " * 400, events=({"kind": "event", "text": "formed", "tables": tables},))
    show(of_running(status, None), ["training: " + status.message], console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("why") == 400
    assert [line.split()[0] for line in lines[:3]] == ["training:", "generation", "tables"]
    assert lines[2].endswith(names[-1]) and len(lines) == 3 + 1 + 1 + 66


def into(out: list[str]) -> StatusView:
    return lambda facts, _: out.append(to_json(facts))


def loads(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert found.keys() == EMPTY.keys()
    return found


def test_json_has_the_figures_of_a_running_job() -> None:
    job, out = Job(workers=1), list[str]()
    for role, index in job.names:
        job.register(role, index)
    for role, index in job.names:
        job.join(role, index)
    progress = {"step": 100, "total_steps": 300, "samples": 6400, "loss": 0.5, "samples_per_s": 640.0}
    job.coordinator.report("worker-0-100", sequence=1, kind="progress", record=progress)
    job.coordinator.report("worker-0-100", sequence=2, kind="eval", record={"step": 90, "auc": 0.75})
    with ControlServer(job.coordinator) as server:
        assert show_job(server.endpoint, into(out)) == 0
    found = loads(*out)
    assert (found["state"], found["step"], found["time_left_s"]) == ("training", 100, 20.0)
    assert found["evaluation"] == {"step": 90, "auc": 0.75} and found["tables"][0]["name"] == "user"
    assert [(role["role"], role["index"], role["state"]) for role in found["roles"]] == [
        ("coordinator", 0, "training"),
        ("server", 0, "joined"),
        ("worker", 0, "joined"),
    ]


@every(("status", "code"), [("completed", 0), ("stopped", 1), ("failed", 1)])
def test_json_has_the_summary_of_a_job_that_is_over(tmp_path: Path, status: str, code: int) -> None:
    folder, out = RunFolder.create(tmp_path / "run", JobConfig()), list[str]()
    folder.finished(status, "so it is", {"steps": 7, "samples": 70})
    assert show_run(folder.path, into(out)) == code
    found = loads(*out)
    assert (found["state"], found["message"], found["step"]) == (status, "so it is", 7)
    assert found["summary"] == folder.summary() and found["run"] == str(folder.path)
    assert (found["resume"] is None) == (status == "completed")


def test_json_of_a_run_of_before_has_its_summary_as_it_stands() -> None:
    """Of a run folder of an earlier version."""
    out: list[str] = []
    assert show_run(BEFORE, into(out)) == 0
    found, summary = loads(*out), json.loads((BEFORE / "summary.json").read_text())
    assert found["summary"] == summary == Summary.model_validate(summary).to_dict()
    assert (found["state"], found["step"], found["samples"]) == ("completed", summary["steps"], summary["samples"])
    assert (found["tables"], found["recoveries"], found["resume"]) == (summary["tables"], 0, None)
    assert (found["total_steps"], found["evaluation"]["auc"]) == (summary["steps"], summary["eval"]["auc"])


def test_json_of_jobs_without_a_coordinator_that_answers(tmp_path: Path) -> None:
    folder, out = RunFolder.create(tmp_path / "run", parse_config("{servers: 0, workers: 1}")), list[str]()
    folder.progress({"step": 3, "total_steps": 9})
    folder.telemetry({"time": "2026-11-25T05:00:00.000", **WORKER, "index": 0})
    with folder.held():
        assert show_run(folder.path, into(out)) == 0
        text = io.StringIO()
        assert show_run(folder.path, partial(show, console=Console(file=text, width=200, color_system=None))) == 0
    assert show_run(folder.path, into(out)) == 1
    alone, killed = map(loads, out)
    assert (alone["state"], alone["step"]) == ("training", 3)
    assert (alone["roles"][0]["steps_per_s"], alone["roles"][0]["rss_bytes"]) == (25.0, 512_000_000)
    assert "25.0 steps/s" in text.getvalue()
    assert (killed["state"], killed["message"]) == ("killed", "no process of this job is left")
    assert killed["resume"].startswith("nothing to resume from")


def test_json_of_a_job_whose_processes_nobody_can_name_has_an_empty_list_of_roles(tmp_path: Path) -> None:
    folder, out = RunFolder.create(tmp_path / "run", JobConfig(servers=1, workers=1)), list[str]()
    folder.progress({"step": 3, "total_steps": 9})
    folder.telemetry({"time": "2026-11-25T05:00:00.000", **WORKER, "index": 0})
    with folder.held():  # its coordinator does not answer
        assert show_run(folder.path, into(out)) == 1
    assert show_run(folder.path, into(out)) == 1
    folder.finished("stopped", "so it is", {"steps": 7, "samples": 70})
    assert show_run(folder.path, into(out)) == 1
    found = [loads(text) for text in out]
    assert [(each["state"], each["roles"]) for each in found] == [("unreachable", []), ("killed", []), ("stopped", [])]
    assert [each["step"] for each in found] == [3, 3, 7]


def test_the_reference_explains_every_key() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for key in (*EMPTY, *asdict(RoleLine("worker", 0, "lost"))):
        assert f"| `{key}` |" in text, key
