"""The exit code of a role that left its job in order when a signal asked it to: 128 + N, as shells report signal N."""

from __future__ import annotations

import signal

LEAVING = (signal.SIGTERM, signal.SIGINT)
"""The signals on which a role leaves."""


def code_of_leaving(number: int) -> int:
    """The exit code of a role that leaves on signal `number`."""
    return 128 + number


def signal_left_on(code: int) -> str | None:
    """`SIGTERM`, or another name of LEAVING, where `code` is that of a role that left on it; else None."""
    return next((number.name for number in LEAVING if code == code_of_leaving(number)), None)


START_AGAIN = code_of_leaving(signal.SIGTERM)
"""The exit code of a machine that left its job: its engine starts it again."""
