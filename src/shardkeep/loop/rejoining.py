"""Rejoining: the thread by which a loop's client follows its servers from one generation to the next.

It is a thread, because another trainer may be in the user's own all-reduce and wait for this one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from shardkeep.base.errors import JobStopped, MemberLost, ShardkeepError, TransportError
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.member.group import join_group
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.grpc.client import ControlClient, fetch_status
from shardkeep.ps.control.records import Formation, Offer, ResumeRange
from shardkeep.ps.transport.lasting import LastingTransport
from shardkeep.ps.transport.transport import Transport
from shardkeep.trust.endpoint import Endpoint

CLOSE_S = 5.0
"""Seconds that closing a client waits for the thread, which may be joining a generation."""

_log = EventLog("custom")


class Rejoining:
    """Joins each generation that follows `formation`, and lets the transport send again what is kept.

    Ends every call of the transport with an error when the job is over, or when no generation can follow.

    Args:
        specs: The tables, as this trainer told the coordinator.
        metered: Counts the bytes of another generation's transport.
    """

    def __init__(
        self,
        control: ControlClient,
        coordinator: Endpoint,
        config: JobConfig,
        formation: Formation,
        specs: Sequence[TableSpec],
        transport: LastingTransport,
        metered: Callable[[Transport], Transport],
    ) -> None:
        self._control, self._config, self._formation, self._specs = control, config, formation, specs
        self._coordinator, self._transport, self._metered = coordinator, transport, metered
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rejoin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which joins no other generation."""
        self._closed = True
        self._control.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while self._lost():
                self._transport.suspend()
                self._join(self._transport.loss or self._control.state.message)
        except ShardkeepError as error:
            self._transport.fail(error)

    def _lost(self) -> bool:
        """Blocks until the generation is lost, or the client is closed (False). Raises why the job is over."""
        control, number = self._control, self._formation.generation
        over = control.wait_lost_or_over(number, unless=lambda: self._closed or bool(self._transport.loss))
        if self._closed:
            return False
        if over and not control.lost(number):
            raise control.state.error() or JobStopped("the job is over")
        return True

    def _join(self, why: str) -> None:
        """Joins the next generation. Raises what ends the job, MemberLost where the servers lost updates."""
        control, config, index = self._control, self._config, self._control.member.index
        first, last = self._transport.resume_range()
        own = ResumeRange(first, last, holds=True)
        offer = Offer(tuple(self._specs), resume_range=own, settings=config.agreed())
        formation = control.join_again(offer, self._formation, why)
        if formation is None:
            raise JobStopped("the job is over")
        self._formation = formation
        if formation.restores or formation.lacking:
            who = "the servers" if formation.restores else f"worker {formation.lacking[0]}"
            raise MemberLost(f"{self._loss() or why}; {who} cannot continue at step {last}: start all trainers again")
        try:
            place = "worker", index, control.member.host, None
            group = join_group(config, formation, *place, lost=self._given_up, moves=lambda: control.state.moves)
            self._transport.renew(self._metered(group), formation.generation, formation.start_step)
        except TransportError as error:  # this generation is lost as well
            if not error.retryable:
                raise
            self._transport.loss = self._transport.loss or str(error)
            return
        _log.info("the servers formed again", generation=formation.generation, step=last)
        if loss := self._loss():
            _log.warning(loss)

    def _loss(self) -> str:
        """The last recovery in words; "" = it lost no step, or the coordinator does not answer."""
        with contextlib.suppress(ShardkeepError):
            recoveries = [event for event in fetch_status(self._coordinator).events if event.get("phase") == "recovery"]
            return str(recoveries[-1]["text"]) if recoveries and recoveries[-1]["lost_steps"] else ""
        return ""

    def _given_up(self, generation: int) -> bool:
        return self._closed or self._control.lost(generation)
