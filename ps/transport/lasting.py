"""LastingTransport: a transport that outlives the generation of servers it sends to. For loops that cannot train a step
again.

A message stays here until its servers cannot lose it any more. A future stays open while the servers form again; then
what is kept is sent again in the order of steps. Servers drop duplicates by rank and step. Knows no control plane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import RemoteError, ShardkeepError, TransportError
from shardkeep.ps.config import ConsistencyConfig
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.message import Kind, addressed, kind_of, read, step_of, text_of, value_of


@dataclass(slots=True)
class _Sent:
    """One call. `push`, `pull`: the step of the push and the pull in it; -1 = it has none."""

    number: int
    server: int
    message: Bytes
    then: Bytes | None
    timeout_s: float
    push: int
    pull: int
    reply: Future[Bytes] = field(default_factory=Future)
    epoch: int = 0
    """The generation's number here, of those it was sent to last."""


class LastingTransport:
    """Sends to the servers of one generation after another. `send` may be called in another thread than the rest.

    Args:
        transport: To the servers of the first generation.
        consistency: In `sync`, servers acknowledge a push before they apply it: there a push is kept until an answer
            shows that the next step has begun.
        on_loss: Called, in any thread, when a call shows that the generation is lost.
    """

    def __init__(
        self,
        transport: Transport,
        consistency: ConsistencyConfig,
        *,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_servers = transport.num_servers
        self.loss = ""
        """Why the generation is lost; "" = it is not, as far as calls have shown."""
        self._transport: Transport | None = transport
        self._consistency, self._stages = consistency, consistency.mode == "sync"
        self._on_loss = on_loss
        self._sending = threading.RLock()  # no call is sent while a transport is closed; before `_lock`
        self._lock = threading.Lock()
        self._waiting: dict[int, _Sent] = {}
        self._kept: dict[int, _Sent] = {}  # answered calls
        self._number = self._epoch = 0
        self.generation: int | None = None
        """The one that it sends to; None = the first one, with which messages are drawn."""
        self._next_step = 0
        self._error: ShardkeepError | None = None

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        """As `Transport.send`, but a reply may take as long as the servers need to form again. `timeout_s`: of each
        attempt."""
        push, pull = step_of(message, Kind.PUSH), step_of(message if then is None else then, Kind.PULL)
        with self._sending:
            with self._lock:
                if self.generation is not None:
                    message, then = _addressed(message, then, self.generation)
                self._number += 1
                sent = _Sent(self._number, server, message, then, timeout_s, push, pull, epoch=self._epoch)
                self._next_step = max(self._next_step, push + 1)
                if self._error is None:
                    self._waiting[sent.number] = sent
                transport = self._transport
            if self._error is not None:
                sent.reply.set_exception(self._error)
            elif transport is not None:
                self._follow(sent, transport.send(server, message, then, timeout_s=timeout_s))
        return sent.reply

    @property
    def num_kept(self) -> int:
        """Answered calls that would be sent again."""
        return len(self._kept)

    def resume_range(self) -> tuple[int, int]:
        """The first and the last step at which the servers could begin another generation.

        Servers begin where the slowest trainer is. They hold what this one pushed from there on, and does not keep."""
        with self._lock:
            kept = [sent.push for sent in (*self._waiting.values(), *self._kept.values()) if sent.push >= 0]
        first = min(kept, default=self._next_step)
        if self._consistency.mode == "bounded":
            first = max(0, first - self._consistency.window)
        elif not self._stages:
            first = min(first, 1)
        return first, self._next_step

    def begin(self, step: int) -> None:
        """The first step is this one, and not step 0."""
        self._next_step = step

    def suspend(self) -> None:
        """Closes the lost generation's transport. Messages wait until `renew`."""
        with self._sending:
            transport, self._transport = self._transport, None
            with self._lock:
                self._epoch += 1  # replies to earlier attempts are dropped
            if transport is not None:
                transport.close()

    def renew(self, transport: Transport, generation: int, step: int) -> None:
        """Sends what is kept to the servers of another generation, which begins at `step`. Blocks until they have the
        pushes. Raises TransportError when this generation is lost as well, and RemoteError when a server refuses a
        message whose answer nobody waits for."""
        with self._sending:
            if self._error is not None:  # it was closed meanwhile
                transport.close()
                return
            with self._lock:
                self.loss, self.generation = "", generation
                self._kept = {n: sent for n, sent in self._kept.items() if max(sent.push, sent.pull) >= step}
                again = sorted((*self._kept.values(), *self._waiting.values()), key=lambda sent: sent.number)
                for sent in again:
                    sent.epoch = self._epoch
                    sent.message, sent.then = _addressed(sent.message, sent.then, generation)
            self._push_again(again, transport, step)
            for sent in again:
                if sent.number in self._waiting and sent.push < 0:
                    self._follow(sent, transport.send(sent.server, sent.message, timeout_s=sent.timeout_s))
                elif sent.number in self._waiting:
                    self._follow(sent, self._pull(sent, transport))
            self._transport = transport

    def _push_again(self, again: list[_Sent], transport: Transport, step: int) -> None:
        """Step after step: the pulls that pushes may name, then the pushes. No wait depends on another trainer."""
        pushes = [sent for sent in again if sent.push >= 0]
        pulls = [sent for sent in again if sent.number in self._kept and sent.pull >= step]
        for at in sorted({sent.push for sent in pushes} | {sent.pull for sent in pulls}):
            for sent, reply in [(sent, self._pull(sent, transport)) for sent in pulls if sent.pull == at]:
                _check(sent, reply.result())
            due = [sent for sent in pushes if sent.push == at]
            replies = [transport.send(sent.server, sent.message, timeout_s=sent.timeout_s) for sent in due]
            answers = [reply.result() for reply in replies]
            for sent, answer in zip(due, answers, strict=True):
                if (sent.then is None or kind_of(answer) == Kind.ERROR) and not self._answered(sent, answer):
                    _check(sent, answer)

    def fail(self, error: ShardkeepError) -> None:
        """Ends every call, also later ones, with this error."""
        with self._sending, self._lock:
            self._error = self._error or error
            waiting, self._waiting, self._kept = list(self._waiting.values()), {}, {}
        for sent in waiting:
            sent.reply.set_exception(error)

    def close(self) -> None:
        """Closes the running generation's transport; calls end with TransportError."""
        self.suspend()
        self.fail(TransportError("the transport is closed"))

    def _pull(self, sent: _Sent, transport: Transport) -> Future[Bytes]:
        """Sends the pull of a call alone."""
        message = sent.message if sent.then is None else sent.then
        return transport.send(sent.server, message, timeout_s=sent.timeout_s)

    def _follow(self, sent: _Sent, reply: Future[Bytes]) -> None:
        epoch = sent.epoch
        reply.add_done_callback(lambda reply: self._replied(sent, epoch, reply))

    def _replied(self, sent: _Sent, epoch: int, reply: Future[Bytes]) -> None:
        error = reply.exception()
        if error is None:
            self._answered(sent, reply.result(), epoch)
        elif isinstance(error, TransportError):
            with self._lock:
                lost = epoch == self._epoch and sent.number in self._waiting
                self.loss = (self.loss or str(error)) if lost else self.loss
            if lost:
                self._on_loss()
        elif self._take(sent, epoch):
            sent.reply.set_exception(error)

    def _answered(self, sent: _Sent, answer: Bytes, epoch: int | None = None) -> bool:
        """Ends a call with its answer; whether somebody has waited for it."""
        if not self._take(sent, epoch):
            return False
        with self._lock:
            self._forget(sent)
            if sent.pull >= 0:
                sent.push = -1  # it is applied
            if kind_of(answer) != Kind.ERROR and self._needed_after(sent):
                self._kept[sent.number] = sent
        sent.reply.set_result(answer)
        return True

    def _take(self, sent: _Sent, epoch: int | None) -> bool:
        """Whether a call ends with this reply, and not by one to another attempt."""
        with self._lock:
            return (epoch is None or epoch == self._epoch) and self._waiting.pop(sent.number, None) is not None

    def _needed_after(self, sent: _Sent) -> bool:
        """Whether an answered call must be sent again if the generation is lost now."""
        if sent.pull >= 0:
            return value_of(sent.message if sent.then is None else sent.then) > 0  # a push of its step may name it
        return sent.push >= 0 and self._stages

    def _forget(self, sent: _Sent) -> None:
        """Forgets the calls to a server that are not needed once it has answered this one."""
        if sent.pull < 0 and sent.push < 0:
            return
        applied = sent.push if sent.push >= 0 and not (self._stages and sent.pull < 0) else -1
        before = max(applied, sent.push - 1, sent.pull - 1 if self._stages else -1)
        for number, kept in list(self._kept.items()):
            if kept.server == sent.server and max(kept.push, kept.pull) <= before:
                del self._kept[number]


def _addressed(message: Bytes, then: Bytes | None, generation: int) -> tuple[Bytes, Bytes | None]:
    """The messages of a call for the servers of a generation."""
    return addressed(message, generation), None if then is None else addressed(then, generation)


def _check(sent: _Sent, answer: Bytes) -> None:
    """Raises RemoteError where a server refuses what it took before."""
    if kind_of(answer) == Kind.ERROR:
        raise RemoteError(f"server {sent.server}, of what was sent again: {text_of(read(answer))}")
