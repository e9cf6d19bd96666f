"""What workers say to each other: sums, broadcasts, gathers over all ranks of one generation.

Three forms of one Protocol: Solo (one worker), ThreadCollective (workers as threads of one process) and
ProcessCollective (gloo or NCCL between processes). Rows never travel here, only the tower and metrics.
"""

# W = world size (number of workers), N = values of one rank

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# torch.distributed exports these two in a way that type checkers do not see.
from torch._C._distributed_c10d import PrefixStore, Store

from shardkeep.base.errors import DeadlineExceeded, JobError, MemberLost

Array = NDArray[Any]
T = TypeVar("T")


class Collective(Protocol):
    """The ranks of one generation; every rank makes the same calls in the same order.

    Every call but `close` blocks until all ranks take part, up to the deadline. Raises DeadlineExceeded when
    it runs out and MemberLost when a peer went away.
    """

    rank: int
    world_size: int
    sent_bytes: int
    """Payload this rank has sent so far, by the algorithm's formula (ring all-reduce, ring all-gather)."""
    process_group: dist.ProcessGroup | None
    """The group DDP reduces over; None where there is none (one worker, threads)."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (same shape and dtype) stacked in rank order: (W, ...)."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by rank 0's."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank; anything JSON can hold."""
        ...

    def gather_arrays(self, values_N: Array) -> list[Array]:
        """Every rank's array in rank order; one dimension, one dtype, lengths may differ."""
        ...

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Waits for all ranks; `timeout_s` replaces the deadline for this one call."""
        ...

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Maps a failure of the group inside the block (DDP's backward) to our errors."""
        ...

    def before_close(self, callback: Callable[[], None]) -> None:
        """Has `callback` let go of `process_group` when this collective is closed."""
        ...

    def close(self) -> None:
        """Leaves the group; another generation may be formed afterwards. Does not wait."""
        ...


