"""Which samples belong to which step and rank: pure arithmetic on (step, rank), no state, no data.

B = samples of one rank in one step
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.workers.data.sampling_kernels import permuted_range


class StepSlices:
    """Cuts each epoch's seeded permutation into steps and each step into one contiguous part per rank.

    Step t of an epoch holds positions [t * G, (t + 1) * G) of the epoch's permutation, where
    G = batch_size * accumulate * world_size; the last step of an epoch holds what is left. So the samples of a
    step depend on G only: two workers of 512 see together what one worker of 1,024 sees.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        world_size: int = 1,
        accumulate: int = 1,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Sets up the arithmetic; every argument but the seed is at least 1 (num_samples may be 0)."""
        self.num_samples = num_samples
        self.world_size = world_size
        self.global_batch = batch_size * accumulate * world_size
        self.steps_per_epoch = -(-num_samples // self.global_batch)
        self.num_steps = self.steps_per_epoch * epochs
        self.seed = seed
        self.shuffle = shuffle

    def epoch(self, step: int) -> int:
        """The epoch that `step` belongs to, from 0."""
        return step // self.steps_per_epoch

    def samples(self, step: int) -> int:
        """Number of samples of `step` over all ranks."""
        start, stop = self._span(step)
        return stop - start

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before `step`, over all ranks and epochs."""
        epoch, local = divmod(step, max(1, self.steps_per_epoch))
        return epoch * self.num_samples + min(local * self.global_batch, self.num_samples)

    def rank_samples(self, step: int, rank: int) -> int:
        """Number of samples of `step` that `rank` takes; 0 is possible in the last step of an epoch."""
        start, stop = self._rank_span(step, rank)
        return stop - start

    def rows(self, step: int, rank: int) -> NDArray[np.int64]:
        """The rows of the data set that `rank` takes in `step`: int64, a fresh array, maybe empty."""
        start, stop = self._rank_span(step, rank)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        rows_B = np.empty(stop - start, np.int64)
        permuted_range(start, self.num_samples, self._key(self.epoch(step)), rows_B)
        return rows_B

    def _key(self, epoch: int) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(f"epoch/{epoch}".encode(), seed=self.seed))

    def _span(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside [0, {self.num_steps})")
        start = (step % self.steps_per_epoch) * self.global_batch
        return start, min(start + self.global_batch, self.num_samples)

    def _rank_span(self, step: int, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside [0, {self.world_size})")
        start, stop = self._span(step)
        each, extra = divmod(stop - start, self.world_size)
        first = start + rank * each + min(rank, extra)
        return first, first + each + (rank < extra)
