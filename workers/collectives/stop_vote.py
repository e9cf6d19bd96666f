"""A vote to stop: a request at any rank stops all ranks at the same step, without idling until the last answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import begin_all_gather, broadcast_object

PACE_S = 0.5
"""About how often ranks ask each other."""
PACED_AFTER_STEPS = (2, 20)
"""When the ranks agree how often that is; until the first of them they ask at every step."""
LONG_STEP_S = 1.0
"""Steps from this mean on are worth more than a wait: there the answer is read at once."""


class StopVote:
    """Every rank makes the same calls, one before each step.

    The question of one step is answered at the next, when the ranks have met in the sum of the dense gradients: to wait
    for it at once would let the fast ones idle."""

    def __init__(self, collective: Collective, start_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._collective = collective
        self._start_step = start_step
        self._clock = clock
        self._since = clock()
        self._pace, self._at_once = 1, False
        self._answers: Callable[[], torch.Tensor] | None = None

    def all_stop(self, step: int, mine: bool) -> bool:
        """Whether all ranks stop before `step`, because some rank said so: a step earlier, now where steps are long or
        it is alone. `mine`: what this rank says now."""
        if self._collective.world_size == 1:
            return mine
        stop = self._answered()
        if step - self._start_step in PACED_AFTER_STEPS:
            self._agree(step - self._start_step)
        if not stop and step % self._pace == 0:
            self._answers = begin_all_gather(self._collective, torch.tensor([mine]), purpose="agreements")
            stop = self._at_once and self._answered()
        return stop

    def _answered(self) -> bool:
        answers, self._answers = self._answers, None
        return answers is not None and bool(answers().any())

    def _agree(self, steps: int) -> None:
        """On what rank 0 has measured over the first `steps`."""
        step_s = max(self._clock() - self._since, 1e-3) / steps
        wish = [max(1, int(PACE_S / step_s)), step_s >= LONG_STEP_S]
        self._pace, self._at_once = broadcast_object(self._collective, wish, purpose="agreements")

    def end(self) -> None:
        """After the last step: waits for the question that is still open, for what the ranks say next is another."""
        self._answered()
