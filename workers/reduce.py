"""The dense gradient's sum over ranks: our DDP hook, and the same sum made flat after the backward pass.

A sum, not a mean: each rank's loss is already weighted by its share of the step. In sync mode both forms add
in rank order element by element, so they give the same bits, whatever DDP's buckets are.
"""

# W = world size, P = all values of all dense parameters

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

# The same class as dist.GradBucket, which torch.distributed exports in a way that type checkers do not see.
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from shardkeep.workers.collective import Collective, add_in_rank_order, ring_bytes
from shardkeep.workers.stopwatch import Stopwatch

# The argument's name since torch 2.13; the older one warns there.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class BucketSums:
    """The state of our DDP hook: starts each bucket's exchange during the backward pass, ends them all after it.

    In sync mode an exchange is an all-gather and one addition per rank in rank order: gloo's ring adds by
    position in the buffer, so its bits change with the group; this sum does not. Otherwise it is an all-reduce.

    The sums are made by a callback of autograd, not by `Future.then`, which would run Python in gloo's threads.
    """

    def __init__(self, collective: Collective, *, sync: bool, watch: Stopwatch | None = None) -> None:
        self._collective = collective
        self._sync = sync
        self._watch = watch if watch is not None else Stopwatch()
        self._under_way: list[tuple[dist.Work, Callable[[], torch.Tensor], torch.futures.Future[torch.Tensor]]] = []

    def start(self, mine: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of one bucket; does not block."""
        if not self._under_way:
            # Runs when the gradients are complete and before DDP waits for the futures: callbacks keep their order.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._under_way.append((*self._exchange(mine), summed))
        return summed

    def _exchange(self, mine: torch.Tensor) -> tuple[dist.Work, Callable[[], torch.Tensor]]:
        world_size, group = self._collective.world_size, self._collective.process_group
        if not self._sync:
            self._collective.sent_bytes += ring_bytes(mine, world_size)
            return dist.all_reduce(mine, group=group, async_op=True), lambda: mine
        parts = list(mine.new_empty((world_size, mine.numel())).unbind())
        self._collective.sent_bytes += (world_size - 1) * mine.nbytes
        return dist.all_gather(parts, mine, group=group, async_op=True), lambda: add_in_rank_order(parts)

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        with self._watch.within("dense_reduce"):  # what of the exchange the backward pass did not cover
            for work, result, summed in under_way:
                work.wait()
                summed.set_result(result())


def sum_bucket(sums: BucketSums, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook as DDP calls it."""
    return sums.start(bucket.buffer())


def wrap_in_ddp(
    module: nn.Module, collective: Collective, *, sync: bool, find_unused: bool, watch: Stopwatch | None = None
) -> DistributedDataParallel:
    """DDP around the tower with our hook; parameters are equal already, so nothing is sent to build it."""
    ddp = DistributedDataParallel(
        module,
        process_group=collective.process_group,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **{_BUFFERS: False},  # type: ignore[arg-type]
    )
    ddp.register_comm_hook(BucketSums(collective, sync=sync, watch=watch), sum_bucket)
    return ddp


def sum_flat(parameters: Sequence[nn.Parameter], collective: Collective) -> bool:
    """Replaces each parameter's gradient by the sum over ranks, in rank order; one all-gather. Blocks.

    A parameter that no rank has a gradient for keeps None.

    Returns:
        True when every rank had a gradient for every parameter.
    """
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat_P = torch.cat([g.reshape(-1) for g in grads] + [used])
    total_P = add_in_rank_order(collective.all_gather(flat_P))
    *sums, used = torch.split(total_P, [p.numel() for p in parameters] + [len(parameters)])
    for p, part, ranks in zip(parameters, sums, used.tolist(), strict=True):
        p.grad = part.view_as(p).to(p.dtype) if ranks else None
    return bool((used == collective.world_size).all())
