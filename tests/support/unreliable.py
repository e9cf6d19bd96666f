"""A bad transport: it delivers messages late, in another order, some twice, and loses some or their answers."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import DeadlineExceeded
from shardkeep.ps.server.server_state import pass_on
from shardkeep.ps.transport.transport import Handler, LocalTransport

LOST_S = 0.5
"""Until the sender of a lost message gets an error, as by RPC's own limit."""


class Unreliable:
    """Between a sender and a transport: delivers messages late, in another order, and some of them twice; the answer is
    that of the first delivery. Of those that are lost, every other was delivered and only its answer is gone."""

    def __init__(self, *, seed: int = 0, late_s: float = 0.004, lost: int = 0) -> None:
        """`lost`: one message of so many, 0 = none."""
        self._rng, self._late_s, self._lost = random.Random(seed), late_s, lost
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """sent, twice, lost"""

    def send(
        self, deliver: Callable[..., Future[Bytes]], server: int, message: Bytes, then: Bytes | None, timeout_s: float
    ) -> Future[Bytes]:
        with self._lock:
            self.counts["sent"] += 1
            lost = bool(self._lost) and self.counts["sent"] % self._lost == 0
            self.counts["lost"] += lost
            waits = [self._rng.random() * self._late_s for _ in range(2 if self._rng.random() < 0.3 else 1)]
            arrives = not lost or self.counts["lost"] % 2 == 0
            self.counts["twice"] += arrives and len(waits) == 2
        answer: Future[Bytes] = Future()

        def deliver_first() -> None:
            first = deliver(server, message, then, timeout_s=timeout_s)
            if not lost:
                first.add_done_callback(lambda done: pass_on(done, answer))

        def deliver_again() -> None:  # a thread of its own: a sender that repeats a push has not seen the first answer
            deliver(server, message, timeout_s=timeout_s)

        if arrives:
            for wait_s, what in zip(waits, (deliver_first, deliver_again), strict=False):
                threading.Timer(wait_s, what).start()
        if lost:
            gone = DeadlineExceeded(f"server {server} did not answer within {LOST_S:g} s")
            threading.Timer(LOST_S, answer.set_exception, [gone]).start()
        return answer


class UnreliableTransport(LocalTransport):
    def __init__(self, handlers: Sequence[Handler], *, seed: int = 0) -> None:
        super().__init__(handlers)
        self._unreliable = Unreliable(seed=seed)

    @property
    def twice(self) -> int:
        return self._unreliable.counts["twice"]

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        return self._unreliable.send(super().send, server, message, then, timeout_s)
