"""The steps between two checkpoints: fixed by the config, or chosen from the pace of the first steps (`auto`)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_gather, broadcast_object

AUTO_AFTER_STEPS = 50
"""Steps of a generation after which `auto` chooses."""
AUTO_SECONDS, AUTO_JOURNAL_BYTES, AUTO_FEWEST_STEPS = 600.0, 4e9, 100
"""The training that a lost job may lose, the largest journal of a server, and the lower bound for small jobs."""


class CheckpointInterval:
    """Lives as long as the process; every rank makes the same calls.

    Args:
        every_steps: 0 = no checkpoint, None = chosen here.
        journal_bytes: Asks the servers for the sizes of their journals; only rank 0 calls it.
    """

    def __init__(self, every_steps: int | None, journal_bytes: Callable[[], list[int]]) -> None:
        self._every = every_steps
        self._journal_bytes = journal_bytes
        self._began = (0, 0.0)
        self._journals: list[int] = []

    def enter(self, step: int, rank: int) -> None:
        """Starts to measure the pace at `step`, the first of a generation."""
        self._began = (step, time.perf_counter())
        if self._every is None and not rank:
            self._journals = self._journal_bytes()

    def share(self, collective: Collective) -> None:
        """Takes the interval that any rank has chosen in an earlier generation. Blocks."""
        own = torch.tensor([-1 if self._every is None else self._every])
        chosen = int(all_gather(collective, own, purpose="agreements").max())
        self._every = None if chosen < 0 else chosen

    def choose(self, step: int, collective: Collective) -> int | None:
        """Chooses the interval if it is open and enough steps are done, else returns None. May block."""
        if self._every is not None or step < self._began[0] + AUTO_AFTER_STEPS:
            return None
        chosen = 0 if collective.rank else self._auto(step)
        self._every = int(broadcast_object(collective, chosen, purpose="agreements"))
        return self._every

    def ends(self, step: int) -> bool:
        """Whether a checkpoint is due when `step` steps are done."""
        return bool(self._every and step % self._every == 0)

    def _auto(self, step: int) -> int:
        """The time that this measures changes no bit of the trained model."""
        start, began = self._began
        grown = [now - before for now, before in zip(self._journal_bytes(), self._journals, strict=True)]
        by_time = AUTO_SECONDS * (step - start) / (time.perf_counter() - began)
        by_size = AUTO_JOURNAL_BYTES * (step - start) / max(1, *grown)
        return max(AUTO_FEWEST_STEPS, int(min(by_time, by_size)))
