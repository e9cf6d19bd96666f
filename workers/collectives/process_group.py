"""ProcessCollective: workers that are processes, joined by gloo or NCCL. Rows never travel here.

The only file that opens a group of torch.distributed; DDP is put on it by workers/dense/gradients.py.
"""

# W = world size (number of workers), R = bytes of a packet

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

# Loaded while a group is open it would hold that group for good, as a default of its functions, and with it the
# connections: peers of a rank that left would wait for the deadline.
import torch.distributed.nn.functional

# torch.distributed exports these in a way that type checkers do not see.
from torch._C._distributed_c10d import DebugLevel, PrefixStore, Store, get_debug_level, set_debug_level
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from shardkeep.base.deadlines import among_all_s
from shardkeep.base.errors import DeadlineExceeded, JobError, MemberLost
from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.interfaces import own_address
from shardkeep.base.net.sockets import connections
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.rpc.listen_filter import listening_ports, refuse_newcomers
from shardkeep.workers.collectives.collective import Purpose
from shardkeep.workers.collectives.wire_bytes import goes_direct

_log = EventLog("collectives")
NCCL, GLOO = "nccl", "gloo"
MESH_S = 10.0
"""Seconds in which a few ranks that have met in the store connect to each other. Nothing tells gloo that one died."""


class ProcessCollective:
    """Ranks are processes, joined by torch.distributed; one such group in a process at a time.

    Args:
        store: a c10d store all ranks reach; used while the group forms.
        generation: number of this formation; keys in the store are prefixed with it.
        timeout_s: deadline of every call, and of the meeting in the store while the group forms.
        backend: "nccl" if this rank has a GPU of its own, else "gloo". NCCL carries CUDA tensors if every rank has one.
        host: address of this process's interface; listeners are bound to that interface only.

    Raises:
        JobError: no interface has the address, or a group is open in this process already.
        DeadlineExceeded, MemberLost: the group could not form.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        generation: int,
        timeout_s: float = 30.0,
        backend: str = "gloo",
        host: str = "127.0.0.1",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.process_group: dist.ProcessGroup | None = None
        self._before_close: list[Callable[[], None]] = []
        self._works, self._num_works = dict[int, dist.Work](), 0
        if dist.is_initialized():
            raise JobError("this process is in a group of workers already; close it before forming another")
        _lower_debug_level()
        # torch names a group's keys by how many groups the process has begun, and forgets those that it closed, not one
        # that could not form: the next would wait for keys that the other ranks never set.
        _world.group_count = 0
        others, ports = connections(), listening_ports()
        with self.guard("forming the group"), _bound_to(own_address(host)[1]):
            own, meet_s = PrefixStore(f"ddp/{generation}", store), among_all_s(timeout_s, world_size)
            self.backend = agreed_backend(own, rank=rank, world_size=world_size, usable=backend, timeout_s=meet_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.backend == NCCL else GLOO,
                store=own,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=among_all_s(min(timeout_s, MESH_S), world_size)),
            )
            _set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
        for port in listening_ports() - ports:  # gloo's: all ranks are connected, to each other
            refuse_newcomers(port)
        self.process_group = dist.group.WORLD
        self.connections = connections().keys() - others.keys()
        """Those to the other ranks; some to the store may be among them."""

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        with self.guard("forming the mesh"):
            group = dist.new_group(list(range(self.world_size)), backend="fake")
            return DeviceMesh.from_group(group, device.type)

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose | None = None) -> Callable[[], torch.Tensor]:
        packets = exchange.packets.contiguous()
        packets_WR = packets.new_empty((self.world_size, packets.shape[-1]))
        if packets.ndim == 2:
            work = dist.all_to_all_single(packets_WR, packets, group=self.process_group, async_op=True)
        else:
            work = _begin_gather(packets, packets_WR, self.process_group)
        return self._waiting(work, packets_WR)

    def begin_all_reduce_sum(
        self, tensor: torch.Tensor, *, purpose: Purpose | None = None
    ) -> Callable[[], torch.Tensor]:
        return self._waiting(dist.all_reduce(tensor, group=self.process_group, async_op=True), tensor)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose | None = None) -> None:
        with self.guard("broadcast"):
            dist.broadcast(tensor, src=source)

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose | None = None) -> None:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        with self.guard("barrier"):
            assert self.process_group is not None
            self.process_group.barrier(options).wait()

    def _waiting(self, work: dist.Work, result: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that waits for `work` and returns the tensor that it fills.

        A work holds the group's connections, and a peer waits until they are closed: only `_works` has it, which ends
        with the group, even if a caller still has the function or the traceback of its error."""
        number = self._num_works = self._num_works + 1
        self._works[number] = work

        def wait() -> torch.Tensor:
            self._works[number].wait()
            del self._works[number]
            return result

        return wait

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._guarded(what, time.monotonic())

    @contextlib.contextmanager
    def _guarded(self, what: str, started: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_of_the_group(error):
                raise
            elapsed_s = time.monotonic() - started
            text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". This ")[0].splitlines()[0]
            kind = DeadlineExceeded if "imed out" in text or "imeout" in text else MemberLost
            raise kind(
                f"worker {self.rank} of {self.world_size}: {what} in generation {self.generation} failed "
                f"after {elapsed_s:.1f} s: {text}"
            ) from error

    def before_close(self, callback: Callable[[], None]) -> None:
        self._before_close.append(callback)

    def close(self) -> None:
        # DDP must go first. Were it the group's last owner, its destructor would join gloo's threads while it
        # holds the interpreter's lock, and one of them may wait for that lock to free a tensor: a hang.
        for callback in self._before_close:
            callback()
        self._before_close.clear()
        self._works.clear()
        if self.process_group is not None:
            self.process_group = None
            dist.destroy_process_group()


