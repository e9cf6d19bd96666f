"""Ctrl-C and SIGTERM as a loop can see them. Decides nothing."""

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
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, _number: int, _frame: object) -> None:
        self.count += 1
        if self.count > self.tolerated:
            raise KeyboardInterrupt
        if self.count == 1 and self.notice:
            os.write(2, f"{self.notice}\n".encode())  # print is not safe in a signal handler
