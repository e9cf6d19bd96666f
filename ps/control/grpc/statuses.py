"""Our errors <-> gRPC status codes: one table, used in both directions."""

from __future__ import annotations

import re

from shardkeep.base import errors
from shardkeep.ps.control.grpc.quiet_grpc import grpc

CODES: dict[type[errors.ShardkeepError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.OUT_OF_RANGE,
    errors.PlaceRefused: grpc.StatusCode.NOT_FOUND,
    errors.UserError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.JobStopped: grpc.StatusCode.ALREADY_EXISTS,
    errors.PlaceLost: grpc.StatusCode.PERMISSION_DENIED,
    errors.MemberLost: grpc.StatusCode.ABORTED,
    errors.JobError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolError: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RemoteError: grpc.StatusCode.INTERNAL,
    errors.TransportError: grpc.StatusCode.UNAVAILABLE,
}
"""More specific classes stand before their bases.

The refusals take codes that gRPC itself never makes: a server that shuts down ends calls with CANCELLED, and a member
that took this for an order would leave a job whose coordinator is only restarting.
"""

OURS = frozenset(CODES.values()) - {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
}
"""The codes that gRPC itself never makes. The sender must prove that it is the coordinator."""

HANGS_UP = "it hangs up at once"
"""How a TLS server treats a peer without TLS or with a certificate that it rejects: it gives no reason."""
# gRPC has one code for all that happens to a connection; only its text says that the peer's certificate was refused
_TLS_REFUSAL = re.compile(r"SSL routines:\w+:([A-Z_]+)|(Hostname Verification) Check failed")
_HUNG_UP = re.compile(r"failed to connect .*(Socket closed|Connection reset)")

_ERRORS = {code: kind for kind, code in CODES.items()}


def code_of(error: errors.ShardkeepError) -> grpc.StatusCode:
    """The status code that represents `error` on the wire."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def error_of(error: grpc.RpcError, address: str) -> errors.ShardkeepError:
    """Our exception for a failed call to the coordinator at `address`."""
    code, details = error.code(), error.details() or "no details"
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(
            f"{address} answers, but is no coordinator of this version of shardkeep ({details})"
        )
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return errors.UserError(f"the coordinator at {address} lets nobody in without the job's token: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"the coordinator at {address} did not answer in time")
    if code == grpc.StatusCode.UNAVAILABLE and (refusal := _TLS_REFUSAL.search(details)):
        return errors.UserError(
            f"{address} is not trusted to be the coordinator ({refusal[refusal.lastindex or 0]}): it must run with "
            "--tls, and its certificate must be of the same authority as ours and for this host"
        )
    if code == grpc.StatusCode.UNAVAILABLE and _HUNG_UP.search(details):
        return errors.TransportError(f"the coordinator at {address} cannot be reached: {HANGS_UP}; does it want --tls?")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.TransportError(f"the coordinator at {address} cannot be reached ({details})")
    kind = _ERRORS.get(code, errors.RemoteError)
    return kind(f"the coordinator at {address} failed: {details}" if kind is errors.RemoteError else details)
