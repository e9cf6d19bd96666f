"""Ctrl-C and SIGTERM as a loop can see them."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any


class Interrupts:
    """Ctrl-C and SIGTERM. The first `tolerated` ones are only counted, for a loop to see; the next one interrupts."""

    def __init__(self) -> None:
        self.count = 0
        self.tolerated = 0
        self.notice = ""  # written on stderr at the first that is tolerated
        self.terminated = False  # SIGTERM was among them
        self.late = False  # `grace_s` is over
        self.grace_s: float | None = None
        """Seconds after SIGTERM until it interrupts as a second one would; None = it does not."""
        self._before: dict[signal.Signals, Any] = {}

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

    def _caught(self, number: int, _frame: object) -> None:
        self.count += 1
        self.terminated |= number == signal.SIGTERM
        self.late |= number == signal.SIGALRM
        if self.count > self.tolerated or self.late:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self.grace_s is not None:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._caught)
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        if self.count == 1 and self.notice:
            os.write(2, f"{self.notice}\n".encode())  # print is not safe in a signal handler
