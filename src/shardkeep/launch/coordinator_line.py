"""CoordinatorLine: all that a launcher says to the coordinator and learns from it. Each call runs in its own thread;
only a short look for the last step runs in the supervisor's loop."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ShardkeepError
from shardkeep.launch.processes.children import Death
from shardkeep.ps.control.records import JobStatus, MemberStatus
from shardkeep.records.lines import newest
from shardkeep.records.training import Progress
from shardkeep.run.reader import RunReader
from shardkeep.trust.endpoint import Endpoint

POLL_S = 0.05
TELL_S = 20.0
"""Seconds to report a death to the coordinator. Afterwards the member is started again in any case."""
STARTING_S = 30.0
"""Least number of seconds for the first answer of a coordinator: a start takes long on a busy machine."""
STEP_S = 1.0
"""Seconds for an answer that says the last step."""


class CoordinatorLine:
    """Reports deaths, requests the stop, and learns which members are lost and whether the coordinator is silent."""

    def __init__(self, folder: RunReader) -> None:
        self._folder = folder
        self.lost: Sequence[MemberStatus] = ()
        """Members whose lease is over, by the last answer."""
        self._step: int | None = None
        self._here = self._silent = 0
        """Pids of the coordinator that runs here and of one that answers no more; 0 = none."""
        self._endpoint: Endpoint | None = None
        self._reported: set[int] = set()
        self._pending: set[int] = set()
        self._heard: set[int] = set()
        self.stop_heard = False
        """Whether the coordinator has received the stop."""
        self.closed = threading.Event()
        """Tells the threads to end."""

    def close(self) -> None:
        """Ends the threads at their next check."""
        self.closed.set()

    def endpoint(self) -> Endpoint | None:
        """Where the coordinator listens now, or listened last; None before it first listens.

        The run folder holds it only until the job is over, so the result is kept for later deaths."""
        with contextlib.suppress(ShardkeepError):  # the token was deleted at the end of the job
            self._endpoint = self._folder.endpoint() or self._endpoint
        return self._endpoint

    def step(self) -> int | None:
        """The last step that the coordinator knows of, or has recorded if it answers no more; None = no step yet."""
        status = None if (endpoint := self.endpoint()) is None else self._status(endpoint, timeout_s=STEP_S)
        if status is None and (last := newest(self._folder.metrics_path, Progress)) is not None:
            return max(last.step or 0, self._step or 0)
        return self._step

    def silent(self, pid: int) -> bool:
        """Whether the coordinator that runs here, with this pid, answers no more. `pid`: 0 = none runs here."""
        self._here = pid
        return 0 < pid == self._silent

    def watch(self, lease_s: float) -> None:
        """Starts to ask whether the coordinator answers, and which members it has lost."""
        _start(self._watch, lease_s)

    def settled(self, pid: int) -> bool:
        """Whether the coordinator knows of this death, as far as one has listened and answered in time."""
        return pid not in self._pending

    def heard(self, death: Death) -> bool:
        """Whether the coordinator knows of this death and its verdict accounts for it."""
        return death.pid in self._heard

    def report(self, death: Death, *, final: bool) -> None:
        """Reports a member's death, once: in a thread, until the coordinator answers, for up to `TELL_S` seconds.

        Does nothing before the coordinator first listens: it knows no member yet. `final`: no other is started."""
        if death.pid not in self._reported and self.endpoint() is not None:
            self._reported.add(death.pid)
            self._pending.add(death.pid)
            _start(self._report, death, final)

    def request_stop(self, reason: str) -> None:
        """Requests the stop, in a thread, until the coordinator answers."""
        _start(self._request_stop, reason)

    def _watch(self, lease_s: float) -> None:
        """Waits two leases for an answer."""
        answered_at = time.monotonic()
        watched = answered = 0  # pids of the coordinator that runs here and of the last one that answered
        while not self.closed.wait(min(1.0, lease_s / 4)):
            endpoint, pid = self.endpoint(), self._here
            if endpoint is None or pid != watched:  # a new one has just started
                answered_at, watched = time.monotonic(), pid
            elif (status := self._status(endpoint, timeout_s=lease_s / 2)) is not None:
                answered_at, answered = time.monotonic(), pid
                self.lost = [each for each in status.members if each.condition == "lost" and each.age_s >= lease_s]
            elif time.monotonic() - answered_at > (2 * lease_s if pid == answered else max(2 * lease_s, STARTING_S)):
                self._silent = pid

    def _status(self, coordinator: Endpoint, *, timeout_s: float) -> JobStatus | None:
        """Its answer, if it gives one in time."""
        from shardkeep.ps.control.grpc.client import fetch_status

        with contextlib.suppress(ShardkeepError):
            status = fetch_status(coordinator, timeout_s=timeout_s)
            self._step = max((member.step for member in status.members), default=self._step)
            return status
        return None

    def _request_stop(self, reason: str) -> None:
        from shardkeep.ps.control.grpc.client import request_stop

        if self._insist(lambda coordinator: request_stop(coordinator, reason)):  # else a limit of the launcher ends it
            self.stop_heard = True

    def _report(self, death: Death, final: bool) -> None:
        from shardkeep.ps.control.grpc.client import report_death

        role, index, pid, reason = death.role, death.index, death.pid, death.how()
        tell = partial(report_death, role=role, index=index, pid=pid, reason=reason, final=final)
        if self._insist(tell, limit_s=TELL_S):
            self._heard.add(pid)
        self._pending.discard(pid)

    def _insist(self, call: Callable[[Endpoint], object], *, limit_s: float = math.inf) -> bool:
        """Calls until the coordinator answers, which may still be starting or restarting. Returns whether it did."""
        deadline = Deadline(limit_s)
        while True:
            try:
                if (coordinator := self.endpoint()) is not None:
                    call(coordinator)
                    return True
            except ShardkeepError as error:
                if not error.retryable or deadline.over:
                    return False
            if self.closed.wait(POLL_S):
                return False


def _start(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="coordinator-line", daemon=True).start()
