"""The coordinator's process: its gRPC server, the ticker that watches leases, its life. Decides nothing of a job.

The servicer maps protobuf to records and errors to status codes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobStopped, ShardkeepError, Superseded
from shardkeep.base.net.addresses import join_address, listening_socket, split_address
from shardkeep.base.net.descriptors import limit
from shardkeep.base.net.interfaces import named_host
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc.auth import TokenCheck, open_port
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.grpc.quiet_grpc import control_pb2_grpc, grpc
from shardkeep.ps.control.grpc.statuses import code_of
from shardkeep.ps.control.job import JobSpec
from shardkeep.ps.control.record_forms import record_from_json
from shardkeep.ps.control.records import (
    TERMINATED,
    Formation,
    Hello,
    JobSink,
    JobState,
    JobStatus,
    Offer,
    Record,
    RecoveryFolder,
)
from shardkeep.ps.control.telemetry import TelemetryRecords, place_of_process
from shardkeep.trust.endpoint import Endpoint, make_token
from shardkeep.trust.tls import Tls

Request = TypeVar("Request")
Reply = TypeVar("Reply")
LONGEST_WAIT_S = 5.0
"""A parked call holds a thread; a caller that waits longer calls again."""

_log = logging.getLogger("shardkeep.control")


def _answer(
    call: Callable[[ControlServicer, Request], Reply],
) -> Callable[[ControlServicer, Request, grpc.ServicerContext], Reply]:
    """A method of the service from one that returns its reply or raises."""

    @wraps(call)
    def method(self: ControlServicer, request: Request, context: grpc.ServicerContext) -> Reply:
        try:
            return call(self, request)
        except ShardkeepError as error:
            code, text = code_of(error), str(error)
        except Exception as error:  # a bug of ours must not look like a dead coordinator
            _log.exception("control call failed")
            code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
        abort: Any = context.abort
        return abort(code, text)  # type: ignore[no-any-return]  # raises

    return method


class ControlServicer:
    """The service Control of control.proto."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @_answer
    def Register(self, request: pb.RegisterRequest) -> pb.RegisterReply:  # noqa: N802
        return to_message(self._coordinator.register(from_message(request, Hello)), pb.RegisterReply)

    @_answer
    def Join(self, request: pb.JoinRequest) -> pb.JoinReply:  # noqa: N802
        sent = {"offer": from_message(request.offer, Offer), "kept": from_message(request.kept, RecoveryFolder)}
        job, formation = self._coordinator.join(**_arguments(request) | sent)
        return pb.JoinReply(job=_job(job), formation=None if formation is None else _formation(formation))

    @_answer
    def Heartbeat(self, request: pb.HeartbeatRequest) -> pb.JobState:  # noqa: N802
        arguments = _arguments(request)
        longest_s = self._coordinator.spec.deadlines.lease_s / 3
        return _job(self._coordinator.heartbeat(**arguments | {"wait_s": min(arguments["wait_s"], longest_s)}))

    @_answer
    def Report(self, request: pb.ReportRequest) -> pb.JobState:  # noqa: N802
        arguments = _arguments(request)
        record = record_from_json(arguments.pop("record_json"))
        return _job(self._coordinator.report(**arguments, record=record))

    @_answer
    def Meet(self, request: pb.MeetRequest) -> pb.MeetReply:  # noqa: N802
        job, awaited = self._coordinator.meet(**_arguments(request))
        return pb.MeetReply(job=_job(job), met=not awaited, awaited=awaited)

    @_answer
    def Leave(self, request: pb.LeaveRequest) -> pb.JobState:  # noqa: N802
        return _job(self._coordinator.leave(**_arguments(request)))

    @_answer
    def Status(self, request: pb.StatusRequest) -> pb.StatusReply:  # noqa: N802
        return to_message(self._coordinator.status(**_arguments(request)), pb.StatusReply)

    @_answer
    def Stop(self, request: pb.StopRequest) -> pb.JobState:  # noqa: N802
        return _job(self._coordinator.stop(request.reason))

    @_answer
    def Lost(self, request: pb.LostRequest) -> pb.JobState:  # noqa: N802
        return _job(self._coordinator.lost(**_arguments(request)))


def _arguments(request: Message) -> dict[str, Any]:
    """The fields of a request, which the coordinator's arguments are named by. A call waits as long as it may."""
    arguments = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
    return arguments | ({"wait_s": _wait(arguments["wait_s"])} if "wait_s" in arguments else {})


def _job(job: JobState) -> pb.JobState:
    return to_message(job, pb.JobState)


@lru_cache(maxsize=1)  # one message for all members
def _formation(formation: Formation) -> pb.Formation:
    return to_message(formation, pb.Formation)


def _wait(asked_s: float) -> float:
    return min(max(asked_s, 0.0), LONGEST_WAIT_S) if asked_s == asked_s else 0.0


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
        self.address = join_address(named_host(host), open_port(self._server, join_address(host, port), tls))
        place = place_of_process(named_host(host))
        self._telemetry = TelemetryRecords.every(
            coordinator.spec.telemetry_s,
            figures=coordinator.figures,
            record=lambda now, _before: {**place, **now},
            report=lambda _kind, record: coordinator.take_telemetry(record),
        )
        """The coordinator's telemetry; None = there are no records."""
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

    def _tick(self) -> None:
        interval_s = min(TICK_S, self.coordinator.spec.deadlines.lease_s / 4)
        while not self._ended.wait(interval_s):
            with contextlib.suppress(Superseded):  # `Stopping.check` ends the process
                self.coordinator.tick()
                if self._telemetry is not None:
                    self._telemetry.look()


