"""The control plane over real gRPC in one process: members are threads, the port is a free one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from shardkeep.base.errors import (
    ConfigError,
    DeadlineExceeded,
    JobError,
    MemberLost,
    PlaceRefused,
    ProtocolError,
    ShardkeepError,
    TransportError,
    UserError,
)
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc import heartbeat
from shardkeep.ps.control.grpc.channel import ControlChannel
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.control.records import Formation, JobStatus, Offer, Role
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.proof import Call
from tests.support.cases import every
from tests.support.control_job import TABLES, ListSink
from tests.support.ports import reserved_port

LIMIT_S = 90.0
TOKEN = "t" * 32


class Cluster:
    """A coordinator that serves, and clients of it that are closed at the end."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        servers: int = 1,
        workers: int = 2,
        lease_s: float = 15.0,
        patience_s: float | None = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack, self._patience_s = stack, patience_s
        self.sink = ListSink()
        self.coordinator = Coordinator(
            JobSpec("name: job\n", servers, workers, JobDeadlines(lease_s=lease_s, form_s=60.0)),
            open_store=lambda generation: ("0.0.0.0", 4000),
            sink=self.sink,
            clock=clock,
        )
        self.server = stack.enter_context(ControlServer(self.coordinator))
        self.address, self.endpoint = self.server.address, self.server.endpoint
        self._pool = stack.enter_context(ThreadPoolExecutor(servers + workers))
        self.names: list[tuple[Role, int]] = [("server", i) for i in range(servers)]
        self.names += [("worker", i) for i in range(workers)]

    def client(self, role: Role, index: int, **versions: Any) -> ControlClient:
        client = ControlClient(self.endpoint, role=role, index=index, **versions)
        return self._stack.enter_context(client)

    def member(self, role: Role, index: int) -> ControlClient:
        client = self.client(role, index)
        assert client.register() == "name: job\n"
        client.start_heartbeats(patience_s=self._patience_s)
        return client

    def join(self, client: ControlClient) -> Future[Formation]:
        return self._pool.submit(client.join, Offer(TABLES if client.member.role == "worker" else ()))

    def status(self) -> JobStatus:
        return fetch_status(self.endpoint)

    def form(self) -> list[ControlClient]:
        members = [self.member(*name) for name in self.names]
        for joining in [self.join(member) for member in members]:
            joining.result(LIMIT_S)
        return members


@pytest.fixture
def start() -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as stack:
        yield lambda **settings: Cluster(stack, **settings)


def test_a_job_runs_from_registration_to_completion(start: Callable[..., Cluster]) -> None:
    cluster = start()
    server, first, second = members = [cluster.member(*name) for name in cluster.names]
    formations = [joining.result(LIMIT_S) for joining in [cluster.join(member) for member in members]]
    assert formations[0] == formations[1] == formations[2]
    assert formations[0].tables == TABLES
    assert formations[0].members[2].pid == os.getpid()
    assert formations[0].store_host == "127.0.0.1"  # told as 0.0.0.0: the host under which we reached it
    first.update(step=41)
    first.update(phase="train")
    _until(lambda: ("worker", 41, "train") in [(m.role, m.step, m.phase) for m in cluster.status().members])
    first.report("progress", {"step": 3, "loss": 0.5})
    first.report("summary", {"steps": 4})
    assert first.leave(0).state == "training"
    assert cluster.status().progress["loss"] == 0.5
    assert second.leave(0).state == "completed"
    assert server.over.wait(LIMIT_S)
    assert (server.state.state, server.failed.is_set(), server.stop_requested.is_set()) == ("completed", False, False)
    assert cluster.sink.of("finished") == [("finished", "completed", "", {"steps": 4})]
    assert first.bytes_total > 100


