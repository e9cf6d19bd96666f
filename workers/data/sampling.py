"""Which samples belong to which step and rank: pure arithmetic on (step, rank), no state, no data.

B = samples of one rank in one step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.sampling_kernels import permuted_range


class Blocks(NamedTuple):
    """Sizes of a shuffle of blocks, in rows. `window` is a multiple of `block`."""

    block: int = 1 << 12
    """Consecutive rows of the data set."""
    window: int = 1 << 18
    """Rows that are mixed: a batch reads from one window or two."""


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
        shuffle: bool | Blocks = True,
        origin: StepOrigin = StepOrigin(),
    ) -> None:
        """Sets up the arithmetic; counts are at least 1 (num_samples may be 0). `shuffle`: Blocks = rows are mixed
        within windows of blocks."""
        self.num_samples = num_samples
        self.world_size = world_size
        self.global_batch = batch_size * accumulate * world_size
        self.steps_per_epoch = -(-num_samples // self.global_batch)
        self.seed = seed
        self.shuffle = bool(shuffle)
        self._blocks = shuffle if isinstance(shuffle, Blocks) else None
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
        epoch = self.epoch(step)
        if self._blocks is None:
            return _permuted(start, stop, self.num_samples, self._key(epoch))
        parts = list[Ints]()
        while start < stop:
            parts.append(self._mixed(*self._blocks, start, stop, epoch))
            start += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def ahead(self, step: int, *, begins: bool) -> list[tuple[int, int]]:
        """The rows [start, stop) that a shuffle of blocks reads in the window after `step`, as far as the steps before
        it have not named them. `begins`: none of them has, so these are the rows from here on."""
        if not self.shuffle or self._blocks is None or not self.num_samples:
            return []
        block, window = self._blocks
        first, stop = (at + window for at in self._span(step))
        first -= 2 * window if begins else 0
        found, epoch, count = list[tuple[int, int]](), self.epoch(step), -(-self.num_samples // block)
        for place in range(max(0, -(-first // block)), -(-stop // block)):
            later, place = divmod(place, count)
            start = int(self._starts(epoch + later, place, place + 1)[0])
            end = start + min(block, self.num_samples - place * block)
            found += [(start, min(end, self.num_samples))] + [(0, end - self.num_samples)] * (end > self.num_samples)
        return found

    def _mixed(self, block: int, window: int, start: int, stop: int, epoch: int) -> Ints:
        """Positions [start, stop) of the shuffle of blocks, up to the end of the window in which `start` lies."""
        count = -(-self.num_samples // block)
        windows = -(-count * block // window)
        own = ((start // block + 1) * windows - 1) // count
        first, end = (at * count // windows for at in (own, own + 1))
        starts = self._starts(epoch, first, end)
        first, end = first * block, min(end * block, self.num_samples)
        places_B = _permuted(start - first, min(stop, end) - first, end - first, self._key(epoch, f"/{first}"))
        return (starts[places_B // block] + places_B % block) % self.num_samples

    def _starts(self, epoch: int, first: int, stop: int) -> Ints:
        """The first rows of blocks [first, stop) in the order of an epoch.

        Blocks are counted from a row that is drawn for each epoch; the first row follows the last one. So the short
        block, which comes last, has other rows in each epoch.
        """
        assert self._blocks is not None
        block, key = self._blocks.block, self._key(epoch)
        whole = self.num_samples // block
        order = np.append(_permuted(first, min(stop, whole), whole, key), np.arange(max(first, whole), stop))
        return (order * block + int(key % np.uint64(self.num_samples))) % self.num_samples

    def _key(self, epoch: int, of: str = "") -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(f"epoch/{epoch}{of}".encode(), seed=self.seed))

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


def _permuted(start: int, stop: int, num_samples: int, key: np.uint64) -> Ints:
    """Positions [start, stop) of the permutation of [0, num_samples) that `key` names."""
    rows_B = np.empty(stop - start, np.int64)
    permuted_range(start, num_samples, key, rows_B)
    return rows_B
