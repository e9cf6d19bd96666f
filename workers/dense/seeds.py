"""Random numbers of dropout: of each micro-batch by (seed, step, rank, micro-batch) alone."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import torch
import xxhash


class MicroBatchSeeds:
    """Counts the micro-batches of a step and seeds torch for each."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._micro_batch = 0

    def restart(self) -> None:
        """Another step begins, or this one again."""
        self._micro_batch = 0

    @contextlib.contextmanager
    def of_next(self, step: int, rank: int) -> Iterator[None]:
        """Random numbers of the step's next micro-batch; the process's own generator is left as it was."""
        place = struct.pack("<4q", self._seed, step, rank, self._micro_batch)
        key = xxhash.xxh3_64_intdigest(place) >> 1
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.default_generator.manual_seed(key)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(key)
            yield
        self._micro_batch += 1