def test_a_failure_wakes_every_member_sooner_than_a_heartbeat_lasts_and_joins_raise_it(
    start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "heartbeat_s", lambda _members: 10 * LIMIT_S)
    monkeypatch.setattr("shardkeep.ps.control.grpc.server.LONGEST_WAIT_S", 10 * LIMIT_S)
    cluster = start(lease_s=100 * LIMIT_S)
    members = [cluster.member(*name) for name in cluster.names]
    joining = [cluster.join(member) for member in members[:2]]
    members[2].leave(2, "data.csv: has no column 'age'")
    for member in members[:2]:
        assert member.failed.wait(LIMIT_S) and member.over.is_set()
        with pytest.raises(UserError, match="has no column 'age'"):
            member.check()
    for future in joining:
        with pytest.raises(UserError, match="has no column 'age'"):
            future.result(LIMIT_S)


def test_a_member_gives_up_on_a_coordinator_that_is_gone_or_does_not_know_it(start: Callable[..., Cluster]) -> None:
    cluster = start(servers=0, workers=1, lease_s=1.0, patience_s=None)
    worker = cluster.member("worker", 0)
    cluster.server.stop()
    assert worker.failed.wait(LIMIT_S) and worker.over.is_set()
    with pytest.raises(MemberLost, match=rf"{cluster.address}.* silent for more than 1 s$"):
        worker.check()
    assert worker.leave(1, "lost it").state == "failed"  # does not mask the failure

    cluster = start(servers=0, workers=1)
    stranger = cluster.client("worker", 0)
    stranger.lease_s = 15.0
    stranger.start_heartbeats()
    assert stranger.failed.wait(LIMIT_S)
    assert "does not know this member" in stranger.state.message


