"""The launcher's connection to the coordinator. Each call runs in its own thread, never in the supervisor's loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ShardkeepError
from shardkeep.launch.children import Death
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.run.folder import RunFolder

POLL_S = 0.05
RETRY_S = 0.2
"""Seconds between two attempts to request the stop."""
TELL_S = 20.0
"""Seconds to report a death to the coordinator. Afterwards the member is started again in any case."""


class CoordinatorLine:
    """Reports deaths and requests the stop."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._endpoint: Endpoint | None = None
        self._reported: set[int] = set()
        self._settled: set[int] = set()
        self._outlived: set[int] = set()
        self._heard: set[int] = set()
        self._stop_heard = threading.Event()
        self.closed = threading.Event()
        """Tells the threads to end."""

    @property
    def stop_heard(self) -> bool:
        """Whether the coordinator has received the stop."""
        return self._stop_heard.is_set()

    def close(self) -> None:
        """Ends the threads at their next check."""
        self.closed.set()

    def endpoint(self) -> Endpoint | None:
        """The coordinator's endpoint; None before it first listens. A coordinator that takes over keeps the address.

        The run folder holds it only until the job is over, so the result is kept for later deaths."""
        if self._endpoint is None:
            with contextlib.suppress(ShardkeepError):  # the token was deleted at the end of the job
                self._endpoint = self._folder.endpoint()
        return self._endpoint

    def settled(self, pid: int) -> bool:
        """Whether `report_until_heard` has delivered this death, or its time has run out."""
        return pid in self._settled

    def report(self, death: Death) -> None:
        """Reports a member's death once. Without the report, the coordinator detects it only when the lease ends."""
        if death.pid not in self._reported and self._ask(
            lambda coordinator: self._report(coordinator, death, Deadline(0.0))
        ):
            self._reported.add(death.pid)

    def outlived(self, deaths: Iterable[Death]) -> bool:
        """Whether the coordinator knows of these deaths and waits for replacements, so that the job does not fail."""
        return all(death.pid in self._outlived for death in deaths)

    def heard(self, death: Death) -> bool:
        """Whether the coordinator knows of this death and its verdict accounts for it."""
        return death.pid in self._heard

    def report_until_heard(self, death: Death) -> None:
        """Reports a member's death until the coordinator answers, for up to `TELL_S` seconds.

        Does nothing before the coordinator first listens: it knows no member yet."""
        self._reported.add(death.pid)

        def insist(coordinator: Endpoint) -> None:
            try:
                self._report(coordinator, death, Deadline(TELL_S))
            finally:
                self._settled.add(death.pid)

        if not self._ask(insist):
            self._settled.add(death.pid)

    def request_stop(self, reason: str) -> None:
        """Requests the stop, in a thread, until the coordinator answers."""
        threading.Thread(target=self._insist_on_stop, args=(reason,), name="ask-to-stop", daemon=True).start()

    def _insist_on_stop(self, reason: str) -> None:
        from shardkeep.ps.control.grpc.client import request_stop

        while not self.closed.is_set():  # the coordinator may still be starting or restarting
            coordinator = None
            try:
                if (coordinator := self._folder.endpoint()) is not None:
                    request_stop(coordinator, reason)
                    self._stop_heard.set()
                    return
            except ShardkeepError as error:
                if not error.retryable:  # the limit of the supervisor's loop ends the job
                    return
            self.closed.wait(POLL_S if coordinator is None else RETRY_S)

    def _ask(self, call: Callable[[Endpoint], None]) -> bool:
        """Calls the coordinator in a thread. Returns False if it has not listened yet.

        The limit of the supervisor's loop covers a coordinator that does not answer."""
        if (coordinator := self.endpoint()) is None:
            return False
        threading.Thread(target=call, args=(coordinator,), name="ask-coordinator", daemon=True).start()
        return True

    def _report(self, coordinator: Endpoint, death: Death, deadline: Deadline) -> None:
        from shardkeep.ps.control.grpc.client import report_death

        while True:  # the coordinator may be restarting
            try:
                reason = death.how()
                state = report_death(coordinator, role=death.role, index=death.index, pid=death.pid, reason=reason)
                self._heard.add(death.pid)
                if state.state in ("forming", "training", "recovering"):
                    self._outlived.add(death.pid)
            except ShardkeepError as error:
                if error.retryable and not deadline.over:
                    time.sleep(POLL_S)
                    continue
            return
