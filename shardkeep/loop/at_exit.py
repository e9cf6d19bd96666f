"""The end of the interpreter: closes what a script left open, while the threads of torch RPC can still be ended.

Later C++ destroys them as they run, and the process aborts.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from shardkeep.base.errors import ShardkeepError
from shardkeep.base.log import EventLog

_log = EventLog("custom")


def at_exit(close: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Calls `close` when the interpreter ends, with the exception that ended the script. Returns what prevents that.

    By `atexit`: Python joins the script's own threads before, and they may train."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() != owner:  # a fork has no RPC threads
            return
        interactive = hasattr(sys, "ps1")  # the exception is that of an earlier input
        try:
            close(None if interactive else getattr(sys, "last_value", None))
        except ShardkeepError as error:
            _log.warning(f"the client that the script left open was not closed in order: {error}")

    atexit.register(run)
    return lambda: atexit.unregister(run)
