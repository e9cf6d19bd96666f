"""ServerState: the generation that a server serves, the lock for the state its threads share, and futures of replies.

Knows no table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError, ShardkeepError, TransportError
from shardkeep.base.system_errors import in_words
from shardkeep.ps.wire.message import Kind, allocate, text_message

T = TypeVar("T")


class ServerState:
    """The generation of one server, and why it is closed.

    `lock` guards the gate, the parked pulls, the counts and this object's fields. No thread holds it during a pull or
    an update of tables.
    """

    def __init__(self, *, shard: int, generation: int) -> None:
        self.shard = shard
        self.generation = generation
        self.closed: str | None = None
        """Why the service refuses messages; None = it is open."""
        self.lock = threading.Lock()

    def check_generation(self, generation: int) -> None:
        """Raises ProtocolError for a message of another generation."""
        if generation != self.generation:
            raise ProtocolError(
                f"server {self.shard} is in generation {self.generation}, the message is of generation {generation}"
            )

    def check_open(self, generation: int) -> None:
        """Raises TransportError if the service is closed, or serves another generation since `check_generation`.

        Call it under the lock."""
        if self.closed is not None or generation != self.generation:
            raise TransportError(self.closed or f"server {self.shard} is in generation {self.generation} now")

    def acknowledgement(self, rank: int, step: int) -> Bytes:
        """The ACK of a push."""
        return allocate(Kind.ACK, generation=self.generation, rank=rank, step=step).buffer

    def text(self, kind: Kind, text: str, rank: int = 0) -> Bytes:
        """A message of this generation that carries text."""
        return text_message(kind, text, generation=self.generation, rank=rank)

    def error(self, error: BaseException) -> Bytes:
        """The ERROR message of an exception."""
        return self.text(Kind.ERROR, one_line(error))


def one_line(error: BaseException) -> str:
    """The text of an error, in one line. An error that is not a ShardkeepError is a bug, so its type comes first."""
    text = " ".join(in_words(error).split())
    return text if isinstance(error, ShardkeepError) else f"{type(error).__name__}: {text}"


def promised() -> Future[Bytes]:
    """A pending future that nobody can cancel, so that setting its result cannot fail."""
    future: Future[Bytes] = Future()
    future.set_running_or_notify_cancel()
    return future


def pass_on(done: Future[Bytes], to: Future[Bytes]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def done(answer: Bytes) -> Future[Bytes]:
    future: Future[Bytes] = Future()
    future.set_result(answer)
    return future


def failed(error: ShardkeepError) -> Future[Bytes]:
    future: Future[Bytes] = Future()
    future.set_exception(error)
    return future


def in_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Runs a call that takes long in a thread of its own."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = call()
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