def test_registration_waits_for_a_coordinator_to_appear_and_says_in_one_line_that_none_did() -> None:
    spec = JobSpec("name: late\n", 0, 1, JobDeadlines(lease_s=15.0, form_s=60.0))
    late = Coordinator(spec, open_store=lambda generation: ("127.0.0.1", 1), sink=ListSink())
    with (
        reserved_port() as port,
        ControlClient(_at(port), role="worker", index=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        registering = pool.submit(client.register)
        with pytest.raises(TransportError):
            fetch_status(_at(port), timeout_s=0.2)
        with ControlServer(late, f"127.0.0.1:{port}", token=TOKEN):
            assert registering.result(LIMIT_S) == "name: late\n"
    told = r"no coordinator answered at 127.0.0.1:{} within 0.\d s"
    with reserved_port() as nobody, socket.create_server(("127.0.0.1", 0)) as silent:
        for port, text in ((nobody, told.format(nobody)), (silent.getsockname()[1], None)):
            with (
                ControlClient(_at(port), role="worker", index=0, timeout_s=0.5) as client,
                pytest.raises(DeadlineExceeded, match=text),
            ):
                client.register()


@every("address", ["nowhere", "host:", ":1", "host:0", "host:65536", "host:x", "::1:80", ""])
def test_an_address_that_is_none_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        ControlClient(Endpoint(address, TOKEN), role="worker", index=0)


def test_what_does_not_fit_is_refused_with_the_kind_of_its_error(start: Callable[..., Cluster]) -> None:
    cluster = start()
    cluster.member("worker", 0)
    for index, kind, text in ((9, ConfigError, "allowed: 0"), (0, PlaceRefused, "worker 0 is already in the job")):
        with pytest.raises(kind, match=text) as refused:
            cluster.client("worker", index).register()
        assert type(refused.value) is kind
    with pytest.raises(ProtocolError, match=r"protocol 7 \(shardkeep 9.9\).*speaks 5 \(shardkeep "):
        cluster.client("worker", 1, protocol_version=7, versions={"shardkeep": "9.9"}).register()
    with pytest.raises(ConfigError, match=f"cannot listen on {cluster.address}"):
        ControlServer(cluster.coordinator, cluster.address)
    with (
        closing(ControlChannel(cluster.endpoint)) as channel,
        pytest.raises(ProtocolError, match="answers Status in another form"),
    ):
        channel.call("Status", pb.StatusRequest(), pb.JoinReply, timeout_s=LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(ProtocolError, match="no coordinator of this version"):
            fetch_status(_at(port))
        other.stop(None).wait()


def test_garbage_on_the_port_and_a_bug_in_the_coordinator_do_not_harm_it(
    start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start()
    host, port = cluster.address.split(":")
    frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096
    for garbage in [b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", frames] * 10:
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
            connection.sendall(garbage)
    register, no_message = "/shardkeep.control.Control/Register", b"\xff" * 64
    with grpc.insecure_channel(cluster.address) as channel, pytest.raises(grpc.RpcError):
        proof = Call.make(cluster.endpoint.token, register, no_message)
        channel.unary_unary(register)(no_message, timeout=LIMIT_S, metadata=proof.headers())
    with monkeypatch.context() as patch:
        patch.setattr(cluster.coordinator, "status", lambda **_: 1 // 0)
        with pytest.raises(ShardkeepError, match="ZeroDivisionError"):
            cluster.status()
    assert "control call failed" in caplog.text
    cluster.form()
    assert cluster.status().state == "training"


def test_reports_are_kept_until_a_coordinator_takes_them_and_arrive_in_order_and_before_the_leave(
    start: Callable[..., Cluster],
) -> None:
    import numpy as np
    import torch

    cluster = start(servers=0, workers=1)
    (worker,) = cluster.form()
    worker.report("progress", {"step": 0, "loss": np.float32(0.5), "auc": torch.tensor(0.25), "counts": np.arange(2)})
    with pytest.raises(TypeError, match="is not JSON"):
        worker.report("progress", {"loss": object()})
    with pytest.raises(ValueError, match="allowed: progress"):
        worker.report("gossip", {})
    worker.flush(timeout_s=LIMIT_S)
    cluster.server.stop()
    for step in range(1, 30):
        worker.report("progress", {"step": step})
    worker.report("summary", {"steps": 30})
    with pytest.raises(DeadlineExceeded, match="30 reports were not taken"):
        worker.flush(timeout_s=0.3)
    with ControlServer(cluster.coordinator, cluster.address, token=cluster.endpoint.token):
        assert worker.leave(0).state == "completed"
    records = [call[1] for call in cluster.sink.of("progress")]
    assert [record["step"] for record in records] == list(range(30))
    assert (records[0]["loss"], records[0]["auc"], records[0]["counts"]) == (0.5, 0.25, [0, 1])


def test_a_call_that_is_cut_off_is_a_transport_error(start: Callable[..., Cluster]) -> None:
    cluster = start(servers=0, workers=2)
    worker = cluster.client("worker", 0)
    worker.register()
    joining = cluster.join(worker)
    _until(lambda: cluster.status().members[0].condition == "joined")
    worker.close()
    with pytest.raises(TransportError, match=f"coordinator .*at {cluster.address}") as cut:
        joining.result(LIMIT_S)
    assert cut.value.retryable  # RemoteError is not: it is an answer


def test_a_refused_report_shows_when_its_member_leaves_and_the_place_of_one_that_left_stays_taken(
    start: Callable[..., Cluster],
) -> None:
    cluster = start(workers=3)
    _, _, second, third = cluster.form()
    second.report("summary", {})
    with pytest.raises(ProtocolError, match="only worker 0"):
        second.leave(0)
    third.leave(0)
    with pytest.raises(JobError, match="worker 2 was in the job already"):
        cluster.client("worker", 2).register()


def _at(port: int) -> Endpoint:
    return Endpoint(f"127.0.0.1:{port}", TOKEN)


def _until(true: Callable[[], bool]) -> None:
    """Waits, with a limit, until a condition that nobody signals holds."""
    tick = threading.Event()
    for _ in range(int(LIMIT_S / 0.02)):
        if true():
            return
        tick.wait(0.02)
    raise AssertionError("the condition did not come true in time")
