"""Futures of packed answers: promised, made at once, passed on."""

from __future__ import annotations

from concurrent.futures import Future

from shardkeep.base.errors import ShardkeepError
from shardkeep.ps.wire.message import Bytes


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
