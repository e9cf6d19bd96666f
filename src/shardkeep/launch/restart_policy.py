"""The restart policy of a job: which process is started again, and when. Logic only: no threads, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardkeep.launch.processes.children import Death

BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
"""Seconds before the restart of a process that died twice without one more step. They double with each death."""


@dataclass(frozen=True)
class Vacancy:
    """The role and index of a killed process, until another process replaces it."""

    role: str
    index: int
    pid: int
    """Pid of the dead process."""
    due: float
    """Earliest time for the replacement, by the policy's clock."""


class Restarts:
    """Counts deaths and holds the vacancies.

    Args:
        limit: Deaths of one process in a row, without one more step, that the job survives.
        clock: Returns the time in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._deaths_without_step: dict[tuple[str, int], tuple[int, int | None]] = {}
        self._refused: set[int] = set()
        self.vacancies: list[Vacancy] = []

    def fatal(self, death: Death) -> bool:
        """Whether no process replaces this one: it failed without a signal, or its restart was refused. A coordinator
        that leaves on a signal has stopped the job."""
        stopped = death.role == "coordinator" and death.code >= 0
        return stopped or not death.by_signal or death.pid in self._refused

    def counts(self, death: Death, step: int | None) -> bool:
        """Counts a death after `step`. Returns whether the job survives it."""
        count, last = self._deaths_without_step.get((death.role, death.index), (0, None))
        count = count + 1 if last == step else 1
        if count > self._limit:
            return False
        self._deaths_without_step[death.role, death.index] = count, step
        return True

    def refuse(self, death: Death) -> None:
        """Refuses a restart after this death."""
        self._refused.add(death.pid)

    def replace(self, death: Death) -> None:
        """Opens the vacancy of a counted death. The first is due at once, each further one later."""
        count, _ = self._deaths_without_step[death.role, death.index]
        delay_s = 0.0 if count == 1 else min(BACKOFF_S * 2 ** (count - 2), LONGEST_BACKOFF_S)
        self.vacancies.append(Vacancy(death.role, death.index, death.pid, self._clock() + delay_s))

    def only_coordinator(self) -> None:
        """Drops the vacancies of members: a stopping job replaces only the coordinator."""
        self.vacancies = [vacancy for vacancy in self.vacancies if vacancy.role == "coordinator"]

    def take_due(self, ready: Callable[[Vacancy], bool]) -> list[Vacancy]:
        """Removes and returns the vacancies that are due and for which `ready` is true."""
        due = [vacancy for vacancy in self.vacancies if vacancy.due <= self._clock() and ready(vacancy)]
        self.vacancies = [vacancy for vacancy in self.vacancies if vacancy not in due]
        return due
