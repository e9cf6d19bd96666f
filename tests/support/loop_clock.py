"""An event loop whose clock a test turns, for a web server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from shardkeep.web.server import WebServer

LIMIT_S = 60.0
ROUNDS = 40
"""Turns of the loop in which all is done that can be done now: accepting, reading, replying take ten."""


class TurnedLoop(asyncio.SelectorEventLoop):
    """Runs in the server's thread. Seconds pass in `turn` alone."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def turn(self, seconds: float) -> None:
        """Lets time pass, and waits until the server has done what is due. From another thread."""
        self.pass_by(seconds)
        self.settle()

    def pass_by(self, seconds: float) -> None:
        self.call_soon_threadsafe(setattr, self, "_now", self._now + seconds)

    def settle(self) -> None:
        """Waits until the server has done all that it can do without time passing. From another thread."""
        for _ in range(ROUNDS):
            done = threading.Event()
            self.call_soon_threadsafe(done.set)
            assert done.wait(LIMIT_S)


@contextlib.contextmanager
def turned_server() -> Iterator[tuple[WebServer, TurnedLoop]]:
    """A web server whose thread has such a loop, from its first address to the end of the `with`."""
    loop, web = TurnedLoop(), WebServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncio.new_event_loop", lambda: loop)
        try:
            yield web, loop
        finally:
            end = threading.Thread(target=web.close)
            end.start()
            while end.is_alive():  # it gives connections some seconds
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.pass_by(1.0)
                end.join(0.01)
