"""The end of the interpreter: closes what a script left open, while the threads of torch RPC can still be ended.

Later C++ destroys them as they run, and the process aborts.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shardkeep.base.errors import ShardkeepError
from shardkeep.base.logs.log import EventLog

_log = EventLog("custom")


def at_exit(client: AbstractContextManager[Any]) -> Callable[[], None]:
    """Leaves `client` when the interpreter ends, with the exception that ended the script. Returns what prevents that.

    By `atexit`: Python joins the script's own threads before, and they may train."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() != owner:  # a fork has no RPC threads
            return
        interactive = hasattr(sys, "ps1")  # the exception is that of an earlier input
        error = None if interactive else getattr(sys, "last_value", None)
        try:
            client.__exit__(error and type(error), error, None)
        except ShardkeepError as problem:
            _log.warning(f"the client that the script left open was not closed in order: {problem}")

    atexit.register(run)
    return lambda: atexit.unregister(run)
