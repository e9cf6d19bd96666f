"""A warning of the page, what it may look at, and the words that warnings share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkeep.page.records import Json, RunRecords
from shardkeep.page.sections import own_loop

MOST_NAMED = 3
Level = Literal["bad", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Warning:
    """`text`: what is seen, with numbers. `advice`: what it means or what to do."""

    level: Level
    text: str
    advice: str = ""
    about: str = ""
    """The section of the page with the figures."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a warning may look at. `now`: seconds since 1970; of an ended job, the time of its last record."""

    records: RunRecords
    state: str
    now: float
    config: Mapping[str, Any]
    checkpoints: Sequence[Json] = ()

    @property
    def loop(self) -> bool:
        """Whether the training loop is the user's own."""
        return own_loop(self.config)

    @property
    def running(self) -> bool:
        """Whether the job has processes."""
        return self.state in ("starting", "training", "recovering", "stopping", "forming")


Check = Callable[[Sight], list[Warning]]


def span(seconds: float) -> str:
    """`41 minutes`, of a number of seconds."""
    seconds = max(0.0, seconds)  # clocks of machines differ
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} seconds"


def one(count: int, noun: str, plural: str) -> str:
    """`1 recovery`, `2 recoveries`."""
    return f"{count} {noun if count == 1 else plural}"


def several(names: Sequence[str], noun: str, plural: str) -> str:
    """The names, or their number where there are many."""
    return ", ".join(names) if len(names) <= MOST_NAMED else one(len(names), noun, plural)
