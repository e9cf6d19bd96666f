"""gRPC in, coordinator calls out: maps protobuf to records, errors to status codes. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from shardkeep.base.errors import ShardkeepError
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc import wire
from shardkeep.ps.control.grpc.quiet_grpc import grpc
from shardkeep.ps.control.grpc.statuses import code_of

Reply = TypeVar("Reply")
LONGEST_WAIT_S = 5.0
"""A parked call holds a thread; a caller that waits longer calls again."""

_log = logging.getLogger("shardkeep.control")


class ControlServicer:
    """The service Control of control.proto."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:  # noqa: N802
        def reply() -> pb.RegisterReply:
            admission = self._coordinator.register(wire.hello_from_pb(request))
            return wire.admission_to_pb(admission, self._coordinator.id)

        return _answer(context, reply)

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:  # noqa: N802
        def reply() -> pb.JoinReply:
            job, formation = self._coordinator.join(
                request.token,
                wire.offer_from_pb(request),
                after=request.after,
                why=request.why,
                kept=wire.kept_from_pb(request.kept),
                wait_s=_wait(request.wait_s),
            )
            told = None if formation is None else wire.formation_to_pb(formation)
            return pb.JoinReply(job=wire.job_to_pb(job), formation=told)

        return _answer(context, reply)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.JobState:  # noqa: N802
        def reply() -> pb.JobState:
            job = self._coordinator.heartbeat(
                request.token,
                step=request.step,
                phase=request.phase,
                unsent_rows=request.unsent_rows,
                seen=request.seen,
                wait_s=min(_wait(request.wait_s), self._coordinator.spec.lease_s / 4),
            )
            return wire.job_to_pb(job)

        return _answer(context, reply)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.JobState:  # noqa: N802
        def reply() -> pb.JobState:
            record = wire.record_from_json(request.record_json)
            job = self._coordinator.report(request.token, sequence=request.sequence, kind=request.kind, record=record)
            return wire.job_to_pb(job)

        return _answer(context, reply)

    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> pb.MeetReply:  # noqa: N802
        def reply() -> pb.MeetReply:
            wait_s = _wait(request.wait_s)
            job, awaited = self._coordinator.meet(request.token, request.point, wait_s=wait_s)
            return pb.MeetReply(job=wire.job_to_pb(job), met=not awaited, awaited=awaited)

        return _answer(context, reply)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.JobState:  # noqa: N802
        def reply() -> pb.JobState:
            job = self._coordinator.leave(
                request.token,
                code=request.code,
                message=request.message,
                symptom=request.symptom,
                refused=request.refused,
            )
            return wire.job_to_pb(job)

        return _answer(context, reply)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        wait_s = _wait(request.wait_s)
        return _answer(context, lambda: wire.status_to_pb(self._coordinator.status(wait_s=wait_s)))

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.JobState:  # noqa: N802
        return _answer(context, lambda: wire.job_to_pb(self._coordinator.stop(request.reason)))

    def Lost(self, request: pb.LostRequest, context: grpc.ServicerContext) -> pb.JobState:  # noqa: N802
        def reply() -> pb.JobState:
            job = self._coordinator.lost(request.role, request.index, pid=request.pid, reason=request.reason)
            return wire.job_to_pb(job)

        return _answer(context, reply)


def _answer(context: grpc.ServicerContext, reply: Callable[[], Reply]) -> Reply:
    try:
        return reply()
    except ShardkeepError as error:
        code, text = code_of(error), str(error)
    except Exception as error:  # a bug of ours must not look like a dead coordinator
        _log.exception("control call failed")
        code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
    abort: Any = context.abort
    return abort(code, text)  # type: ignore[no-any-return]  # raises


def _wait(asked_s: float) -> float:
    return min(max(asked_s, 0.0), LONGEST_WAIT_S) if asked_s == asked_s else 0.0
