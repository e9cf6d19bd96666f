"""The dense gradient's sum over ranks: our DDP hook, and the same sum made flat after the backward pass.

A sum, not a mean: each rank's loss is already weighted by its share of the step. Both forms add in rank order element
by element (except large buckets of fp32 outside sync mode), so they give the same bits for any buckets of DDP.
"""

# W = world size, P = parameters

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

# The same class as dist.GradBucket, which torch.distributed exports in a way that type checkers do not see.
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from shardkeep.base.errors import JobError
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks, Sum
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_gather, exchange_packets
from shardkeep.workers.collectives.wire_bytes import goes_direct
from shardkeep.workers.timing.clock import Stopwatch

# The argument's name since torch 2.13; the older one warns there.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass
class _UnderWay:
    """A bucket whose sum is being made."""

    buffer: torch.Tensor
    sum: Sum | None
    """None = an all-reduce of the buffer itself."""
    wait: Callable[[], torch.Tensor]
    """Returns the packets of the exchange under way, or the summed buffer."""
    future: torch.futures.Future[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.future = torch.futures.Future(devices=[self.buffer.device] if self.buffer.is_cuda else None)


class BucketSums:
    """The state of our DDP hook: starts each bucket's exchange during the backward pass, ends them all with the last.

    gloo's ring adds by position in the buffer, so its bits change with the group: only for fp32 outside sync mode, and
    for what is too large to go straight to each rank.

    The sums are made where the last bucket starts: by `Future.then` they would run Python in gloo's threads, and a
    callback at the end of the backward pass would come too late for a static graph's first step, which waits there.

    Args:
        names: of the parameters; they are `compression`'s.
        ring: all-reduce large buckets, fp32, instead of adding in rank order.
    """

    def __init__(
        self,
        collective: Collective,
        compression: DenseCompression,
        names: Mapping[torch.Tensor, str],
        *,
        ring: bool = False,
        watch: Stopwatch | None = None,
    ) -> None:
        self.process_group = collective.process_group
        self._collective = collective
        self._compression = compression
        self._names = names
        self._ring = ring
        self._watch = watch if watch is not None else Stopwatch()
        self._under_way: list[_UnderWay] = []

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of one bucket, of the last one waits until all are summed."""
        buffer = bucket.buffer()
        if self._ring and not self._is_small(buffer):
            wait = self._collective.begin_all_reduce_sum(buffer, purpose="gradients")
            under_way = _UnderWay(buffer, None, wait)
        else:
            names = [self._names[p] for p in bucket.parameters()]
            total = self._compression.sum(names, bucket.gradients(), _ranks(self._collective))
            wait = self._collective.begin_exchange(next(total), purpose="gradients")
            under_way = _UnderWay(buffer, total, wait)
        self._under_way.append(under_way)
        if bucket.is_last():
            self._finish()
        return under_way.future

    def _is_small(self, buffer: torch.Tensor) -> bool:
        """Whether all that a rank sends when each sends its own to each is little."""
        peers = self._collective.world_size - 1
        return buffer.is_cpu and buffer.dtype is torch.float32 and goes_direct(buffer.nbytes * peers)

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        with self._watch.within("dense_reduce"):  # the part of the exchange that the backward pass did not hide
            while under_way:
                under_way = [bucket for bucket in under_way if self._goes_on(bucket)]

    def _goes_on(self, bucket: _UnderWay) -> bool:
        """Waits for a bucket's packets and starts its next exchange, if it has one."""
        received = bucket.wait()
        if bucket.sum is None:
            bucket.future.set_result(received)
            return False
        try:
            exchange = bucket.sum.send(received)
        except StopIteration as done:
            bucket.future.set_result(done.value.to(bucket.buffer.dtype))
            return False
        bucket.wait = self._collective.begin_exchange(exchange, purpose="gradients")
        return True


def sum_bucket(sums: BucketSums, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook as DDP calls it."""
    if not isinstance(bucket, GradBucket):
        raise JobError(
            "torch._dynamo.config.optimize_ddp: 'python_reducer' gives our hook no bucket, so gradients would not be "
            "summed; allowed: False"
        )
    return sums.start(bucket)


def wrap_in_ddp(module: nn.Module, sums: BucketSums, *, find_unused: bool) -> DistributedDataParallel:
    """DDP around the tower with our hook; parameters are equal already, so nothing is sent to build it."""
    ddp = DistributedDataParallel(
        module,
        process_group=sums.process_group,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **{_BUFFERS: False},  # type: ignore[arg-type]
    )
    ddp.register_comm_hook(sums, sum_bucket)
    return ddp


def sum_flat(parameters: Mapping[str, nn.Parameter], collective: Collective, compression: DenseCompression) -> bool:
    """Replaces each parameter's gradient by the sum over ranks, in rank order. Blocks.

    A parameter that no rank has a gradient for keeps None.

    Returns:
        True when every rank had a gradient for every parameter.
    """
    used_P = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.uint8)
    used_WP = all_gather(collective, used_P, purpose="gradients")
    used = {
        name: p for (name, p), anywhere in zip(parameters.items(), used_WP.any(0).tolist(), strict=True) if anywhere
    }
    if used:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in used.values()]
        total = _driven(compression.sum(list(used), grads, _ranks(collective)), collective)
        for p, part in zip(used.values(), torch.split(total, [p.numel() for p in used.values()]), strict=True):
            p.grad = part.view_as(p).to(p.dtype)
    return bool(used_WP.all())


def _driven(total: Sum, collective: Collective) -> torch.Tensor:
    exchange = next(total)
    while True:
        try:
            exchange = total.send(exchange_packets(collective, exchange, purpose="gradients"))
        except StopIteration as done:
            result: torch.Tensor = done.value
            return result


def _ranks(collective: Collective) -> Ranks:
    return Ranks(collective.rank, collective.world_size)
