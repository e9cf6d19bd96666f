"""Kills silent processes: a coordinator that does not answer for two leases, so that another can take over, and a
member whose lease is over, by the coordinator's answer, so that it does not wake up beside its replacement."""

from __future__ import annotations

import contextlib
import threading
import time

from shardkeep.base.errors import ShardkeepError
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes import JobProcesses
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.records import Status

STARTING_S = 30.0
"""Least number of seconds for the first answer of a coordinator: a start takes long on a busy machine."""


def watch_silence(line: CoordinatorLine, processes: JobProcesses, *, lease_s: float) -> None:
    """Starts the thread, which ends when `line` is closed."""
    threading.Thread(target=_watch, args=(line, processes, lease_s), name="watch-coordinator", daemon=True).start()


def _watch(line: CoordinatorLine, processes: JobProcesses, lease_s: float) -> None:
    heard = time.monotonic()
    watched = answered = 0  # pids of the running coordinator and of the last one that answered
    while not line.closed.wait(min(1.0, lease_s / 4)):
        endpoint, now = line.endpoint(), processes.coordinator()
        if endpoint is None or now is None or now.pid != watched:  # none runs, or a new one has just started
            heard, watched = time.monotonic(), 0 if now is None else now.pid
        elif (status := _status(endpoint, timeout_s=lease_s / 2)) is not None:
            heard, answered = time.monotonic(), now.pid
            for member in status.members:
                if member.condition == "lost" and member.age_s >= lease_s:
                    processes.kill(member.role, member.index, member.pid)
        else:
            patience_s = 2 * lease_s if now.pid == answered else max(2 * lease_s, STARTING_S)
            if time.monotonic() - heard > patience_s:
                now.kill()
                heard = time.monotonic()


def _status(coordinator: Endpoint, *, timeout_s: float) -> Status | None:
    from shardkeep.ps.control.grpc.client import fetch_status

    with contextlib.suppress(ShardkeepError):
        return fetch_status(coordinator, timeout_s=timeout_s)
    return None
