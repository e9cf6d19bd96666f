"""What `shardkeep status` shows of a job: of one that runs, over real gRPC; its board of processes on a terminal and
through a pipe; and all of it as JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkeep.cli.board import COLUMNS, RoleLine, board, lines_of
from shardkeep.cli.status import show_job, show_run
from shardkeep.cli.status_facts import EMPTY, of_running
from shardkeep.cli.status_text import show
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.events import EVENTS_KEPT
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.records import JobStatus, MemberStatus
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.records.json_text import to_json
from shardkeep.run.folder import RunFolder
from shardkeep.view.run_view import RunView
from shardkeep.view.screen import console
from tests.support.cases import every
from tests.support.control_job import TABLES, Job
from tests.support.recovering import Recovering


def form(job: Job, tables: Sequence[TableSpec] = TABLES) -> None:
    for role, index in job.names:
        job.register(role, index)
    for role, index in job.names:
        job.join(role, index, tables)
    assert job.state.state == "training"


def shown(coordinator: Coordinator, *, width: int = 200, **options: Any) -> list[str]:
    out = io.StringIO()
    view = partial(show, console=Console(file=out, width=width, color_system=None))
    with ControlServer(coordinator) as server:
        assert show_job(server.endpoint, view, **options) == 0
    return out.getvalue().replace("\n\n", "\n").splitlines()


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_a_running_job_is_shown_with_its_tables_numbers_and_members() -> None:
    job = Job(workers=1)
    lines = shown(job.coordinator)
    assert lines[0] == "forming" and not any("table" in line for line in lines)
    form(job)
    job.coordinator.heartbeat("worker-0-100", step=1234, phase="training")
    records: list[tuple[str, dict[str, Any]]] = [
        ("progress", {"step": 1234, "total_steps": 5000, "loss": 0.5, "samples_per_s": 2e4, "staleness": {"1": 3}}),
        ("eval", {"step": 1000, "auc": 0.78, "logloss": 0.44}),
        ("phase", {"phase": "checkpoint", "step": 1000, "bytes": 9, "text": "step 1,000 is kept"}),
    ]
    for sequence, (kind, record) in enumerate(records, 1):
        job.coordinator.report("worker-0-100", sequence=sequence, kind=kind, record=record)
    assert [cells(line) for line in shown(job.coordinator)] == [
        ["training"],
        ["generation", "1"],
        ["table user", "dim 8, rowwise_adagrad"],
        ["table item", "dim 16, rowwise_adagrad"],
        ["step", "1,234/5,000"],
        ["loss", "0.5000"],
        ["speed", "20,000 samples/s"],
        ["evaluation", "step 1,000", "AUC 0.7800", "logloss 0.4400"],
        ["staleness", "1.00 steps on average, 1 at most (worker 0)"],
        ["checkpoint", "step 1,000 is kept"],
        ["role", "state", "step", "rate", "memory", "heartbeat", "pid", "host"],
        ["coordinator", "training", "-", "-", "-", "0.0 s ago", "-", "-"],
        ["server 0", "joined", "-", "-", "-", "0.0 s ago", "100", "10.0.0.7"],
        ["worker 0", "training", "1,234", "-", "-", "0.0 s ago", "100", "10.0.0.7"],
    ]


def test_many_tables_are_shown_in_one_line_for_each_kind() -> None:
    job = Job(workers=1)
    names = [f"C{i}" for i in range(9)]
    form(job, [*(TableSpec(name=name, dim=16) for name in names), TableSpec(name="x", dim=4, optimizer=AdamConfig())])
    assert [cells(line) for line in shown(job.coordinator) if line.startswith("tables")] == [
        ["tables", f"9 of dim 16, rowwise_adagrad: {', '.join(names)}"],
        ["tables", "1 of dim 4, adam: x"],
    ]


def test_tables_are_shown_of_a_long_job_and_after_a_take_over() -> None:
    job = Recovering(workers=1)
    form(job)
    for sequence in range(1, EVENTS_KEPT + 10):
        job.coordinator.report("worker-0-100", sequence=sequence, kind="event", record={"text": "so it is"})
    events = job.coordinator.status().events
    assert len(events) == EVENTS_KEPT + 1 and all(a["seq"] < b["seq"] for a, b in pairwise(events))
    for coordinator in (job.coordinator, job.another(job.sink.kept)):
        assert any(line.startswith("table item") for line in shown(coordinator))


@every(
    ("launched", "next_step"),
    [
        (True, "the process that started the job starts them"),
        (False, "start worker 1 on 10.0.0.7: shardkeep worker --"),
    ],
)
def test_who_is_awaited_until_when_and_what_to_do_is_shown(launched: bool, next_step: str) -> None:
    job = Recovering(workers=2)
    form(job)
    job.kill("worker", 1)
    job.pass_time(20, alive=[("server", 0), ("worker", 0)])
    lines = shown(job.coordinator, width=60, launched=launched)
    assert lines[0].startswith("recovering: worker 1 (pid 100 on 10.0.0.7) ended: killed by SIGKILL")
    assert "worker 1 (not replaced)" in lines[1] and lines[2].startswith("the job fails in 100 s if")
    assert lines[3].startswith(next_step)


def test_a_silent_member_gets_no_time_for_loading_and_a_hint_to_start_it() -> None:
    job = Recovering(workers=2)
    form(job)
    job.come_back("worker", 0, after=1)  # it lost worker 1, whose lease still runs
    job.pass_time(7, alive=[("server", 0), ("worker", 0)])
    text = "\n".join(shown(job.coordinator, width=60, launched=False))
    assert "the job fails in 113 s if they do not join" in text
    assert "worker 1 (pid 100 on 10.0.0.7) sent no heartbeat for 7 s: if it is dead, start it now" in text


def test_the_start_of_a_resumed_job_and_a_server_near_its_memory_are_named_below_the_state(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.finished("stopped", "", None)
    RunFolder.reopen(folder.path, JobConfig(), step=800, samples=8000)
    job = Job(workers=1)
    form(job)
    full = {"time": "2026-01-01T00:00:00", "every_s": 5.0, "rss_bytes": 92, "limit_bytes": 100}
    job.coordinator.report("server-0-100", sequence=1, kind="telemetry", record=full)
    lines = shown(job.coordinator, run=folder.path)
    assert lines[:2] == ["training", "server 0 uses 92 % of its memory limit"]
    assert cells(lines[2]) == ["start", "2 of this job, from step 800; recoveries count from this start"]
    job.coordinator.report("server-0-100", sequence=2, kind="telemetry", record=full | {"rss_bytes": 50})
    assert not any("memory limit" in line for line in shown(job.coordinator))


# ---- the board of processes ----

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
    members = [MemberStatus("server", 0, "10.9.0.1", 6, "joined", 0.2)]
    members += [
        MemberStatus("worker", i, "10.9.0.2", 7, "joined", 0.4, 1200 + i % 2, "training") for i in range(workers)
    ]
    server = {"role": "server", "index": 0, "pid": 6, "step": 1199, "request_ms": 0.4567, "rss_bytes": 3e9}
    own = {"role": "coordinator", "index": 0, "pid": 5, "host": "10.9.0.1", "rss_bytes": 90e6, "state": "training"}
    records = (own, server, *({**WORKER, "index": i, "step_ms": {"total": 40.0 + i}} for i in range(workers)))
    return JobStatus("training", "", None, 3, members=tuple(members), telemetry=records)


def board_of(status: JobStatus, *, width: int = 200, terminal: bool = True) -> list[str]:
    view = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    return [line.plain for line in board(lines_of(RunView.of(None, status)), view)]


def test_each_process_has_a_line_with_its_figures_and_none_of_the_process_before() -> None:
    status = job_of(2)
    assert [cells(line) for line in board_of(status)] == [
        list(COLUMNS),
        ["coordinator", "training", "-", "-", "90.0 MB", "0.0 s ago", "5", "10.9.0.1"],
        ["server 0", "joined", "1,199", "0.46 ms/request", "3.0 GB", "0.2 s ago", "6", "10.9.0.1"],
        ["worker 0", "training", "1,200", "25.0 steps/s", "512.0 MB (3 %)", "0.4 s ago", "7", "10.9.0.2"],
        ["worker 1", "training", "1,201", "24.4 steps/s", "512.0 MB (3 %)", "0.4 s ago", "7", "10.9.0.2"],
    ]
    after = replace(status, members=(*status.members[:2], replace(status.members[2], pid=8, step=-1)))
    assert cells(board_of(after)[-1]) == ["worker 1", "training", "-", "-", "-", "0.4 s ago", "8", "10.9.0.2"]


def test_64_workers_share_a_line_on_a_terminal_but_for_those_that_differ_and_have_one_each_in_a_pipe() -> None:
    members = list(job_of(64).members)
    members[1 + 12] = replace(members[1 + 12], condition="lost", age_s=16.0)
    members[1 + 40] = replace(members[1 + 40], age_s=5.5)
    status = replace(job_of(64), members=tuple(members))
    assert [cells(line) for line in board_of(status)[3:]] == [
        [
            "workers 0-11, 13-39, 41-63", "training", "1,200 to 1,201", "9.7 to 25.0 steps/s", "up to 512.0 MB (3 %)",
            "up to 0.4 s ago", "62 processes", "10.9.0.2",
        ],
        ["worker 12", "lost", "1,200", "19.2 steps/s", "512.0 MB (3 %)", "16.0 s ago", "7", "10.9.0.2"],
        ["worker 40", "training", "1,200", "12.5 steps/s", "512.0 MB (3 %)", "5.5 s ago", "7", "10.9.0.2"],
    ]  # fmt: skip
    lines = board_of(status, width=80, terminal=False)
    assert len(lines) == 1 + 66 and all(len(cells(line)) == len(COLUMNS) for line in lines)


@every(("width", "last"), [(120, "host"), (84, "pid"), (80, "pid"), (76, "heartbeat")])
def test_a_narrow_terminal_drops_the_last_columns(width: int, last: str) -> None:
    lines = board_of(job_of(2), width=width)
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


# ---- JSON ----


class AsJson:
    """A view of `show_run` and `show_job`: the facts of each call, as their JSON has them."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def __call__(self, facts: Any, _: object) -> None:
        self.found.append(json.loads(to_json(facts)))
        assert self.found[-1].keys() == EMPTY.keys()


