"""Telemetry records: how often they are made, what the coordinator takes, and what Status shows of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardkeep.base.errors import ProtocolError
from shardkeep.config import JobConfig
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status
from shardkeep.ps.control.grpc.server import TICK_S, ControlServer
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.control.records import Record
from shardkeep.ps.control.telemetry import TelemetryRecords, record_interval_s
from shardkeep.records.telemetry import check_record
from tests.support.cases import every
from tests.support.control_job import Job, ListSink, formed

LIMIT_S = 90.0
RECORD: Record = {"time": "2026-01-01T00:00:00.000", "every_s": 5.0, "step": 7}


def test_a_record_is_made_of_the_figures_now_and_then_once_an_interval_and_when_its_process_ends() -> None:
    now, asked = [0.0], 0
    sent: list[tuple[str, Record]] = []

    def figures() -> Record:
        nonlocal asked
        asked += 1
        return {"asked": asked}

    def records(every_s: float) -> TelemetryRecords | None:
        return TelemetryRecords.every(
            every_s,
            figures=figures,
            record=lambda now, last: {"asked": now["asked"], "since": now["asked"] - last["asked"]},
            report=lambda kind, record: sent.append((kind, record)),
            clock=lambda: now[0],
        )

    assert records(0.0) is None and asked == 0
    timed = records(5.0)
    assert timed is not None
    for now[0] in (1.0, 4.9, 5.0, 5.1, 9.9, 10.0):
        timed.look()
    assert [kind for kind, _ in sent] == ["telemetry", "telemetry"]
    assert [(record["asked"], record["since"]) for _, record in sent] == [(2, 1), (3, 1)]
    assert all(record["every_s"] == 5.0 and record["time"].startswith("20") for _, record in sent)
    now[0] = 11.0
    timed.send()
    now[0] = 15.5
    timed.look()
    assert len(sent) == 3


@every(
    ("every_s", "members", "interval_s"),
    [(5.0, (2, 2), 5.0), (5.0, (40, 160), 20.0), (0.1, (1, 1), 0.2), (0.0, (40, 160), 0.0)],
    ids=["small", "large", "often", "off"],
)
def test_the_interval_grows_with_the_members(every_s: float, members: tuple[int, int], interval_s: float) -> None:
    servers, workers = members
    assert record_interval_s(every_s, servers=servers, workers=workers) == interval_s
    config = JobConfig.model_validate(
        {"servers": servers, "workers": workers, "telemetry": {"every_s": every_s or "off"}}
    )
    assert config.telemetry_s == interval_s


@every(
    ("change", "key"),
    [
        ({"time": None}, "time: None"),
        ({"every_s": "5"}, "every_s: '5'"),
        ({"step": "<b>7</b>"}, "step: '<b>7</b>'"),
        ({"step": True}, "step: True"),
        ({"loss": []}, r"loss: \[\]"),
        ({"bytes": 3}, "bytes: 3"),
        ({"tables": {}}, "tables: {}"),
        ({"metrics": 9090}, "metrics: 9090"),
        ({"rss_bytes": None}, "rss_bytes: None"),
    ],
)
def test_a_garbage_record_is_refused_with_its_sender_and_its_key(change: dict[str, Any], key: str) -> None:
    job = formed(Job())
    with pytest.raises(ProtocolError, match=rf"^worker 0 \(pid .*\) reported telemetry with {key}; allowed: "):
        job.coordinator.report("worker-0-100", sequence=1, kind="telemetry", record=RECORD | change)
    assert job.sink.of("telemetry") == [] and job.coordinator.status().telemetry == ()
    assert job.state.state == "training"


def test_a_record_may_lack_keys_and_have_others_but_not_speak_for_another() -> None:
    check_record(RECORD | {"colour": "red"}, "worker 0")
    with pytest.raises(ProtocolError, match="time"):
        check_record({}, "worker 0")

    job = formed(Job())
    false = {"role": "coordinator", "index": 9, "pid": 1, "host": "elsewhere", "kind": "eval"}
    job.coordinator.report("worker-1-100", sequence=1, kind="telemetry", record=RECORD | false)
    (record,) = job.coordinator.status().telemetry
    assert (record["kind"], record["role"], record["index"], record["pid"]) == ("telemetry", "worker", 1, 100)
    assert record["host"] != "elsewhere"


class Saves(ListSink):
    def standing(self, record: Record) -> None:
        super().standing(record)
        self.calls.append(("standing", 0))


def test_status_has_the_newest_record_of_each_process_the_sink_has_all_and_no_state_is_saved() -> None:
    job = formed(Job(sink=Saves()))
    before = len(job.sink.of("standing"))
    for sequence, step in enumerate((7, 8), start=1):
        for token in ("worker-1-100", "worker-0-100", "server-0-100"):
            job.coordinator.report(token, sequence=sequence, kind="telemetry", record=RECORD | {"step": step})
    job.coordinator.take_telemetry(RECORD | {"state": "training"})
    newest = job.coordinator.status().telemetry
    assert [(record["role"], record["index"], record.get("step")) for record in newest] == [
        ("coordinator", 0, 7),
        ("server", 0, 8),
        ("worker", 0, 8),
        ("worker", 1, 8),
    ]
    assert [record["step"] for _, record in job.sink.of("telemetry")] == [7, 7, 7, 8, 8, 8, 7]
    assert job.sink.of("event")[-1][1]["kind"] != "telemetry"
    assert len(job.sink.of("standing")) == before


@contextmanager
def served(*, telemetry_s: float = 0.0) -> Iterator[tuple[ControlServer, ListSink, ControlClient]]:
    """A coordinator of one worker over gRPC, and the worker."""
    sink = ListSink()
    deadlines = JobDeadlines(lease_s=LIMIT_S, form_s=60.0)
    spec = JobSpec("name: job\n", 0, 1, deadlines, telemetry_s=telemetry_s, metrics="http://m")
    coordinator = Coordinator(spec, open_store=lambda _: ("127.0.0.1", 4000), sink=sink)
    with ControlServer(coordinator) as server, ControlClient(server.endpoint, role="worker", index=0) as worker:
        worker.register()
        yield server, sink, worker


def test_records_cross_the_wire_and_the_coordinator_makes_its_own() -> None:
    with served(telemetry_s=0.01) as (server, sink, worker):
        worker.report("telemetry", RECORD | {"loss": None})
        worker.flush(timeout_s=LIMIT_S)
        assert sink.of("telemetry")
        worker.start_heartbeats()
        while not (own := [r for r in fetch_status(server.endpoint).telemetry if r["role"] == "coordinator"]):
            assert worker.state.state == "forming"
        mine = next(r for r in fetch_status(server.endpoint).telemetry if r["role"] == "worker")
    assert (mine["step"], mine["loss"]) == (7, None)
    assert own[0]["state"] == "forming" and own[0]["metrics"] == "http://m"
    assert own[0]["members"] == 1 and 0 < own[0]["rss_bytes"] < own[0]["limit_bytes"]


def test_a_refused_record_does_not_fail_its_member_and_without_an_interval_the_coordinator_makes_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served() as (server, sink, worker), caplog.at_level(logging.WARNING):
        worker.report("telemetry", {"nonsense": 1})
        worker.report("telemetry", {"nonsense": 2})
        worker.report("progress", {"step": 3})
        worker.flush(timeout_s=LIMIT_S)
        assert sink.kept is not None
        token = str(sink.kept["seats"][0]["token"])
        server.coordinator.heartbeat(token, seen=server.coordinator.state.version, wait_s=2 * TICK_S)
    assert [record["step"] for _, record in sink.of("progress")] == [3] and sink.of("telemetry") == []
    assert len([r for r in caplog.records if "telemetry refused" in r.getMessage()]) == 1
