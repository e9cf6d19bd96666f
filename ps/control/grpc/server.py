"""The coordinator's process: its gRPC server, the ticker that watches leases, its life. No logic of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.descriptors import limit
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc.addresses import join_address, split_address
from shardkeep.ps.control.grpc.auth import TokenCheck, open_port
from shardkeep.ps.control.grpc.endpoint import Endpoint, make_token
from shardkeep.ps.control.grpc.quiet_grpc import control_pb2_grpc, grpc
from shardkeep.ps.control.grpc.servicer import ControlServicer
from shardkeep.ps.control.grpc.store import StoreHost
from shardkeep.ps.control.grpc.tls import Tls
from shardkeep.ps.control.job import JobSpec
from shardkeep.ps.control.records import JobSink, Record, Status
from shardkeep.ps.control.telemetry import TelemetryRecords, place_of_process

TICK_S = 0.5
STOP_POLL_S = 0.2
LAST_S = 3.0
"""Seconds of `liveness.grace_s` that are left to tell members, and to end this process."""
ASKED = "a signal stopped the coordinator"
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second coordinator on the same port silently takes half of the calls
    ("grpc.max_receive_message_length", 4 << 20),  # of members; who has no token sends none at all
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.server_handshake_timeout_ms", 4000),  # what a connection gets to say HTTP/2, and TLS where that is on
    ("grpc.max_connection_idle_ms", 10_000),  # without a call; a member's heartbeat always waits here
]


class ControlServer:
    """Serves one coordinator.

    Args:
        coordinator: The logic.
        listen: HOST:PORT; port 0 = any free one.
        token: What every call must carry; None = a new one.
        tls: Given: only TLS, and only peers with a certificate of the same authority.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listen: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.coordinator = coordinator
        host, port = split_address(listen, lowest_port=0)
        # every member may park a heartbeat and a join; the rest is for reports, leaves and people
        threads = 2 * coordinator.spec.num_members + 16
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="control")
        token = make_token() if token is None else token
        options = [
            *_OPTIONS,
            ("grpc.max_allowed_incoming_connections", _most_connections(coordinator.spec.num_members)),
        ]
        self._server = grpc.server(self._pool, options=options, interceptors=[TokenCheck(token)])
        control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(coordinator), self._server)  # type: ignore[no-untyped-call]
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="control-ticker", daemon=True)
        self.address = join_address(host, self._bind(host, port, tls))
        self._telemetry = self._records(host)
        self.endpoint = Endpoint(self.address, token, tls)

    def start(self) -> ControlServer:
        """Returns at once; the socket is open since construction."""
        self._server.start()
        self._ticker.start()
        return self

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends the server; calls that run get `grace_s` seconds. Blocks until all threads ended."""
        self._ended.set()
        self.coordinator.close()
        self._server.stop(grace_s).wait()
        self._pool.shutdown()
        if self._ticker.is_alive():
            self._ticker.join()

    def __enter__(self) -> ControlServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _bind(self, host: str, port: int, tls: Tls | None) -> int:
        asked = join_address(host, port)
        try:
            bound = open_port(self._server, asked, tls)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(f"cannot listen on {asked}: the port is in use or the host is not this machine's")
        return bound

    def _records(self, host: str) -> TelemetryRecords | None:
        """The coordinator's telemetry; None = there are no records."""
        coordinator, place = self.coordinator, place_of_process(host)
        return TelemetryRecords.every(
            coordinator.spec.telemetry_s,
            figures=coordinator.figures,
            record=lambda now, _before: {**place, **now},
            report=lambda _kind, record: coordinator.take_telemetry(record),
        )

    def _tick(self) -> None:
        interval_s = min(TICK_S, self.coordinator.spec.lease_s / 4)
        while not self._ended.wait(interval_s):
            self.coordinator.tick()
            if self._telemetry is not None:
                self._telemetry.look()


def _most_connections(num_members: int) -> int:
    """More are hung up on at once: each takes a descriptor, and there must be some for the run folder and the store."""
    return max(min(128 + 4 * num_members, limit() // 2), 2 * num_members)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Asks a coordinator's process to end its job. A signal handler sets the events."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the job in order."""
    terminate: threading.Event = field(default_factory=threading.Event)
    """The same, within `grace_s` seconds."""
    grace_s: float = 25.0


def serve_job(
    spec: JobSpec,
    *,
    listen: str,
    token: str,
    tls: Tls | None = None,
    sink: JobSink,
    ready: Callable[[str], None],
    stopping: Stopping,
    before: Record | None = None,
    watch: Callable[[Callable[[], Status]], None] | None = None,
) -> None:
    """Serves one job until it is over. Blocks.

    Args:
        spec: The job.
        listen: HOST:PORT; the store listens on the same host. Raises ConfigError when it cannot.
        token: The token that every call must prove.
        tls: If given, only TLS, and only peers with a certificate of the same authority.
        sink: Keeps the records.
        ready: Called once with the address for members.
        stopping: Ends the job on request.
        before: The persisted state of a coordinator of this job that died.
        watch: Called once with what reads the job's status; None = nobody is.

    Raises:
        UserError, JobError: The job failed (JobStopped: was stopped); the text is the job's message.
    """
    store = StoreHost(bind=split_address(listen, lowest_port=0)[0])
    coordinator = Coordinator(spec, open_store=store.open, close_store=store.close, sink=sink, before=before)
    if watch is not None:
        watch(coordinator.status)
    with ControlServer(coordinator, listen, token=token, tls=tls) as server:
        coordinator.save()
        ready(server.address)
        store.prepare()  # while members start
        grace = _wait_until_over(coordinator, stopping)
        drain_s = spec.lease_s if grace is None else min(spec.lease_s, grace.remaining_s + LAST_S / 2)
        coordinator.wait_drained(drain_s)  # members still have to learn of it
    store.close()
    if coordinator.state.state != "completed" and (error := coordinator.state.error()) is not None:
        raise error


def _wait_until_over(coordinator: Coordinator, stopping: Stopping) -> Deadline | None:
    """Blocks until the job is over; stops it on request. Returns the deadline of a terminated job."""
    grace: Deadline | None = None
    while not coordinator.wait_over(STOP_POLL_S):
        if stopping.terminate.is_set():
            if grace is None:
                grace = Deadline(max(stopping.grace_s - LAST_S, 0.0))
                coordinator.stop(ASKED, limit_s=grace.timeout_s)
        elif stopping.stop.is_set():
            coordinator.stop(ASKED)
    return grace