def _most_connections(num_members: int) -> int:
    """More are hung up on at once: each takes a descriptor, and there must be some for the run folder and the store."""
    return max(min(128 + 4 * num_members, limit() // 2), 2 * num_members)


class StoreHost:
    """Hosts the TCPStore through which generations meet, on a socket of our own, so that it listens where we say.

    It is used only while a generation forms, and closed when one is given up, so that a member that waits in it for a
    dead member learns of it; the next generation opens another. Without `master_listen_fd` it listens on every
    interface, and it authenticates nobody.

    Args:
        bind: Host to listen on, at any free port; members get its address.
    """

    def __init__(self, *, bind: str = "127.0.0.1") -> None:
        self._bind = bind
        self._store: Any = None
        self._bound = ("", 0)
        self._lock = threading.Lock()

    def open(self, generation: int) -> tuple[str, int]:
        """Host and port of the store for `generation`. Raises ConfigError."""
        del generation  # all that meet in one store do so under prefixes of their own
        self.prepare()
        return self._bound

    def prepare(self) -> None:
        """Opens the store ahead of the first generation; it takes a second. Raises ConfigError."""
        with self._lock:
            if self._store is None:
                self._store, self._bound = self._listen()

    def close(self) -> None:
        """Ends the store; groups that are formed continue without it."""
        with self._lock:
            self._store = None

    def _listen(self) -> tuple[Any, tuple[str, int]]:
        # imported here: torch takes a second, and a coordinator answers its members before
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = listening_socket(self._bind, 0, backlog=1024)
        host, port = listener.getsockname()[:2]
        # the store closes the descriptor: hand it over
        store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, (host, port)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Asks a coordinator's process to end its job. A signal handler sets the events."""

    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the job in order."""
    terminate: threading.Event = field(default_factory=threading.Event)
    """The same, within `grace_s` seconds."""
    grace_s: float = 25.0
    continued: bool = False
    """Another process continues the job after SIGTERM."""
    check: Callable[[], None] = lambda: None
    """Called some times a second. What it raises ends the process, and no member learns that the job is over."""


class Entrance(NamedTuple):
    """Where a coordinator listens, and whom it admits.

    Attributes:
        listen: HOST:PORT; the store listens on the same host.
        token: The token that every call must prove.
        tls: If given, only TLS, and only peers with a certificate of the same authority.
    """

    listen: str
    token: str
    tls: Tls | None = None


def serve_job(
    spec: JobSpec,
    entrance: Entrance,
    *,
    sink: JobSink,
    ready: Callable[[str], None],
    stopping: Stopping,
    before: Record | None = None,
    watch: Callable[[Callable[[], JobStatus]], None] | None = None,
) -> None:
    """Serves one job until it is over. Blocks.

    Args:
        spec: The job.
        sink: Keeps the records.
        ready: Called once with the address for members.
        stopping: Ends the job on request.
        before: The persisted state of a coordinator of this job that died.
        watch: Called once with what reads the job's status; None = nobody is.

    Raises:
        ConfigError: It cannot listen there.
        UserError, JobError: The job failed (JobStopped: was stopped); the text is the job's message.
    """
    store = StoreHost(bind=split_address(entrance.listen, lowest_port=0)[0])
    coordinator = Coordinator(spec, open_store=store.open, close_store=store.close, sink=sink, before=before)
    if watch is not None:
        watch(coordinator.status)
    with ControlServer(coordinator, entrance.listen, token=entrance.token, tls=entrance.tls) as server:
        coordinator.save()
        ready(server.address)
        store.prepare()  # while members start
        _wait_until_over(coordinator, stopping)
    store.close()
    if coordinator.state.state != "completed" and (error := coordinator.state.error()) is not None:
        raise error


def _wait_until_over(coordinator: Coordinator, stopping: Stopping) -> None:
    """Blocks until the job is over and members have left; stops it on request.

    Raises JobStopped instead of a stop that would wait for a lost member: who continues the job takes it over."""
    grace: Deadline | None = None
    while not coordinator.wait_over(STOP_POLL_S):
        stopping.check()
        if stopping.terminate.is_set():
            if grace is None:
                if stopping.continued and coordinator.state.state == "recovering":
                    raise JobStopped("left a job that recovers; another coordinator takes over")
                grace = Deadline(max(stopping.grace_s - LAST_S, 0.0))
                coordinator.stop(TERMINATED, limit_s=grace.timeout_s)
        elif stopping.stop.is_set():
            coordinator.stop(ASKED)
    lease_s = coordinator.spec.deadlines.lease_s  # members still have to learn of it
    coordinator.wait_drained(lease_s if grace is None else min(lease_s, grace.remaining_s + LAST_S / 2))
