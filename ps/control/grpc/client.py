"""A member's side of the control plane: take a place, form, keep the lease, report, leave."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError
from shardkeep.base.log import EventLog
from shardkeep.base.machine.pids import start_of
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc import wire
from shardkeep.ps.control.grpc.addresses import ANY_HOST, check_advertised
from shardkeep.ps.control.grpc.channel import ControlChannel
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.grpc.heartbeat import Heartbeat
from shardkeep.ps.control.grpc.reporter import Reporter
from shardkeep.ps.control.records import (
    ANYWHERE,
    PROTOCOL_VERSION,
    REPORT_KINDS,
    Formation,
    Hello,
    JobState,
    Kept,
    Member,
    Offer,
    Record,
    ResumeRange,
    Role,
    Shared,
    Status,
)
from shardkeep.ps.control.versions import own_versions

_log = EventLog("control")
JOIN_WAIT_S = 2.0
STOPPING_POLL_S = 0.05
"""Seconds between two looks whether all workers have come, while the job stops."""
LAST_TRY_S = 0.5
"""What a leave spends on a coordinator that has been silent for a lease already."""


class ControlClient:
    """One member's client: register, start_heartbeats, join, report ..., leave, close.

    Args:
        coordinator: Its address and token.
        role: "server" or "worker".
        index: Place among its role, from 0.
        advertise: Host under which the other members reach this one. Raises ConfigError when it is loopback and the
            coordinator is not.
        timeout_s: Seconds that one answer may take.
        protocol_version: For tests of the refusal.
        versions: What registration reports; None = this process's.
    """

    def __init__(
        self,
        coordinator: Endpoint,
        *,
        role: Role,
        index: int,
        advertise: str = "127.0.0.1",
        timeout_s: float = 30.0,
        protocol_version: int = PROTOCOL_VERSION,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.member = Member(role, index, advertise, os.getpid(), start_of(os.getpid()))
        self.lease_s = 0.0
        self.timeout_s = timeout_s
        self._patience_s = 0.0
        self.job = ""
        self.before: Formation | None = None
        self.kept = Kept()
        self.shared: Shared | None = None
        self.run_dir = ""
        self.verdict: JobState | None = None  # what the coordinator answered to `leave`
        self._token = secrets.token_hex(16)
        told = own_versions() if versions is None else versions
        self._hello = Hello(self.member, self._token, protocol_version, told)
        self._channel = ControlChannel(coordinator)
        check_advertised(advertise, coordinator=self._channel.host)
        self._heartbeat = Heartbeat(self._channel, self._token)
        self._reporter = Reporter(self._channel, self._token, timeout_s=timeout_s)

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def state(self) -> JobState:
        """The job's last known state."""
        return self._heartbeat.state

    @property
    def stop_requested(self) -> threading.Event:
        """Set when somebody asked the job to stop: finish the running step, perhaps one more, and leave."""
        return self._heartbeat.stop_requested

    @property
    def failed(self) -> threading.Event:
        """Set when the job failed or the coordinator fell silent for longer than the lease."""
        return self._heartbeat.failed

    @property
    def over(self) -> threading.Event:
        """Set when the job is completed, failed or stopped, or the coordinator fell silent."""
        return self._heartbeat.over

    @property
    def bytes_total(self) -> int:
        """Bytes of all control messages of this member, both ways, without HTTP/2 framing."""
        return self._channel.bytes_total

    def register(self, *, wait_s: float | None = None) -> str:
        """Joins the job and returns the resolved config as YAML.

        Blocks up to `wait_s` seconds (None = `timeout_s`) until a coordinator appears. Sets `job` to the name of this
        start of the job. If this member replaces another, sets `before` (last formation) and `kept` (recovery folder).

        Raises ProtocolError (versions differ), UserError (no such place, or taken), JobError (too late),
        DeadlineExceeded (nobody answers at the address).
        """
        wait_s = self.timeout_s if wait_s is None else wait_s
        reply = self._channel.insist(
            "Register",
            wire.hello_to_pb(self._hello),
            pb.RegisterReply,
            timeout_s=wait_s,
            waiting=lambda: _log.info("waiting for the coordinator", address=self.address, limit_s=wait_s),
        )
        self.lease_s, self.job = reply.lease_s, reply.job
        admission = wire.admission_from_pb(reply)
        self.before, self.kept, self.shared = admission.formation, admission.kept, admission.shared
        self.run_dir = admission.run_dir
        return admission.config_yaml

    def start_heartbeats(self, *, patience_s: float | None = None) -> None:
        """Starts the thread that keeps the lease. After register.

        `patience_s`: seconds the coordinator may be silent, None = a lease; longer where another one may take over."""
        self._patience_s = self.lease_s if patience_s is None else patience_s
        self._heartbeat.start(lease_s=self.lease_s, patience_s=self._patience_s)

    def update(self, *, step: int | None = None, phase: str | None = None, unsent_rows: int | None = None) -> None:
        """Sets the content of the next heartbeat; never blocks. `unsent_rows`: rows with a residual, which dies with
        this process."""
        self._heartbeat.update(step=step, phase=phase, unsent_rows=unsent_rows)

    def check(self) -> None:
        """Returns at once; raises UserError, MemberLost, JobError or JobStopped when the job does not continue."""
        error = self.state.error()
        if error is not None:
            raise error

    def lost(self, generation: int) -> bool:
        """Whether the job has given up this generation: its members are to leave it and to join again."""
        state = self.state
        return state.generation > generation or (state.state == "recovering" and state.generation == generation)

    def wait_lost_or_over(self, generation: int, unless: Callable[[], bool] = lambda: False) -> bool:
        """Blocks until the job is over or has given up this generation. False = `unless()` became true before, at a
        `wake`."""

        def ended() -> bool:
            return self.over.is_set() or self.state.over or self.lost(generation)

        with self._heartbeat.heard:
            self._heartbeat.heard.wait_for(lambda: ended() or unless())
            return ended()

    def wake(self) -> None:
        """Has `wait_lost_or_over` look again, from any thread."""
        with self._heartbeat.heard:
            self._heartbeat.heard.notify_all()

    def join(
        self,
        tables: Sequence[TableSpec] | None,
        *,
        data: str = "",
        resume_range: ResumeRange = ANYWHERE,
        after: int = 0,
        why: str = "",
        kept: Kept | None = None,
        unseen: str = "",
    ) -> Formation:
        """Says that this member is ready and blocks until the group is formed or the job ends.

        Args:
            tables: The tables of config and data, in order of first use, from workers; None from servers.
            data: The fingerprint of the data, from workers.
            resume_range: Where this member could continue.
            after: The generation that this member has lost; 0 = it was in none.
            why: How it lost it.
            kept: Where it keeps what its replacement needs; None = as said before.
            unseen: Why it cannot use the folder `shared`.

        Raises:
            UserError, MemberLost, JobError, JobStopped: The job ended meanwhile; the text is its message.
            DeadlineExceeded: The coordinator fell silent.
        """
        request = wire.offer_to_pb(Offer(None if tables is None else tuple(tables), data, resume_range, unseen))
        request.MergeFrom(pb.JoinRequest(token=self._token, wait_s=JOIN_WAIT_S, after=after, why=why))
        if kept is not None:
            request.kept.CopyFrom(wire.kept_to_pb(kept))
        while True:
            limit_s = JOIN_WAIT_S + max(self.timeout_s, self._patience_s)
            reply = self._channel.insist("Join", request, pb.JoinReply, timeout_s=limit_s)
            if reply.HasField("formation"):
                return self._reachable(wire.formation_from_pb(reply.formation))
            job = wire.job_from_pb(reply.job)
            if (error := job.error()) is not None:
                self._heartbeat.hear(job)
                raise error
            self.check()  # our own heartbeats may know more: a silent coordinator

    def join_again(
        self,
        tables: Sequence[TableSpec] | None,
        lost: Formation,
        *,
        data: str = "",
        resume_range: ResumeRange,
        why: str,
    ) -> Formation | None:
        """Joins after a generation was lost; None = the job had already been completed, so no other follows."""
        try:
            return self.join(tables, data=data, resume_range=resume_range, after=lost.generation, why=why)
        except JobError:
            if self.state.state == "completed":
                return None
            raise

    def meet(self, point: int, *, limit_s: float, stopping: bool = False) -> None:
        """Blocks until every worker has called this with `point` or a later one. Points grow from call to call; a
        meeting outlives generations and coordinators. `stopping`: it outlives the request to stop the job, too.

        Raises DeadlineExceeded, which names who did not come within `limit_s` seconds, and what `check` raises."""
        deadline = Deadline(limit_s)
        while True:
            wait_s = min(JOIN_WAIT_S, deadline.remaining_s)
            request = pb.MeetRequest(token=self._token, point=point, wait_s=wait_s)
            timeout_s = wait_s + max(self.timeout_s, self._patience_s)
            reply = self._channel.insist("Meet", request, pb.MeetReply, timeout_s=timeout_s)
            if reply.met:
                return
            job = wire.job_from_pb(reply.job)
            if stopping and job.state == "stopping":  # its coordinator lets no call wait
                time.sleep(STOPPING_POLL_S)
            elif (error := job.error()) is not None:
                self._heartbeat.hear(job)
                raise error
            else:
                self.check()  # our own heartbeats may know more: a silent coordinator
            who = ", ".join(f"worker {index}" for index in reply.awaited)
            deadline.check(f"{who} to come to the same call")

    def report(self, kind: str, record: Record) -> None:
        """Queues one record (progress | eval | phase | event | summary | telemetry); sent in order, never blocks.

        Raises ValueError (unknown kind) or TypeError (not JSON).
        """
        if kind not in REPORT_KINDS:
            raise ValueError(f"kind {kind!r}; allowed: {', '.join(REPORT_KINDS)}")
        self._reporter.add(kind, wire.record_to_json(record))

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Blocks until the coordinator has all that was reported, at most `timeout_s` seconds (None = as any call).

        Raises DeadlineExceeded, or why it was refused."""
        self._reporter.flush(timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    def leave(
        self,
        code: int,
        message: str = "",
        *,
        symptom: bool = False,
        refused: bool = False,
        patience_s: float | None = None,
    ) -> JobState:
        """Sends what is queued, then leaves the job with this process's exit code; heartbeats end.

        Args:
            code: 0 done, 1 failed, 2 the user's input is wrong; of base/exit_codes.py: another is to take its place.
            message: One line for the user when code is not 0.
            symptom: The message tells a consequence of another member's failure (a lost connection); the
                coordinator prefers the cause, should it still show.
            refused: This process cannot take its place; the job waits for another.
            patience_s: Seconds for each of both; None = as long as for other calls.

        Raises:
            TransportError: With code 0 only, when the coordinator did not take note; a failure is not masked.
        """
        patience_s = LAST_TRY_S if self._heartbeat.silent else patience_s or self.timeout_s
        try:
            self._reporter.flush(timeout_s=patience_s)
            request = pb.LeaveRequest(token=self._token, code=code, message=message, symptom=symptom, refused=refused)
            reply = self._channel.insist("Leave", request, pb.JobState, timeout_s=patience_s)
            self.verdict = wire.job_from_pb(reply)
            return self.verdict
        except ShardkeepError:
            if code == 0:
                raise
            return self.state
        finally:
            self._heartbeat.stop()

    def close(self) -> None:
        """Ends threads and connection; a second call does nothing."""
        self._heartbeat.stop()
        self._reporter.stop()
        self._channel.close()
        self._heartbeat.join()
        self._reporter.join()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reachable(self, formation: Formation) -> Formation:
        """A coordinator that listens everywhere cannot know its name; we reached it under one."""
        if formation.store_host in ANY_HOST:
            return replace(formation, store_host=self._channel.host)
        return formation


def fetch_status(coordinator: Endpoint, *, wait_s: float = 0.0, timeout_s: float = 5.0) -> Status:
    """The job's state, after up to `wait_s` seconds if it is not over yet. Raises TransportError, ProtocolError,
    UserError."""
    channel, request = ControlChannel(coordinator), pb.StatusRequest(wait_s=wait_s)
    try:
        reply = channel.call("Status", request, pb.StatusReply, timeout_s=wait_s + timeout_s)
        return wire.status_from_pb(reply)
    finally:
        channel.close()


def request_stop(coordinator: Endpoint, reason: str, *, timeout_s: float = 5.0) -> JobState:
    """Requests a clean stop of the job; returns its state. Raises TransportError, ProtocolError, UserError."""
    return _tell(coordinator, "Stop", pb.StopRequest(reason=reason), timeout_s)


def report_death(
    coordinator: Endpoint, *, role: str, index: int, pid: int, reason: str, timeout_s: float = 5.0
) -> JobState:
    """For launchers, who see a process end before its lease does; `reason` as in "killed by SIGKILL"."""
    return _tell(coordinator, "Lost", pb.LostRequest(role=role, index=index, pid=pid, reason=reason), timeout_s)


def _tell(coordinator: Endpoint, method: str, request: pb.StopRequest | pb.LostRequest, timeout_s: float) -> JobState:
    channel = ControlChannel(coordinator)
    try:
        return wire.job_from_pb(channel.call(method, request, pb.JobState, timeout_s=timeout_s))
    finally:
        channel.close()
