"""Counts Ctrl-C and SIGTERM, so that a loop can react to them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Counts Ctrl-C and SIGTERM. The first `tolerated` signals are only counted; the next one raises KeyboardInterrupt.

    With `grace_s`, a SIGTERM never interrupts at once: a platform may send several, or one after a Ctrl-C."""

    def __init__(self) -> None:
        self.count = 0
        self.tolerated = 0
        self.notice = ""  # printed to stderr at the first tolerated signal
        self.at_once = False  # a Ctrl-C followed an earlier signal
        self.terminated = False  # one of the signals was SIGTERM
        self.late = False  # `grace_s` is over
        self.reason = ""
        """Why the job stops, if not by a signal."""
        self.grace_s: float | None = None
        """Seconds from the first SIGTERM to the interrupt; None = SIGTERM counts like Ctrl-C."""
        self._before: dict[signal.Signals, Any] = {}
        self._breakable = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def request(self, reason: str) -> None:
        """Stops the job as the first signal does, for another reason."""
        if not self.count:
            self.reason = reason
        self.count += 1

    @property
    def exhausted(self) -> bool:
        """Whether more signals came than are tolerated: a KeyboardInterrupt ends the job."""
        return self.late or self.count > self.tolerated

    @contextlib.contextmanager
    def breakable(self, notice: str) -> Iterator[None]:
        """Around code that may hang: a Ctrl-C after an earlier signal raises KeyboardInterrupt in it.

        `notice`: printed to stderr at the first signal, unless there is one already."""
        before, self.notice, self._breakable = self.notice, self.notice or notice, True
        try:
            yield
        finally:
            self.notice, self._breakable = before, False

    def _caught(self, number: int, _frame: object) -> None:
        self.count += 1
        self.at_once |= number == signal.SIGINT and self.count > 1
        self.terminated |= number == signal.SIGTERM
        self.late |= number == signal.SIGALRM
        limit_s = self.grace_s if number == signal.SIGTERM and self.tolerated else None
        broken = self._breakable and self.at_once and number == signal.SIGINT
        if broken or self.late or (self.count > self.tolerated and limit_s is None):
            raise KeyboardInterrupt
        if limit_s is not None and signal.SIGALRM not in self._before:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._caught)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        if self.count == 1 and self.notice:
            os.write(2, f"{self.notice}\n".encode())  # print is not safe in a signal handler
