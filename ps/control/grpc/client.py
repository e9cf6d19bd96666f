"""A member's side of the control plane: take a seat, form, keep the lease, report, leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.pids import start_of
from shardkeep.base.net.addresses import ANY_HOST, split_address
from shardkeep.base.net.interfaces import announced
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.agreement import own_versions
from shardkeep.ps.control.grpc.channel import ControlChannel
from shardkeep.ps.control.grpc.heartbeat import Heartbeat
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.grpc.reporter import Reporter
from shardkeep.ps.control.record_forms import record_to_json
from shardkeep.ps.control.records import (
    NO_OFFER,
    PROTOCOL_VERSION,
    REPORT_KINDS,
    TRAINED,
    Formation,
    Hello,
    JobState,
    JobStatus,
    Member,
    Offer,
    Record,
    RecoveryFolder,
    Registration,
    Role,
    Shared,
)
from shardkeep.trust.endpoint import Endpoint

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
        advertise: Host under which the other members reach this one, or ROUTE; `member` has its address from
            registration on.
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
        self.kept = RecoveryFolder()
        self.shared: Shared | None = None
        self.run_dir = ""
        self.verdict: JobState | None = None  # what the coordinator answered to `leave`
        self._token = secrets.token_hex(16)
        reported = own_versions() if versions is None else versions
        self._hello = Hello(self.member, self._token, protocol_version, reported)
        self._channel = ControlChannel(coordinator)
        self._heartbeat = Heartbeat(self._channel, self._token)
        self.stop_requested = self._heartbeat.stop_requested
        """Set when somebody asked the job to stop: finish the running step, perhaps one more, and leave."""
        self.failed = self._heartbeat.failed
        """Set when the job failed or the coordinator fell silent for longer than the lease."""
        self.over = self._heartbeat.over
        """Set when the job is completed, failed or stopped, or the coordinator fell silent."""
        self._reporter = Reporter(self._channel, self._token, timeout_s=timeout_s)

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def state(self) -> JobState:
        """The job's last known state."""
        return self._heartbeat.state

    @property
    def bytes_total(self) -> int:
        """Bytes of all control messages of this member, both ways, without HTTP/2 framing."""
        return self._channel.bytes_total

    def register(self, *, wait_s: float | None = None) -> str:
        """Joins the job and returns the resolved config as YAML.

        Blocks up to `wait_s` seconds (None = `timeout_s`) until a coordinator appears. Sets `job` to the name of this
        start of the job. If this member replaces another, sets `before` (last formation) and `kept` (recovery folder).

        Raises ProtocolError (versions differ), ConfigError (no such seat), PlaceRefused (taken), JobError (too late),
        DeadlineExceeded (nobody answers at the address), ConfigError (`advertise` is loopback, the coordinator is not).
        """
        wait_s = self.timeout_s if wait_s is None else wait_s
        reply = self._channel.insist(
            "Register",
            self._greeting,
            pb.RegisterReply,
            timeout_s=wait_s,
            waiting=lambda why: _log.info("waiting for the coordinator", address=self.address, limit_s=wait_s, why=why),
        )
        self.lease_s, self.job = reply.lease_s, reply.job
        admission = from_message(reply, Registration)
        self.before, self.kept, self.shared = admission.formation, admission.kept, admission.shared
        self.run_dir = admission.run_dir
        return admission.config_yaml

    def _greeting(self) -> pb.RegisterRequest:
        """What registers this member, with its address as seen from where the coordinator is now."""
        host = announced(self._hello.member.host, coordinator=self._channel.peers())
        self.member = replace(self.member, host=host)
        return to_message(replace(self._hello, member=self.member), pb.RegisterRequest)

    def start_heartbeats(self, *, patience_s: float | None = None, members: int = 1) -> None:
        """Starts the thread that keeps the lease. After register. `members`: of the job; one of many sends fewer.

        `patience_s`: seconds the coordinator may be silent, None = a lease; longer where another one may take over."""
        self._patience_s = self.lease_s if patience_s is None else patience_s
        self._heartbeat.start(lease_s=self.lease_s, patience_s=self._patience_s, members=members)

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

        with self._heartbeat.state_changed:
            self._heartbeat.state_changed.wait_for(lambda: ended() or unless())
            return ended()

    def wake(self) -> None:
        """Has `wait_lost_or_over` look again, from any thread."""
        with self._heartbeat.state_changed:
            self._heartbeat.state_changed.notify_all()

    def join(
        self, offer: Offer = NO_OFFER, *, after: int = 0, why: str = "", kept: RecoveryFolder | None = None
    ) -> Formation:
        """Says that this member is ready and blocks until the group is formed or the job ends.

        Args:
            offer: What it brings: workers the tables of config and data, in order of first use.
            after: The generation that this member has lost; 0 = it was in none.
            why: How it lost it.
            kept: Where it keeps what its replacement needs; None = as said before.

        Raises:
            UserError, MemberLost, JobError, JobStopped: The job ended meanwhile; the text is its message.
            DeadlineExceeded: The coordinator fell silent.
        """
        recovery = None if kept is None else to_message(kept, pb.Kept)
        sent: dict[str, Any] = {"offer": to_message(offer, pb.Offer), "kept": recovery}
        request = pb.JoinRequest(token=self._token, wait_s=JOIN_WAIT_S, after=after, why=why, **sent)
        while True:
            limit_s = JOIN_WAIT_S + max(self.timeout_s, self._patience_s)
            reply = self._channel.insist("Join", request, pb.JoinReply, timeout_s=limit_s)
            if reply.HasField("formation"):
                formation = from_message(reply.formation, Formation)
                if formation.store_host not in ANY_HOST:
                    return formation
                # a coordinator that listens everywhere cannot know its name; we reached it under one
                return replace(formation, store_host=split_address(self.address)[0])
            job = from_message(reply.job, JobState)
            if (error := job.error()) is not None:
                self._heartbeat.hear(job)
                raise error
            self.check()  # our own heartbeats may know more: a silent coordinator

    def join_again(self, offer: Offer, lost: Formation, why: str) -> Formation | None:
        """Joins after a generation was lost; None = the job had already been completed, so no other follows."""
        try:
            return self.join(offer, after=lost.generation, why=why)
        except JobError:
            if self.state.state in TRAINED:
                return None
            raise

    def meet(self, point: int, *, limit_s: float, stopping: bool = False) -> None:
        """Blocks until every worker has called this with `point` or a later one. Points grow from call to call; a
        meeting outlives generations and coordinators. `stopping`: it outlives the request to stop the job, too.

        Raises DeadlineExceeded, which names who did not come within `limit_s` seconds since
        members did rows of long work, and what `check` raises."""
        deadline, moves = Deadline(limit_s), self.state.moves
        while True:
            wait_s = min(JOIN_WAIT_S, deadline.remaining_s)
            request = pb.MeetRequest(token=self._token, point=point, wait_s=wait_s)
            timeout_s = wait_s + max(self.timeout_s, self._patience_s)
            reply = self._channel.insist("Meet", request, pb.MeetReply, timeout_s=timeout_s)
            if reply.met:
                return
            if moves != self.state.moves:
                deadline, moves = Deadline(limit_s), self.state.moves
            job = from_message(reply.job, JobState)
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
        self._reporter.add(kind, record_to_json(record))

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
            code: 0 done, 1 failed, 2 the user's input is wrong; of base/exit_codes.py: another is to take its seat.
            message: One line for the user when code is not 0.
            symptom: The message tells a consequence of another member's failure (a lost connection); the
                coordinator prefers the cause, should it still show.
            refused: This process cannot take its seat; the job waits for another.
            patience_s: Seconds for each of both; None = as long as for other calls.

        Raises:
            TransportError: With code 0 only, when the coordinator did not take note; a failure is not masked.
        """
        patience_s = LAST_TRY_S if self._heartbeat.silent else patience_s or self.timeout_s
        try:
            self._reporter.flush(timeout_s=patience_s)
            request = pb.LeaveRequest(token=self._token, code=code, message=message, symptom=symptom, refused=refused)
            reply = self._channel.insist("Leave", request, pb.JobState, timeout_s=patience_s)
            self.verdict = from_message(reply, JobState)
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


def fetch_status(coordinator: Endpoint, *, wait_s: float = 0.0, timeout_s: float = 5.0) -> JobStatus:
    """The job's state, after up to `wait_s` seconds if it is not over yet. Raises TransportError, ProtocolError,
    UserError."""
    with contextlib.closing(ControlChannel(coordinator)) as channel:
        request = pb.StatusRequest(wait_s=wait_s)
        return from_message(channel.call("Status", request, pb.StatusReply, timeout_s=wait_s + timeout_s), JobStatus)


def request_stop(coordinator: Endpoint, reason: str, *, timeout_s: float = 5.0) -> JobState:
    """Requests a clean stop of the job; returns its state. Raises TransportError, ProtocolError, UserError."""
    return _tell(coordinator, "Stop", pb.StopRequest(reason=reason), timeout_s)


def report_death(
    coordinator: Endpoint, *, role: str, index: int, pid: int, reason: str, final: bool = False, timeout_s: float = 5.0
) -> JobState:
    """For launchers, who see a process end before its lease does; `reason` as in "killed by SIGKILL". `final`: they
    start no other."""
    request = pb.LostRequest(role=role, index=index, pid=pid, reason=reason, final=final)
    return _tell(coordinator, "Lost", request, timeout_s)


def _tell(coordinator: Endpoint, method: str, request: pb.StopRequest | pb.LostRequest, timeout_s: float) -> JobState:
    with contextlib.closing(ControlChannel(coordinator)) as channel:
        return from_message(channel.call(method, request, pb.JobState, timeout_s=timeout_s), JobState)
