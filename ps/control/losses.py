"""Losses: how far a job may go back before it ends instead. Pure logic: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardkeep.ps.control.records import Record, ResumeRange

NO_LIMIT = 2**62
SHORTEST_PERIOD = 100
"""Steps: the least that `every_steps: auto` comes to, before it is worked out."""


@dataclass(slots=True)
class Losses:
    """Counts what a recovery would lose, and refuses too much of it.

    `most`: `recovery.max_lost_steps`; None = one checkpoint period, and the steps that the job trains while the
    checkpoint that ends it is written."""

    most: int | None = NO_LIMIT
    period: int | None = None
    """Steps between two checkpoints; 0 = there are none, None = not worked out yet."""
    failed: bool = False
    """Whether the last checkpoint could not be written."""

    @property
    def limit(self) -> int:
        """Steps that a recovery may lose."""
        if self.most is not None:
            return self.most
        if self.period is None:
            return SHORTEST_PERIOD
        return self.period if self.failed else 2 * self.period

    def heard(self, record: Record) -> None:
        """Takes worker 0's record of a checkpoint: written, failed, or the number of steps between two."""
        if "every_steps" in record:
            self.period = int(record["every_steps"])
        else:
            self.failed = "bytes" not in record

    def refusal(self, lost: int, *, step: int, ranges: Iterable[ResumeRange], cause: str) -> str | None:
        """Why a job that would lose so many steps, and resume at `step`, ends instead; None = it may continue."""
        if lost <= self.limit:
            return None
        allowed = f"recovery.max_lost_steps allows {self.limit}"
        if self.most is None and self.period is not None:
            allowed += ", of one checkpoint period" if self.period else ", as no checkpoints are kept"
        where = f"the checkpoint of step {step}" if step else "step 0, as no checkpoint is there"
        whys = dict.fromkeys([cause, *(one.why for one in ranges)])
        told = "".join(f"{why}; " for why in whys if why)
        return f"{told}{lost} steps would be lost by going back to {where}; {allowed}"
