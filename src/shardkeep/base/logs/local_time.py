"""The time of day as records of a run folder have it."""

from __future__ import annotations

from datetime import datetime


def time_of_day() -> str:
    """Now: local, ISO 8601, in milliseconds."""
    return datetime.now().isoformat(timespec="milliseconds")