def test_json_has_the_figures_of_a_running_job() -> None:
    job, view = Job(workers=1), AsJson()
    form(job)
    progress = {"step": 100, "total_steps": 300, "samples": 6400, "loss": 0.5, "samples_per_s": 640.0}
    job.coordinator.report("worker-0-100", sequence=1, kind="progress", record=progress)
    job.coordinator.report("worker-0-100", sequence=2, kind="eval", record={"step": 90, "auc": 0.75})
    with ControlServer(job.coordinator) as server:
        assert show_job(server.endpoint, view) == 0
    (found,) = view.found
    assert (found["state"], found["step"], found["time_left_s"]) == ("training", 100, 20.0)
    assert found["evaluation"] == {"step": 90, "auc": 0.75} and found["tables"][0]["name"] == "user"
    assert [(role["role"], role["index"], role["state"]) for role in found["roles"]] == [
        ("coordinator", 0, "training"),
        ("server", 0, "joined"),
        ("worker", 0, "joined"),
    ]


@every(("status", "code"), [("completed", 0), ("stopped", 1), ("failed", 1)])
def test_json_has_the_summary_of_a_job_that_is_over(tmp_path: Path, status: str, code: int) -> None:
    folder, view = RunFolder.create(tmp_path / "run", JobConfig()), AsJson()
    folder.finished(status, "so it is", {"steps": 7, "samples": 70})
    assert show_run(folder.path, view) == code
    (found,) = view.found
    assert (found["state"], found["message"], found["step"]) == (status, "so it is", 7)
    assert found["summary"] == folder.summary() and found["run"] == str(folder.path)
    assert (found["resume"] is None) == (status == "completed")