def agreed_backend(store: Store, *, rank: int, world_size: int, usable: str, timeout_s: float) -> str:
    """Returns "nccl" if it is usable for every rank, else "gloo". Blocks until every rank has called it.

    Ranks with different backends would wait for each other until their deadline.

    Args:
        store: A store of this group alone.
        rank: This rank.
        world_size: Number of ranks.
        usable: The best backend that this rank can use: "nccl" needs a GPU that no other rank has.
        timeout_s: Deadline, seconds. torch raises DistStoreError when it is over.
    """
    keys = [f"backend/{each}" for each in range(world_size)]
    store.set(keys[rank], usable)
    store.wait(keys, timedelta(seconds=timeout_s))
    return NCCL if all(store.get(key) == NCCL.encode() for key in keys) else GLOO


def _lower_debug_level() -> None:
    """Lowers TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps gloo in checks that end the process by SIGSEGV."""
    if get_debug_level() == DebugLevel.DETAIL:
        _log.warning("TORCH_DISTRIBUTED_DEBUG=DETAIL is taken as INFO: with DETAIL, torch ends workers by SIGSEGV")
        set_debug_level(DebugLevel.INFO)


def _begin_gather(packet: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Starts to fill `out` (W, ...) with the ranks' tensors, contiguous and not empty."""
    if packet.is_cpu and goes_direct(packet.nbytes):
        to_each = packet.view(1, -1).view(torch.uint8).repeat(out.shape[0], 1)
        into = out.view(out.shape[0], -1).view(torch.uint8)
        work: dist.Work = dist.all_to_all_single(into, to_each, group=group, async_op=True)
    else:
        work = dist.all_gather(list(out.unbind()), packet, group=group, async_op=True)
    return work


def _is_of_the_group(error: RuntimeError) -> bool:
    signs = ("gloo", "Connection", "onnection closed", "pair closure", "imed out", "NCCL", "socket")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


@contextlib.contextmanager
def _bound_to(interface: str) -> Iterator[None]:
    """gloo and NCCL take the interface to bind from the environment only, when a group is made."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
