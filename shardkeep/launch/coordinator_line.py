"""The launcher's connection to the coordinator. Every call runs in a thread beside the supervisor's loop."""

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
"""Seconds until a stop that nobody heard is requested again."""
TELL_S = 20.0
"""Seconds in which a coordinator must hear of a death, before the member is started again."""


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
        """Set when its threads are to end."""

    @property
    def stop_heard(self) -> bool:
        """Whether the coordinator has received the stop."""
        return self._stop_heard.is_set()

    def close(self) -> None:
        """Ends the threads at their next look."""
        self.closed.set()

    def endpoint(self) -> Endpoint | None:
        """The coordinator, once it has listened; one that takes over is at the same address.

        The run folder has it until the job is over; the line remembers it, for deaths after that."""
        if self._endpoint is None:
            with contextlib.suppress(ShardkeepError):  # its token went with the job
                self._endpoint = self._folder.endpoint()
        return self._endpoint

    def settled(self, pid: int) -> bool:
        """Whether the coordinator has heard of a death that `report_until_heard` reports, or its time has run out."""
        return pid in self._settled

    def report(self, death: Death) -> None:
        """Reports a member's death once: the coordinator would notice it later, by the lease."""
        if death.pid not in self._reported and self._ask(
            lambda coordinator: self._report(coordinator, death, Deadline(0.0))
        ):
            self._reported.add(death.pid)

    def outlived(self, deaths: Iterable[Death]) -> bool:
        """Whether the coordinator has heard of these deaths and waits for replacements: it will not fail the job."""
        return all(death.pid in self._outlived for death in deaths)

    def heard(self, death: Death) -> bool:
        """Whether the coordinator has heard of this death: its verdict takes it into account."""
        return death.pid in self._heard

    def report_until_heard(self, death: Death) -> None:
        """Reports a member's death until the coordinator hears it, for `TELL_S` seconds. A coordinator that has not
        listened yet knows no member and hears nothing."""
        self._reported.add(death.pid)

        def insist(coordinator: Endpoint) -> None:
            try:
                self._report(coordinator, death, Deadline(TELL_S))
            finally:
                self._settled.add(death.pid)

        if not self._ask(insist):
            self._settled.add(death.pid)

    def request_stop(self) -> None:
        """Starts to request the stop until the coordinator hears it."""
        threading.Thread(target=self._insist_on_stop, name="ask-to-stop", daemon=True).start()

    def _insist_on_stop(self) -> None:
        from shardkeep.ps.control.grpc.client import request_stop

        while not self.closed.is_set():  # the coordinator may not listen yet, or be on its way back
            try:
                if (coordinator := self._folder.endpoint()) is not None:
                    request_stop(coordinator, "Ctrl-C or SIGTERM")
                    self._stop_heard.set()
                    return
            except ShardkeepError as error:
                if not error.retryable:  # the loop's limit ends the job
                    return
            self.closed.wait(RETRY_S)

    def _ask(self, call: Callable[[Endpoint], None]) -> bool:
        """Calls the coordinator beside the loop; the loop's limit covers one that does not answer. False = it has not
        listened yet."""
        if (coordinator := self.endpoint()) is None:
            return False
        threading.Thread(target=call, args=(coordinator,), name="ask-coordinator", daemon=True).start()
        return True

    def _report(self, coordinator: Endpoint, death: Death, deadline: Deadline) -> None:
        from shardkeep.ps.control.grpc.client import report_death

        while True:  # the coordinator may be on its way back itself
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
