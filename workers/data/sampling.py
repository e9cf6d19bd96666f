"""Which samples belong to which step and rank: pure arithmetic on (step, rank), no state, no data.

B = samples of one rank in one step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.workers.data.sampling_kernels import permuted_range


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """Where the steps of a resumed job begin: with another number of workers, they have another size from there on."""

    step: int = 0
    samples: int = 0
    """Samples of all steps before, over all epochs."""


class StepSlices:
    """Cuts each epoch's seeded permutation into steps and each step into one contiguous part per rank.

    Step t of an epoch holds positions [t * G, (t + 1) * G) of the epoch's permutation, where
    G = batch_size * accumulate * world_size; the last step of an epoch holds what is left. So the samples of a
    step depend on G only: two workers of 512 see together what one worker of 1,024 sees. A job that was resumed in
    the middle of an epoch cuts what is left of it from there.
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
        origin: StepOrigin = StepOrigin(),
    ) -> None:
        """Sets up the arithmetic; every argument but the seed and the origin is at least 1 (num_samples may be 0)."""
        self.num_samples = num_samples
        self.world_size = world_size
        self.global_batch = batch_size * accumulate * world_size
        self.steps_per_epoch = -(-num_samples // self.global_batch)
        self.seed = seed
        self.shuffle = shuffle
        self._origin = origin
        self._first_epoch, self._skipped = divmod(origin.samples, max(1, num_samples))
        self._first_steps = -(-(num_samples - self._skipped) // self.global_batch)
        left = max(0, epochs - self._first_epoch)
        self.num_steps = origin.step + (self._first_steps + (left - 1) * self.steps_per_epoch if left else 0)

    def epoch(self, step: int) -> int:
        """The epoch that `step` belongs to, from 0."""
        return self._place(step)[0]

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` is the last of its epoch."""
        return self._place(step)[1] + self.global_batch >= self.num_samples

    def samples(self, step: int) -> int:
        """Number of samples of `step` over all ranks."""
        start, stop = self._span(step)
        return stop - start

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before `step`, over all ranks and epochs."""
        if not self.num_samples:
            return 0
        epoch, start = self._place(step)
        return epoch * self.num_samples + start

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
        if not self._origin.step <= step < self.num_steps:
            raise IndexError(f"step {step} is outside [{self._origin.step}, {self.num_steps})")
        start = self._place(step)[1]
        return start, min(start + self.global_batch, self.num_samples)

    def _place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and where in the epoch's permutation it starts."""
        local = step - self._origin.step
        if local < self._first_steps:
            return self._first_epoch, self._skipped + local * self.global_batch
        epochs, local = divmod(local - self._first_steps, max(1, self.steps_per_epoch))
        return self._first_epoch + 1 + epochs, local * self.global_batch

    def _rank_span(self, step: int, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside [0, {self.world_size})")
        start, stop = self._span(step)
        each, extra = divmod(stop - start, self.world_size)
        first = start + rank * each + min(rank, extra)
        return first, first + each + (rank < extra)
