"""GradientSums: one tower's dense gradients summed over the ranks of a generation, by DDP or flat (gradients.py), or as
shards (shards.py)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.wire_bytes import all_reduce
from shardkeep.workers.dense.gradients import BucketSums, sum_flat, wrap_in_ddp
from shardkeep.workers.dense.state import share_buffers
from shardkeep.workers.timing.clock import Stopwatch

if TYPE_CHECKING:
    from shardkeep.workers.dense.shards import Shards


class GradientSums:
    """Sums after each step's last backward pass, or during it.

    Args:
        module: What runs forward; DDP wraps it.
        parameters: Those that are trained, by name.
        compression: Of these parameters' gradients between ranks.
        sync: Add gradients in rank order.
        shard: Splits the module's model over the first ranks that are processes; None = it stays whole.
    """

    collective: Collective
    """The ranks, after `join`."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        compression: DenseCompression,
        *,
        sync: bool,
        watch: Stopwatch,
        shard: Callable[[Collective], Shards | None] | None = None,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self.plain = compression.name == "none"
        """Whether gradients are sent as they are."""
        self._ring = compression.name == "none" and not sync
        self.compression = compression
        """Its residuals belong to this rank."""
        self._watch = watch
        self._ddp: DistributedDataParallel | None = None
        self._shard = shard
        self.shards: Shards | None = None
        self._summed = False  # by DDP, during the backward pass

    @property
    def by_ddp(self) -> bool:
        """Whether DDP sums; the first step of a generation shows it which parameters the model leaves out."""
        return self._ddp is not None

    @property
    def plain_bytes(self) -> int:
        """Bytes that this rank would send in a step if gradients were float32, in one all-reduce."""
        ranks = self.collective.world_size
        return sum(all_reduce(ranks, 4 * self.compression.num_values).values()) if ranks > 1 else 0

    def join(self, collective: Collective) -> None:
        """Takes the ranks of another generation."""
        self.leave()
        self.collective = collective
        if self.shards is None and self._shard is not None:
            self.shards = self._shard(collective)
        if self.shards is not None:
            self._parameters = self.shards.local
            self.shards.join(collective)

    def leave(self) -> None:
        """Lets go of the generation's process group; a collective that closes calls it."""
        had_ddp = self._ddp is not None
        self._ddp, self._summed = None, False
        self.compression.memory.settle(applied=False)
        for parameter in self._parameters.values():
            parameter.grad = None
        if had_ddp:
            gc.collect()  # DDP is part of a reference cycle, and holds the group

    @contextlib.contextmanager
    def around_backward(self, step: int, *, loss_scale: float, last: bool) -> Iterator[nn.Module]:
        """Around forward and backward of a micro-batch; gives the module that runs forward. With the step's `last`,
        gradients may be summed over ranks inside, which blocks."""
        accumulating = self._ddp.no_sync() if self._ddp is not None and not last else contextlib.nullcontext()
        self._summed = last and self._ddp is not None
        if last:
            self.compression.begin(step, loss_scale)
        # DDP talks to the other ranks in the forward pass, too: once, when it rebuilds its buckets.
        with self.collective.guard("the sum of the dense gradients"), accumulating:
            yield self._module if self._ddp is None else self._ddp

    def finish(self) -> None:
        """Ends the sum of a step's gradients. Blocks."""
        if self.shards is not None:
            self.shards.take_gradients()
        elif self.collective.world_size == 1:
            return
        elif not self._summed:
            everywhere = sum_flat(self._parameters, self.collective, self.compression)
            if self._ddp is None and self.collective.process_group is not None:
                # The first step goes without DDP and shows which parameters the model leaves out.
                names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
                sums = BucketSums(self.collective, self.compression, names, ring=self._ring, watch=self._watch)
                self._ddp = wrap_in_ddp(self._module, sums, find_unused=not everywhere)
                self.collective.before_close(self.leave)
        share_buffers(self._module, self.collective)
