"""The two functions that torch RPC runs on a server, and the buffers that a peer may still read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from torch.distributed import rpc

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError
from shardkeep.base.system_errors import in_words
from shardkeep.ps.rpc.listen_filter import ListenFilter
from shardkeep.ps.transport.transport import Handler

# torch has one RPC agent per process. These tables belong to the process too; their keys are names of group members.
handlers: dict[str, Handler] = {}
listen_filters: dict[str, ListenFilter] = {}


class BuffersInFlight:
    """References to arrays that a peer may still read out of this process's memory.

    torch releases its references when the process leaves a group, even while a peer reads. So this object holds the
    arrays of the last group until the process leaves the next one. By then no peer reads them."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Bytes]] = {}
        self._retained: list[Bytes] = []
        self._leaving = False

    def add(self, array: Bytes) -> None:
        """Tracks an array that torch sends, until torch releases it."""
        key = id(array)
        self._arrays[key] = weakref.ref(array, lambda _: self._arrays.pop(key, None))
        if self._leaving:  # tested after the line above, so that `retained` misses no array
            self._retained.append(array)

    @contextlib.contextmanager
    def retained(self) -> Iterator[None]:
        """Retains, while a group is left, the arrays that torch still holds and those that another thread adds."""
        self._retained, self._leaving = [], True
        self._retained += [array for reference in list(self._arrays.values()) if (array := reference()) is not None]
        try:
            yield
        finally:
            self._leaving = False


in_flight = BuffersInFlight()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def handle(*messages: Bytes) -> torch.futures.Future[Bytes]:
    """Runs on the server: passes the messages to this member's handler. The reply completes the call later."""
    handler = handlers.get(name := rpc.get_worker_info().name)
    if handler is None:
        raise ProtocolError(f"{name} serves nothing")
    reply: torch.futures.Future[Bytes] = torch.futures.Future()

    def finish(done: Future[Bytes]) -> None:
        error = done.exception()
        if error is not None:
            reply.set_exception(RuntimeError(in_words(error)))  # type: ignore[arg-type]
        else:
            reply.set_result(done.result())

    handler(*messages).add_done_callback(finish)
    return reply


def arrive(rank: int, probe: torch.Tensor) -> torch.Tensor:
    """Runs on the server: records that worker `rank` has opened every connection that a call needs."""
    if (listen_filter := listen_filters.get(rpc.get_worker_info().name)) is not None:
        listen_filter.arrived(rank)
    return probe
