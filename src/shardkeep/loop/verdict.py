"""Verdict: replaces the error of a lost message by the job's own error, which names the process that died."""

from __future__ import annotations

from shardkeep.base.errors import TransportError
from shardkeep.ps.control.grpc.client import ControlClient

VERDICT_S = 2.0
"""Seconds the coordinator gets, after a lost message, to report which member was lost."""


class Verdict:
    """Is around calls to the servers. Holds nothing between them, so it may be nested. `control`: None = no job."""

    def __init__(self, control: ControlClient | None) -> None:
        self._control = control

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        control = self._control
        if control is None or not isinstance(error, TransportError) or not error.retryable:
            return
        if control.failed.wait(VERDICT_S):
            raise control.state.error() or error from error
