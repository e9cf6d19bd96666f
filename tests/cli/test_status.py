"""What `shardkeep status` shows of a job that runs, over real gRPC."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardkeep.base.errors import UserError
from shardkeep.cli.status import show_job, show_run
from shardkeep.cli.status_text import show
from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.events import EVENTS_KEPT
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from shardkeep.run.folder import RunFolder
from shardkeep.trust.tokens import put_token
from tests.support.cases import every
from tests.support.control_job import TABLES, Job
from tests.support.recovering import Recovering


def form(job: Job, tables: Sequence[TableSpec] = TABLES) -> None:
    for role, index in job.names:
        job.register(role, index)
    for role, index in job.names:
        job.join(role, index, tables)
    assert job.state.state == "training"


def shown(coordinator: Coordinator) -> str:
    out = io.StringIO()
    with ControlServer(coordinator) as server:
        assert show_job(server.endpoint, partial(show, console=Console(file=out, width=200, color_system=None))) == 0
    return out.getvalue().replace("\n\n", "\n")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_running_job_is_shown_with_its_tables_numbers_and_members() -> None:
    job = Job(workers=1)
    form(job)
    job.coordinator.heartbeat("worker-0-100", step=1234, phase="training")
    told: list[tuple[str, dict[str, Any]]] = [
        ("progress", {"step": 1234, "total_steps": 5000, "loss": 0.5, "samples_per_s": 2e4, "staleness": {"1": 3}}),
        ("eval", {"step": 1000, "auc": 0.78, "logloss": 0.44}),
        ("phase", {"phase": "checkpoint", "step": 1000, "bytes": 9, "text": "step 1,000 is kept"}),
    ]
    for sequence, (kind, record) in enumerate(told, 1):
        job.coordinator.report("worker-0-100", sequence=sequence, kind=kind, record=record)
    assert [cells(line) for line in shown(job.coordinator).splitlines()] == [
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


def test_a_job_that_forms_has_no_tables_to_show() -> None:
    lines = shown(Job().coordinator).splitlines()
    assert lines[0] == "forming" and not any("table" in line for line in lines)


def test_many_tables_are_shown_in_one_line_for_each_kind() -> None:
    job = Job(workers=1)
    form(
        job, [*(TableSpec(name=f"C{i}", dim=16) for i in range(9)), TableSpec(name="x", dim=4, optimizer=AdamConfig())]
    )
    lines = [cells(line) for line in shown(job.coordinator).splitlines()]
    names = ", ".join(f"C{i}" for i in range(9))
    assert [line for line in lines if line[0] == "tables"] == [
        ["tables", f"9 of dim 16, rowwise_adagrad: {names}"],
        ["tables", "1 of dim 4, adam: x"],
    ]


def test_tables_are_shown_of_a_long_job_and_after_a_take_over() -> None:
    job = Recovering(workers=1)
    form(job)
    for sequence in range(1, EVENTS_KEPT + 10):
        job.coordinator.report("worker-0-100", sequence=sequence, kind="event", record={"text": "so it is"})
    events = job.coordinator.status().events
    assert len(events) == EVENTS_KEPT + 1 and all(a["seq"] < b["seq"] for a, b in pairwise(events))
    assert "table item" in shown(job.coordinator)
    job.coordinator = job.another(job.sink.kept)
    assert "table item" in shown(job.coordinator)


@every(
    ("launched", "next_step"),
    [
        (True, "the process that started the job starts them"),
        (False, "start worker 1 on 10.0.0.7: shardkeep worker --"),
    ],
    ids=["a launcher", "by hand"],
)
def test_who_is_awaited_until_when_and_what_to_do_is_shown(launched: bool, next_step: str) -> None:
    job = Recovering(workers=2)
    form(job)
    job.kill("worker", 1)
    job.pass_time(20, alive=[("server", 0), ("worker", 0)])
    out = io.StringIO()
    with ControlServer(job.coordinator) as server:
        show_job(
            server.endpoint, partial(show, console=Console(file=out, width=60, color_system=None)), launched=launched
        )
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("recovering: worker 1 (pid 100 on 10.0.0.7) ended: killed by SIGKILL")
    assert "worker 1 (not replaced)" in lines[1] and lines[2].startswith("the job fails in 100 s if")
    assert lines[3].startswith(next_step)


def test_a_silent_member_gets_no_time_for_loading_and_a_hint_to_start_it() -> None:
    job = Recovering(workers=2)
    form(job)
    job.come_back("worker", 0, after=1)  # it lost worker 1, whose lease still runs
    job.pass_time(7, alive=[("server", 0), ("worker", 0)])
    out = io.StringIO()
    with ControlServer(job.coordinator) as server:
        show_job(server.endpoint, partial(show, console=Console(file=out, width=60, color_system=None)), launched=False)
    assert "the job fails in 113 s if they do not join" in out.getvalue()
    assert "worker 1 (pid 100 on 10.0.0.7) sent no heartbeat for 7 s: if it is dead, start it now" in out.getvalue()


def test_a_coordinator_with_tls_is_not_called_dead_when_the_option_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    command = ["shardkeep", "coordinator", "config.yaml", "--continue", "--tls", "/tls/10.9.0.1"]
    folder.coordinator("127.0.0.1:1", pid=os.getpid(), command=command)
    put_token(folder.path, "t" * 64)
    with pytest.raises(UserError, match=r"uses TLS: add --tls /tls/10\.9\.0\.1"):
        show_run(folder.path, partial(show, console=Console(file=io.StringIO())))


def test_the_number_of_the_start_is_shown_of_a_resumed_job(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.finished("stopped", "", None)
    RunFolder.reopen(folder.path, JobConfig(), step=800, samples=8000)
    out, job = io.StringIO(), Job(workers=1)
    form(job)
    with ControlServer(job.coordinator) as server:
        show_job(
            server.endpoint, partial(show, console=Console(file=out, width=200, color_system=None)), run=folder.path
        )
    assert cells(out.getvalue().splitlines()[1]) == [
        "start",
        "2 of this job, from step 800; recoveries count from this start",
    ]


def test_a_server_near_its_memory_is_named_below_the_state() -> None:
    job = Job(workers=1)
    form(job)
    (server,) = (f"{role}-{index}-100" for role, index in job.names if role == "server" and index == 0)
    record = {"text": "warning: server 0 has 3.7 GB in RAM", "memory": {"bytes": 1, "limit_bytes": 1, "near": True}}
    job.coordinator.report(server, sequence=1, kind="event", record=record)
    lines = shown(job.coordinator).splitlines()
    assert lines[:2] == ["training", "warning: server 0 has 3.7 GB in RAM"] and lines[2].startswith("generation")
    calm = {"text": "server 0 has 1 GB", "memory": {"bytes": 1, "limit_bytes": 1, "near": False}}
    job.coordinator.report(server, sequence=2, kind="event", record=calm)
    assert "in RAM" not in shown(job.coordinator)
