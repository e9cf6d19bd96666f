"""Telemetry records: how often they are made, what the coordinator takes, and what Status shows of them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
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


class Process:
    """Figures that count how often somebody asks for them, and a clock that the test turns."""

    def __init__(self, every_s: float) -> None:
        self.now = 0.0
        self.asked = 0
        self.sent: list[tuple[str, Record]] = []
        self.records = TelemetryRecords.every(
            every_s,
            figures=self._figures,
            record=lambda now, last: {"asked": now["asked"], "since": now["asked"] - last["asked"]},
            report=lambda kind, record: self.sent.append((kind, record)),
            clock=lambda: self.now,
        )

    def _figures(self) -> Record:
        self.asked += 1
        return {"asked": self.asked}


def test_a_record_is_made_of_the_figures_now_and_those_of_the_last_record_once_an_interval() -> None:
    process = Process(5.0)
    assert process.records is not None
    for process.now in (1.0, 4.9, 5.0, 5.1, 9.9, 10.0):
        process.records.look()
    assert [kind for kind, _ in process.sent] == ["telemetry", "telemetry"]
    assert [(record["asked"], record["since"]) for _, record in process.sent] == [(2, 1), (3, 1)]
    assert all(record["every_s"] == 5.0 and record["time"].startswith("20") for _, record in process.sent)


def test_a_last_record_is_made_whenever_its_process_ends_and_without_an_interval_there_is_none() -> None:
    process = Process(5.0)
    assert process.records is not None
    process.now = 1.0
    process.records.send()
    process.now = 5.5
    process.records.look()
    assert len(process.sent) == 1
    none = Process(0.0)
    assert none.records is None and none.asked == 0


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


def test_status_has_the_newest_record_of_each_process_and_the_sink_has_all() -> None:
    job = formed(Job())
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


def test_telemetry_saves_no_state() -> None:
    class Saves(ListSink):
        def standing(self, record: Record) -> None:
            super().standing(record)
            self.calls.append(("standing", 0))

    job = formed(Job(sink=Saves()))
    before = len(job.sink.of("standing"))
    job.coordinator.report("worker-0-100", sequence=1, kind="telemetry", record=RECORD)
    assert len(job.sink.of("standing")) == before


def served(stack: ExitStack, *, telemetry_s: float = 0.0) -> tuple[ControlServer, ListSink]:
    """A coordinator of one worker over gRPC."""
    sink = ListSink()
    spec = JobSpec(
        "name: job\n", 0, 1, JobDeadlines(lease_s=LIMIT_S, form_s=60.0), telemetry_s=telemetry_s, metrics="http://m"
    )
    coordinator = Coordinator(spec, open_store=lambda _: ("127.0.0.1", 4000), sink=sink)
    return stack.enter_context(ControlServer(coordinator)), sink


def test_records_cross_the_wire_and_the_coordinator_makes_its_own() -> None:
    with ExitStack() as stack:
        server, sink = served(stack, telemetry_s=0.01)
        worker = stack.enter_context(ControlClient(server.endpoint, role="worker", index=0))
        worker.register()
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


def test_without_an_interval_the_coordinator_makes_no_record() -> None:
    with ExitStack() as stack:
        server, sink = served(stack)
        worker = stack.enter_context(ControlClient(server.endpoint, role="worker", index=0))
        worker.register()
        worker.start_heartbeats()
        server.coordinator.heartbeat(_token_of(sink), seen=server.coordinator.state.version, wait_s=2 * TICK_S)
    assert sink.of("telemetry") == []


def _token_of(sink: ListSink) -> str:
    assert sink.kept is not None
    return str(sink.kept["seats"][0]["token"])


def test_a_refused_record_does_not_fail_its_member(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        server, sink = served(stack)
        worker = stack.enter_context(ControlClient(server.endpoint, role="worker", index=0))
        worker.register()
        with caplog.at_level(logging.WARNING):
            worker.report("telemetry", {"nonsense": 1})
            worker.report("telemetry", {"nonsense": 2})
            worker.report("progress", {"step": 3})
            worker.flush(timeout_s=LIMIT_S)
    assert [record["step"] for _, record in sink.of("progress")] == [3]
    assert len([r for r in caplog.records if "telemetry refused" in r.getMessage()]) == 1
