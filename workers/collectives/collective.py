"""What workers say to each other: sums, broadcasts, gathers over all ranks of one generation.

Three forms of one Protocol: Solo (one worker), ThreadCollective (workers as threads of one process) and
ProcessCollective (between processes, in process_group.py). Rows never travel here, only the tower and metrics.
"""

# W = world size (number of workers), R = bytes of a packet

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardkeep.base.errors import DeadlineExceeded, MemberLost
from shardkeep.compression.tower.exchange import Exchange

Purpose = Literal["parameters", "gradients", "buffers", "agreements", "metrics"]
"""What a call is for, as a MeteredCollective books it. Collectives themselves ignore it."""


class Collective(Protocol):
    """The ranks of one generation; every rank makes the same calls in the same order.

    Every call but `close` and `begin_...` blocks until all ranks take part, up to the deadline. Raises
    DeadlineExceeded when it runs out and MemberLost when a peer went away. A `begin_...` starts a call without waiting
    for the others; it returns a function that waits, is called once, and returns the result. Neither of the two maps
    errors: see `guard`. All other calls are functions over these, in operations.py. What has a body here
    stays as it is without a process group.
    """

    rank: int
    world_size: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group DDP reduces over; None where there is none (one worker, threads)."""
        return None

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """The ranks as FSDP wants them; None where there is no process group. It has no connections and outlives this
        generation: what is sharded over it says through this object, or a later one, what it says. Blocks."""
        return None

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        """Starts one round of packets, none of them empty; the wait returns uint8 (W, R), in rank order."""
        ...

    def begin_all_reduce_sum(self, tensor: torch.Tensor, *, purpose: Purpose) -> Callable[[], torch.Tensor]:
        """Starts to replace `tensor` by the sum over ranks; the wait returns `tensor`."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose) -> None:
        """Replaces `tensor` by that of rank `source`."""
        ...

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose) -> None:
        """Waits for all ranks; `timeout_s` replaces the deadline for this one call."""
        ...

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Maps a failure of the group inside the block (DDP's backward) to our errors."""
        return contextlib.nullcontext()

    def before_close(self, callback: Callable[[], None]) -> None:
        """Has `callback` let go of `process_group` when this collective is closed."""
        return

    def close(self) -> None:
        """Leaves the group; another generation may be formed afterwards. Does not wait."""
        return


class Solo(Collective):
    """One worker: everything is the identity."""

    rank = 0
    world_size = 1

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose | None = None) -> Callable[[], torch.Tensor]:
        packets_1R = exchange.packets.view(1, -1).clone()
        return lambda: packets_1R

    def begin_all_reduce_sum(
        self, tensor: torch.Tensor, *, purpose: Purpose | None = None
    ) -> Callable[[], torch.Tensor]:
        return lambda: tensor

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose | None = None) -> None:
        pass

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose | None = None) -> None:
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


class ThreadCollective(Collective):
    """The in-process twin: ranks are threads of one process; used by tests and small trials."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
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

    def begin_exchange(self, exchange: Exchange, *, purpose: Purpose | None = None) -> Callable[[], torch.Tensor]:
        number, one_to_each = self._put(exchange.packets.clone()), exchange.packets.ndim == 2

        def wait() -> torch.Tensor:
            packets = self._meeting.take(number, None)
            return torch.stack([p[self.rank] for p in packets] if one_to_each else packets)

        return wait

    def begin_all_reduce_sum(
        self, tensor: torch.Tensor, *, purpose: Purpose | None = None
    ) -> Callable[[], torch.Tensor]:
        number = self._put(tensor.detach().clone())
        return lambda: tensor.copy_(add_in_rank_order(self._meeting.take(number, None)))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, purpose: Purpose | None = None) -> None:
        tensor.copy_(self._swap(tensor.detach().clone() if self.rank == source else None)[source])

    def barrier(self, *, timeout_s: float | None = None, purpose: Purpose | None = None) -> None:
        self._swap(None, timeout_s)

    def close(self) -> None:
        """Wakes the others: a group that lost a member cannot continue."""
        self._meeting.abort(f"worker {self.rank} left")


def add_in_rank_order(parts: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """parts[0] + parts[1] + ... in this order: the same bits on every rank and transport."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
