"""The web server of a process: a thread with an event loop, which serves a site at each of its addresses.

The first connection loads starlette and uvicorn, so an address that nobody visits costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from shardkeep.base.logs.log import EventLog
from shardkeep.web.site import Site, listener_at

if TYPE_CHECKING:
    from shardkeep.web.http import Listening
    from shardkeep.web.routes import Routes

_log = EventLog("web")
CLOSE_S, GRACE_S = 2.0, 1.0
"""Seconds that `close` waits, and that running replies have of them."""


class WebServer:
    """Serves from `open` to `close`. `nice`: of its thread, which yields to training where cores are scarce."""

    def __init__(self, *, nice: int = 0) -> None:
        self._nice = nice
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._unvisited: list[socket.socket] = []
        self._visited: list[tuple[Routes, Listening]] = []

    def open(self, listen: str, site: Site, *, before: str | None = None) -> str:
        """Serves a site at HOST:PORT; port 0 = any free one. Returns the address. Raises ConfigError: it cannot listen.

        `before`: an address to take again if it is free."""
        listener, address = listener_at(listen, site.limits.backlog, before=before)
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name="web", daemon=True)
            self._thread.start()
        self._unvisited.append(listener)
        self._loop.call_soon_threadsafe(self._loop.add_reader, listener, self._visit, listener, site)
        return address

    def close(self) -> None:
        """Ends the replies that run, and the thread. Idempotent."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(CLOSE_S)

    def wait(self) -> None:
        """Blocks until the server ends."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._nice and sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop.set_exception_handler(lambda _loop, _context: None)  # a broken connection is its peer's matter
        await self._stopping.wait()
        for listener in self._unvisited:
            self._loop.remove_reader(listener)
            listener.close()
        await asyncio.gather(*(_end(*each) for each in self._visited), return_exceptions=True)

    def _visit(self, listener: socket.socket, site: Site) -> None:
        """Serves the site, which has its first visitor."""
        from shardkeep.web.http import Listening

        self._loop.remove_reader(listener)
        self._unvisited.remove(listener)
        try:
            routes = site.routes()
        except Exception as error:  # the run folder is gone
            _log.warning("an address is not served", why=f"{type(error).__name__}: {error}")
            listener.close()
        else:
            self._visited.append((routes, Listening(listener, routes, site.limits, site.access.context())))


async def _end(routes: Routes, listening: Listening) -> None:
    if routes.close is not None:
        await routes.close()
    await listening.stop(GRACE_S)