class Solo:
    """One worker: everything is the identity."""

    rank = 0
    world_size = 1
    sent_bytes = 0
    process_group: dist.ProcessGroup | None = None

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0).clone()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast_object(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def gather_arrays(self, values_N: Array) -> list[Array]:
        return [values_N.copy()]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        pass

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_close(self, callback: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


class _Meeting:
    """Where the threads of a ThreadCollective swap values: one round after the other."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._taken: dict[int, int] = {}
        self._aborted: str | None = None

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()

    def swap(self, rank: int, number: int, value: Any, timeout_s: float | None) -> list[Any]:
        """Puts down `value` for round `number`, waits for the others', returns all in rank order."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            here = self._rounds.setdefault(number, {})
            here[rank] = value
            self._changed.notify_all()
            complete = self._changed.wait_for(lambda: self._aborted or len(here) == self.world_size, limit_s)
            if len(here) < self.world_size:
                self._refuse(complete, here, limit_s)
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.world_size:
                del self._rounds[number], self._taken[number]
            return [here[r] for r in range(self.world_size)]

    def _refuse(self, woken: Any, here: dict[int, Any], limit_s: float) -> None:
        if woken:
            raise MemberLost(f"the workers' group was aborted: {self._aborted}")
        missing = ", ".join(str(r) for r in range(self.world_size) if r not in here)
        raise DeadlineExceeded(f"worker {missing} did not join the others within {limit_s:g} s")


class ThreadCollective:
    """The in-process twin: ranks are threads of one process; used by tests and small trials."""

    process_group: dist.ProcessGroup | None = None

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.sent_bytes = 0
        self._meeting = meeting
        self._round = 0

    @classmethod
    def group(cls, world_size: int, *, timeout_s: float = 30.0) -> list[ThreadCollective]:
        """One member for each of `world_size` threads; no call waits longer than `timeout_s`."""
        meeting = _Meeting(world_size, timeout_s)
        return [cls(meeting, rank) for rank in range(world_size)]

    def abort(self, reason: str = "a member gave up") -> None:
        """Wakes every rank that waits, now or later, with MemberLost."""
        self._meeting.abort(reason)

    def _swap(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self._round += 1
        return self._meeting.swap(self.rank, self._round, value, timeout_s)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += (self.world_size - 1) * tensor.nbytes
        return torch.stack(self._swap(tensor.detach().clone()))

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += ring_bytes(tensor, self.world_size)
        parts = self._swap(tensor.detach().clone())
        tensor.copy_(add_in_rank_order(parts))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += tensor.nbytes if self.rank == 0 else 0
        tensor.copy_(self._swap(tensor.detach().clone() if self.rank == 0 else None)[0])

    def broadcast_object(self, value: Any) -> Any:
        return json.loads(self._swap(json.dumps(value) if self.rank == 0 else None)[0])

    def gather_arrays(self, values_N: Array) -> list[Array]:
        self.sent_bytes += (self.world_size - 1) * values_N.nbytes
        return [part.copy() for part in self._swap(values_N.copy())]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self._swap(None, timeout_s)

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_close(self, callback: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        """Wakes the others: a group that lost a member cannot go on."""
        self._meeting.abort(f"worker {self.rank} left")


class ProcessCollective:
    """Ranks are processes, joined by torch.distributed; one such group in a process at a time.

    Args:
        store: a c10d store all ranks reach; used while the group forms.
        generation: number of this formation; keys in the store are prefixed with it.
        timeout_s: deadline of every call, and of forming the group.
        backend: "gloo" (CPU tensors) or "nccl" (CUDA tensors too; CPU tensors still go over gloo).
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
        self.sent_bytes = 0
        self.process_group: dist.ProcessGroup | None = None
        self._before_close: list[Callable[[], None]] = []
        if dist.is_initialized():
            raise JobError("this process is in a group of workers already; close it before forming another")
        with self.guard("forming the group"), _bound_to(interface_of(host)):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
                store=PrefixStore(f"ddp/{generation}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        self.process_group = dist.group.WORLD

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if tensor.numel():  # gloo hangs on empty tensors
            self.sent_bytes += (self.world_size - 1) * tensor.nbytes
            with self.guard("all_gather"):
                dist.all_gather(list(out.unbind()), tensor.detach().contiguous())
        return out

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += ring_bytes(tensor, self.world_size)
        with self.guard("all_reduce"):
            dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += tensor.nbytes if self.rank == 0 else 0
        with self.guard("broadcast"):
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Any) -> Any:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)])
        self.broadcast(size)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast(buffer)
        return json.loads(buffer.numpy().tobytes())

    def gather_arrays(self, values_N: Array) -> list[Array]:
        counts_W = self.all_gather(torch.tensor([len(values_N)])).view(-1).tolist()
        padded = np.zeros(max(counts_W), values_N.dtype)
        padded[: len(values_N)] = values_N
        parts = self.all_gather(torch.from_numpy(padded.view(np.uint8))).numpy()
        return [part.view(values_N.dtype)[:n].copy() for part, n in zip(parts, counts_W, strict=True)]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        with self.guard("barrier"):
            assert self.process_group is not None
            self.process_group.barrier(options).wait()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        started = time.monotonic()
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
        if self.process_group is not None:
            self.process_group = None
            dist.destroy_process_group()


def add_in_rank_order(parts: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """parts[0] + parts[1] + ... in this order: the same bits on every rank, whatever the transport."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def ring_bytes(tensor: torch.Tensor, world_size: int) -> int:
    """What each rank sends in a ring all-reduce of `tensor`."""
    return 2 * tensor.nbytes * (world_size - 1) // world_size


def _is_of_the_group(error: RuntimeError) -> bool:
    signs = ("gloo", "Connection", "onnection closed", "imed out", "NCCL", "socket")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def interface_of(host: str) -> str:
    """Name of the network interface that has the address of `host` (127.0.0.1 -> lo)."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise JobError(f"{host}: is not a known host ({error}); use an address of this machine") from error
    found = {name: [a.address for a in known] for name, known in psutil.net_if_addrs().items()}
    for name, addresses in found.items():
        if address in addresses:
            return name
    known = sorted(a for addresses in found.values() for a in addresses if a.count(".") == 3)
    raise JobError(f"{host}: no interface of this machine has address {address}; it has {', '.join(known)}")


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


def run_ranks(collectives: list[ThreadCollective], work: Callable[[ThreadCollective], T]) -> list[T]:
    """Runs `work` in one thread per rank and returns the results in rank order.

    The first failure aborts the group, so that no other rank waits for it, and is raised here.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def one(collective: ThreadCollective) -> None:
        try:
            results[collective.rank] = work(collective)
        except BaseException as error:
            failures.append(error)
            collective.abort(f"worker {collective.rank}: {error}")

    threads = [threading.Thread(target=one, args=(c,), name=f"worker-{c.rank}") for c in collectives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[c.rank] for c in collectives]
