"""Process 1 of a container: the system gives it every orphan, and it must collect their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_process_one(run: Callable[[], int]) -> int:
    """Runs `run`; in process 1, in a child of it that gets its SIGTERM and SIGINT. Call it before there are threads."""
    if os.getpid() != 1 or not (child := os.fork()):
        return run()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _frame: os.kill(child, caught))
    pid = status = 0
    while pid != child:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
