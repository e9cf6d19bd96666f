"""ProcessCollective: workers that are processes, joined by gloo or NCCL. Rows never travel here.

The only file that opens a group of torch.distributed; DDP is put on it by workers/dense/gradients.py.
"""

# W = world size (number of workers), N = values of one rank

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Loaded while a group is open it would hold that group for good, as a default of its functions, and with it the
# connections: peers of a rank that left would wait for the deadline.
import torch.distributed.nn.functional
from numpy.typing import NDArray

# torch.distributed exports these two in a way that type checkers do not see.
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from shardkeep.base.errors import DeadlineExceeded, JobError, MemberLost
from shardkeep.base.machine.sockets import connections
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.rpc.group import interface_of
from shardkeep.ps.rpc.listen_filter import listening_ports, refuse_newcomers
from shardkeep.workers.collectives.backend import GLOO, NCCL, agreed_backend
from shardkeep.workers.collectives.collective import Purpose
from shardkeep.workers.collectives.wire_bytes import goes_direct

Array = NDArray[Any]

MESH_S = 10.0
"""Seconds in which ranks that have met in the store connect to each other. Nothing tells gloo that one of them died."""


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
        self._gathers: dict[int, dist.Work] = {}
        self._num_gathers = 0
        if dist.is_initialized():
            raise JobError("this process is in a group of workers already; close it before forming another")
        # torch names a group's keys by how many groups the process has begun, and forgets those that it closed, not one
        # that could not form: the next would wait for keys that the other ranks never set.
        _world.group_count = 0
        others, ports = connections(), listening_ports()
        with self.guard("forming the group"), _bound_to(interface_of(host)):
            own = PrefixStore(f"ddp/{generation}", store)
            self.backend = agreed_backend(own, rank=rank, world_size=world_size, usable=backend, timeout_s=timeout_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.backend == NCCL else GLOO,
                store=own,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=min(timeout_s, MESH_S)),
            )
            _set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
        for port in listening_ports() - ports:  # gloo's: all ranks are connected, to each other
            refuse_newcomers(port)
        self.process_group = dist.group.WORLD
        self.connections = connections().keys() - others.keys()
        """Those to the other ranks; some to the store may be among them."""

    def all_gather(self, tensor: torch.Tensor, *, purpose: Purpose | None = None) -> torch.Tensor:
        return self.begin_all_gather(tensor)()

    def begin_all_gather(self, tensor: torch.Tensor, *, purpose: Purpose | None = None) -> Callable[[], torch.Tensor]:
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if not tensor.numel():  # gloo hangs on empty tensors
            return lambda: out
        started, self._num_gathers = time.monotonic(), self._num_gathers + 1
        number = self._num_gathers
        # A work holds the group's connections, and a peer waits until they are closed: only `_gathers` has it, which
        # ends with the group, even if a caller still has `wait` or the traceback of its error.
        with self.guard("all_gather"):
            self._gathers[number] = _begin_gather(tensor.detach().contiguous(), out, self.process_group)

        def wait() -> torch.Tensor:
            with self._guarded("all_gather", started):
                self._gathers[number].wait()
            del self._gathers[number]
            return out

        return wait

    def exchange(self, exchange: Exchange, *, purpose: Purpose | None = None) -> torch.Tensor:
        with self.guard("exchange"):
            return self.begin_exchange(exchange)()

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose | None = None) -> Callable[[], torch.Tensor]:
        mine = exchange.packets.contiguous()
        packets_WR = mine.new_empty((self.world_size, mine.shape[-1]))
        if mine.ndim == 2:
            work = dist.all_to_all_single(packets_WR, mine, group=self.process_group, async_op=True)
        else:
            work = _begin_gather(mine, packets_WR, self.process_group)
        return _waiting(work, packets_WR)

    def all_reduce_sum(self, tensor: torch.Tensor, *, purpose: Purpose | None = None) -> None:
        with self.guard("all_reduce"):
            dist.all_reduce(tensor)

    def begin_all_reduce_sum(
        self, tensor: torch.Tensor, *, purpose: Purpose | None = None
    ) -> Callable[[], torch.Tensor]:
        return _waiting(dist.all_reduce(tensor, group=self.process_group, async_op=True), tensor)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose | None = None) -> None:
        with self.guard("broadcast"):
            dist.broadcast(tensor, src=source)

    def broadcast_object(self, value: Any, *, source: int = 0, purpose: Purpose | None = None) -> Any:
        text = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(text)])
        self.broadcast(size, source=source)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast(buffer, source=source)
        return json.loads(buffer.numpy().tobytes())

    def gather_arrays(self, values_N: Array, *, purpose: Purpose | None = None) -> list[Array]:
        counts_W = self.all_gather(torch.tensor([len(values_N)])).view(-1).tolist()
        padded = np.zeros(max(counts_W), values_N.dtype)
        padded[: len(values_N)] = values_N
        parts = self.all_gather(torch.from_numpy(padded.view(np.uint8))).numpy()
        return [part.view(values_N.dtype)[:n].copy() for part, n in zip(parts, counts_W, strict=True)]

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose | None = None) -> None:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        with self.guard("barrier"):
            assert self.process_group is not None
            self.process_group.barrier(options).wait()

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
        self._gathers.clear()
        if self.process_group is not None:
            self.process_group = None
            dist.destroy_process_group()


def _waiting(work: dist.Work, result: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that waits for `work` and returns the tensor that it fills."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def _begin_gather(mine: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Starts to fill `out` (W, ...) with the ranks' tensors, contiguous and not empty."""
    if mine.is_cpu and goes_direct(mine.nbytes):
        to_each = mine.view(1, -1).view(torch.uint8).repeat(out.shape[0], 1)
        into = out.view(out.shape[0], -1).view(torch.uint8)
        work: dist.Work = dist.all_to_all_single(into, to_each, group=group, async_op=True)
    else:
        work = dist.all_gather(list(out.unbind()), mine, group=group, async_op=True)
    return work


def _is_of_the_group(error: RuntimeError) -> bool:
    signs = ("gloo", "Connection", "onnection closed", "imed out", "NCCL", "socket")
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
