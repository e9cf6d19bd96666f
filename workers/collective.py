"""What workers say to each other: sums, broadcasts, gathers over all ranks of one generation.

Three forms of one Protocol: Solo (one worker), ThreadCollective (workers as threads of one process) and
ProcessCollective (between processes, in process_collective.py). Rows never travel here, only the tower and metrics.
"""

# W = world size (number of workers), N = values of one rank

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray

# torch.distributed exports these two in a way that type checkers do not see.
from shardkeep.base.errors import DeadlineExceeded, MemberLost
from shardkeep.compression.exchange import Exchange
from shardkeep.workers.sent import Sent

Array = NDArray[Any]
T = TypeVar("T")


class Collective(Protocol):
    """The ranks of one generation; every rank makes the same calls in the same order.

    Every call but `close` and `begin_all_gather` blocks until all ranks take part, up to the deadline. Raises
    DeadlineExceeded when it runs out and MemberLost when a peer went away.
    """

    rank: int
    world_size: int
    sent: Sent
    """What this rank has sent so far."""
    process_group: dist.ProcessGroup | None
    """The group DDP reduces over; None where there is none (one worker, threads)."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (same shape and dtype) stacked in rank order: (W, ...)."""
        ...

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts an `all_gather` without waiting for the others; what it returns waits, and is called once."""
        ...

    def exchange(self, exchange: Exchange) -> torch.Tensor:
        """One round of packets: uint8 (W, R), in rank order."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Replaces `tensor` by that of rank `source`."""
        ...

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        """The value of rank `source` on every rank; anything JSON can hold."""
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
    process_group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.sent = Sent(1)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0).clone()

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        gathered = self.all_gather(tensor)
        return lambda: gathered

    def exchange(self, exchange: Exchange) -> torch.Tensor:
        return exchange.packets.view(1, -1).clone()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        pass

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
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

    def put(self, rank: int, number: int, value: Any) -> None:
        """Puts down `value` for round `number`."""
        with self._changed:
            self._rounds.setdefault(number, {})[rank] = value
            self._changed.notify_all()

    def take(self, number: int, timeout_s: float | None) -> list[Any]:
        """Waits for the others' values of round `number`; all in rank order. Each rank calls it once, after `put`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            here = self._rounds[number]
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
        self.sent = Sent(meeting.world_size)
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
        return self._meeting.take(self._put(value), timeout_s)

    def _put(self, value: Any) -> int:
        """The number of the round that the value is put down for."""
        self._round += 1
        self._meeting.put(self.rank, self._round, value)
        return self._round

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.begin_all_gather(tensor)()

    def begin_all_gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.sent.all_gather(tensor.nbytes)
        number = self._put(tensor.detach().clone())
        return lambda: torch.stack(self._meeting.take(number, None))

    def exchange(self, exchange: Exchange) -> torch.Tensor:
        self.sent.exchange(exchange)
        packets = self._swap(exchange.packets.clone())
        return torch.stack([p[self.rank] for p in packets] if exchange.packets.ndim == 2 else packets)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self.sent.all_reduce(tensor.nbytes, tensor.element_size())
        parts = self._swap(tensor.detach().clone())
        tensor.copy_(add_in_rank_order(parts))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        self.sent.broadcast(tensor.nbytes, source=self.rank == source)
        tensor.copy_(self._swap(tensor.detach().clone() if self.rank == source else None)[source])

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return json.loads(self._swap(json.dumps(value) if self.rank == source else None)[source])

    def gather_arrays(self, values_N: Array) -> list[Array]:
        self.sent.all_gather(values_N.nbytes)
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


def add_in_rank_order(parts: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """parts[0] + parts[1] + ... in this order: the same bits on every rank, whatever the transport."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