@every("servers", [0, 1], ids=["in one process", "in processes, which nobody can name"])
def test_a_job_without_a_coordinator_that_answers_has_what_its_folder_has(tmp_path: Path, servers: int) -> None:
    folder, view = RunFolder.create(tmp_path / "run", parse_config(f"{{servers: {servers}, workers: 1}}")), AsJson()
    folder.progress({"step": 3, "total_steps": 9})
    folder.telemetry({"time": "2026-11-25T05:00:00.000", **WORKER, "index": 0})
    text = io.StringIO()
    with folder.held():
        assert show_run(folder.path, view) == servers
        as_text = partial(show, console=Console(file=text, width=200, color_system=None))
        assert show_run(folder.path, as_text) == servers
    assert show_run(folder.path, view) == 1
    folder.finished("stopped", "so it is", {"steps": 7, "samples": 70})
    assert show_run(folder.path, view) == 1
    live, killed, stopped = view.found
    assert [each["state"] for each in view.found] == ["unreachable" if servers else "training", "killed", "stopped"]
    assert [each["step"] for each in view.found] == [3, 3, 7] and not killed["roles"] and not stopped["roles"]
    assert killed["message"] == "no process of this job is left"
    assert killed["resume"].startswith("nothing to resume from")
    if servers:
        assert not live["roles"]
    else:
        assert (live["roles"][0]["steps_per_s"], live["roles"][0]["rss_bytes"]) == (25.0, 512_000_000)
        lines = text.getvalue().splitlines()
        assert lines[0] == "running in one process" and cells(lines[1]) == ["step", "3/9"]
        assert "25.0 steps/s" in text.getvalue()


def test_the_reference_explains_every_key() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "status.md").read_text(encoding="utf-8")
    for key in (*EMPTY, *asdict(RoleLine("worker", 0, "lost"))):
        assert f"| `{key}` |" in text, key
