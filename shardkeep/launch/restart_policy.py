"""The restart policy of a job: who is started again, and when. Logic only: no processes, no threads, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardkeep.launch.children import Death

BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
"""Seconds before a member that has died twice without one more step is started again, doubled with each death."""


@dataclass(frozen=True)
class Vacancy:
    """The place of a process that was killed, until another process is started for it."""

    role: str
    index: int
    pid: int
    """The dead process."""
    due: float
    """Time of the policy's clock from which another process may start."""


class Restarts:
    """Counts deaths and keeps the vacancies.

    Args:
        limit: Deaths of one member in a row without one more step that the job outlives.
        clock: Seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._deaths_without_step: dict[tuple[str, int], tuple[int, int | None]] = {}
        self._refused: set[int] = set()
        self.vacancies: list[Vacancy] = []

    def fatal(self, death: Death) -> bool:
        """Whether nobody is started for this death: the process failed by itself, or a restart was refused."""
        return not death.by_signal or death.pid in self._refused

    def counts(self, death: Death, step: int | None) -> bool:
        """Counts a death after `step`; whether the job outlives it."""
        count, last = self._deaths_without_step.get((death.role, death.index), (0, None))
        count = count + 1 if last == step else 1
        if count > self._limit:
            return False
        self._deaths_without_step[death.role, death.index] = count, step
        return True

    def refuse(self, death: Death) -> None:
        """Starts nobody for this death."""
        self._refused.add(death.pid)

    def replace(self, death: Death) -> None:
        """Opens the vacancy of a counted death: due at once the first time, then later and later."""
        count, _ = self._deaths_without_step[death.role, death.index]
        delay_s = 0.0 if count == 1 else min(BACKOFF_S * 2 ** (count - 2), LONGEST_BACKOFF_S)
        self.vacancies.append(Vacancy(death.role, death.index, death.pid, self._clock() + delay_s))

    def only_coordinator(self) -> None:
        """Drops the vacancies of members: a job that stops replaces the coordinator alone."""
        self.vacancies = [vacancy for vacancy in self.vacancies if vacancy.role == "coordinator"]

    def take_due(self, ready: Callable[[Vacancy], bool]) -> list[Vacancy]:
        """Removes and returns the vacancies whose time has come and for which `ready` holds."""
        due = [vacancy for vacancy in self.vacancies if vacancy.due <= self._clock() and ready(vacancy)]
        self.vacancies = [vacancy for vacancy in self.vacancies if vacancy not in due]
        return due
