"""MemoryWatch: tells the job when a server nears the end of its memory. Has no thread: the server asks it to look."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.limits import limit_bytes, rss_bytes
from shardkeep.base.sizes import size_text

_log = EventLog("roles")
NEAR = 0.9
"""Share of the limit above which a server warns."""
CLEAR = 0.85
"""Share below which the warning no longer holds."""
LOOK_S, AGAIN_S = 5.0, 600.0
"""Seconds between two looks, and between two warnings while the memory stays near its end."""


class MemoryWatch:
    """Of one server and generation. A look costs a millisecond every LOOK_S seconds.

    Args:
        report: Sends an event to the coordinator; never blocks.
    """

    def __init__(
        self,
        server: int,
        report: Callable[[str, dict[str, Any]], None],
        *,
        used: Callable[[], int] = rss_bytes,
        limit: Callable[[], int] = limit_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._report = server, report
        self._used, self._limit, self._clock = used, limit, clock
        self._next_look = clock()
        self._warned: float | None = None

    def look(self) -> None:
        """Reports what has changed, if a look is due."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        used, limit = self._used(), self._limit()
        if used > NEAR * limit and (self._warned is None or now >= self._warned + AGAIN_S):
            self._warned = now
            text = (
                f"server {self._server} has {size_text(used)} in RAM, {100 * used / limit:.0f} % of the limit of "
                f"{size_text(limit)}: more servers, evict.max_rows or dtype: int8 need less (docs/guide/tables.md)"
            )
            _log.warning(text)
            self._report(
                "event", {"text": f"warning: {text}", "warning": text, "memory": _facts(used, limit, near=True)}
            )
        elif self._warned is not None and used < CLEAR * limit:
            self._warned = None
            text = f"server {self._server} has {size_text(used)} in RAM again, of {size_text(limit)}"
            self._report("event", {"text": text, "phase": "memory", "memory": _facts(used, limit, near=False)})


def _facts(used: int, limit: int, *, near: bool) -> dict[str, Any]:
    return {"bytes": used, "limit_bytes": limit, "near": near}
