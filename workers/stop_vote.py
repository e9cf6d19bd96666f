"""Whether ranks stop: each may be asked to, and all stop at the same step, without waiting for each other's answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardkeep.workers.collective import Collective

PACE_S = 0.5
"""About how often ranks ask each other."""
PACED_AFTER_STEPS = 20
"""Until then they do at every step."""


class StopVote:
    """Every rank makes the same calls, one before each step. The question of one step is answered at the next, when
    the ranks have met in the sum of the dense gradients: to wait for it at once would let the fast ones idle."""

    def __init__(self, collective: Collective, start_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._collective = collective
        self._start_step = start_step
        self._clock = clock
        self._since = clock()
        self._pace = 1
        self._answers: Callable[[], torch.Tensor] | None = None

    def all_stop(self, step: int, mine: bool) -> bool:
        """Whether all ranks stop before `step`, because some rank said so a step earlier; one alone: now. `mine`: what
        this rank says now."""
        if self._collective.world_size == 1:
            return mine
        stop = self._answers is not None and bool(self._answers().any())
        self._answers = None
        if step == self._start_step + PACED_AFTER_STEPS:
            elapsed_s = max(self._clock() - self._since, 1e-3)
            mine_pace = max(1, int(PACE_S * PACED_AFTER_STEPS / elapsed_s))
            self._pace = int(self._collective.broadcast_object(mine_pace))
        if not stop and step % self._pace == 0:
            self._answers = self._collective.begin_all_gather(torch.tensor([mine]))
        return stop

    def end(self) -> None:
        """After the last step: waits for the question that is still open, for what the ranks say next is another."""
        if self._answers is not None:
            self._answers()
            self._answers = None
