"""Kills a coordinator that does not answer for two leases, so that another can take over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from shardkeep.base.errors import ShardkeepError
from shardkeep.launch.children import Child
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.ps.control.grpc.endpoint import Endpoint

STARTING_S = 30.0
"""Least number of seconds for the first answer of a coordinator: a start takes long on a busy machine."""


def watch_silence(line: CoordinatorLine, coordinator: Callable[[], Child | None], *, lease_s: float) -> None:
    """Starts the thread, which ends when `line` is closed. `coordinator`: returns the running process, if any."""
    threading.Thread(target=_watch, args=(line, coordinator, lease_s), name="watch-coordinator", daemon=True).start()


def _watch(line: CoordinatorLine, coordinator: Callable[[], Child | None], lease_s: float) -> None:
    heard = time.monotonic()
    watched = answered = 0  # pids of the running coordinator and of the last one that answered
    while not line.closed.wait(lease_s / 4):
        endpoint, now = line.endpoint(), coordinator()
        if endpoint is None or now is None or now.pid != watched:  # none runs, or a new one has just started
            heard, watched = time.monotonic(), 0 if now is None else now.pid
        elif _answers(endpoint, timeout_s=lease_s / 2):
            heard, answered = time.monotonic(), now.pid
        else:
            patience_s = 2 * lease_s if now.pid == answered else max(2 * lease_s, STARTING_S)
            if time.monotonic() - heard > patience_s:
                now.kill()
                heard = time.monotonic()


def _answers(coordinator: Endpoint, *, timeout_s: float) -> bool:
    from shardkeep.ps.control.grpc.client import fetch_status

    with contextlib.suppress(ShardkeepError):
        fetch_status(coordinator, timeout_s=timeout_s)
        return True
    return False
