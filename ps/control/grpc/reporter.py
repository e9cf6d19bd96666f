"""Sends a member's records to the coordinator in order, from a thread of its own: a trainer never waits."""

from __future__ import annotations

import threading
import time
from collections import deque

from shardkeep.base.errors import DeadlineExceeded, ShardkeepError
from shardkeep.base.logs.log import EventLog
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.grpc.channel import RETRY_S, ControlChannel

_log = EventLog("control")

MOST_QUEUED = 10_000
"""The oldest records are dropped beyond; only a coordinator that is silent for long makes a queue."""


class Reporter:
    """A queue of records; each is sent until it is acknowledged, and counted once by its sequence number."""

    def __init__(self, channel: ControlChannel, token: str, *, timeout_s: float) -> None:
        self._channel = channel
        self._token = token
        self._timeout_s = timeout_s
        self._queue: deque[pb.ReportRequest] = deque(maxlen=MOST_QUEUED)
        self._sequence = 0
        self._refused: ShardkeepError | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, kind: str, record_json: str) -> None:
        with self._changed:
            self._sequence += 1
            request = pb.ReportRequest(token=self._token, sequence=self._sequence, kind=kind, record_json=record_json)
            self._queue.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, *, timeout_s: float) -> None:
        """Blocks until all is acknowledged. Raises DeadlineExceeded, or why a record was refused."""
        start = time.monotonic()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue or self._ended, timeout_s)
            if self._refused is not None:
                raise self._refused
            if self._queue:
                waited = time.monotonic() - start
                text = f"{len(self._queue)} reports were not taken by the coordinator at {self._channel.address}"
                raise DeadlineExceeded(text if done else f"{text} within {waited:.1f} s")

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                request = self._queue[0]
            sent = self._send(request)
            with self._changed:
                if sent and self._queue and self._queue[0] is request:
                    self._queue.popleft()
                    self._changed.notify_all()
                elif not sent:
                    self._changed.wait_for(lambda: self._ended, RETRY_S)

    def _send(self, request: pb.ReportRequest) -> bool:
        """Whether the record is off our hands: taken, or refused for good."""
        try:
            self._channel.call("Report", request, pb.JobState, timeout_s=self._timeout_s)
        except ShardkeepError as error:
            if error.retryable:
                return False
            if request.kind == "telemetry":  # no job ends because of it
                _log.warning("telemetry refused", once="telemetry refused", why=str(error))
            else:
                self._refused = self._refused or error
        return True
