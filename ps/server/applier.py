"""Applier: takes a push through gate, journal, tables and acknowledgement. Knows no other generation."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError, TransportError
from shardkeep.ps.jagged import NO_GRADIENTS, FoundSlots, Gradients
from shardkeep.ps.server.consistency import ConsistencyGate, Work
from shardkeep.ps.server.journal.journal import KEPT, Journal, RecordKind
from shardkeep.ps.server.pulls import PullQueue
from shardkeep.ps.server.push_reader import PushReader
from shardkeep.ps.server.server_state import ServerState, done, one_line, promised
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.message import Packed, lr_factor_of


class WorkUnderWay:
    """The pushes that are not in the gate yet, and the pieces of work that it handed out and that are not done. Call
    its methods under `lock`, except `wait`."""

    def __init__(self, lock: threading.Lock) -> None:
        self.failure = ""
        """Why the tables may be half updated; "" = no update has failed."""
        self._changed = threading.Condition(lock)
        self._count = 0

    def begin(self) -> None:
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        self._changed.notify_all()

    def wait(self) -> None:
        """Blocks until all work is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)


class Applier:
    """Applies the pushes of one server in the order that its gate decides. Thread safe."""

    def __init__(
        self,
        serving: ServerState,
        gate: ConsistencyGate[Gradients],
        tables: Tables,
        pulls: PullQueue,
        reader: PushReader,
        journal: Journal | None,
        *,
        num_workers: int,
        on_doubt: Callable[[str], None],
    ) -> None:
        """`journal`: keeps pushes until a checkpoint holds them; None = no journal. `on_doubt`: closes the service
        when an update fails."""
        self.gate = gate
        self.journal = journal
        self.counts: Counter[str] = Counter()
        """Pushes and duplicates; read it under the lock."""
        self._serving = serving
        self._tables = tables
        self._pulls = pulls
        self._reader = reader
        self._num_workers = num_workers
        self._on_doubt = on_doubt
        self._agreed: tuple[int, int, float] | None = None  # step, first rank and its factor, in `sync`
        self._under_way = WorkUnderWay(serving.lock)
        self._acks: dict[tuple[int, int], Future[Bytes]] = {}  # of pushes that are not acknowledged, by (rank, step)

    def push(self, message: Packed) -> Future[Bytes]:
        """Takes in a push. The future resolves when the journal has the push, and it is staged (`sync`) or applied
        (other modes).

        A duplicate is acknowledged together with the first push."""
        key = (message.rank, message.step)
        with self._serving.lock:
            self._serving.check_open(message.generation)
            if (first := self._acks.get(key)) is not None:
                self.counts["duplicates"] += 1
                return first
            pulled = self._pulls.named(message)
            new = self.gate.expects(*key)
            if new:
                self.agree(*key, lr_factor_of(message))
                ack = self._acks[key] = promised()
                self._under_way.begin()
        if not new:
            return self._duplicate(message, pulled)
        gradients, kept = NO_GRADIENTS, KEPT
        try:
            gradients = self._reader.gradients(message, pulled)
            if self.journal is not None:
                place = {"rank": message.rank, "step": message.step}
                kept = self.journal.append(RecordKind.PUSH, **place, body=message.buffer)
        except Exception as error:
            kept = Future()
            kept.set_exception(error)
        kept.add_done_callback(partial(self._take_in, key, gradients))
        return ack

    def _duplicate(self, message: Packed, pulled: Sequence[FoundSlots]) -> Future[Bytes]:
        """Acknowledges a push that is staged or applied already. Raises ProtocolError or CorruptMessage."""
        self._reader.gradients(message, pulled)
        with self._serving.lock:
            self._pulls.forget(message.rank, message.step, self.gate)
            self.counts["duplicates"] += 1
        return done(self._serving.acknowledgement(message.rank, message.step))

    def _take_in(self, key: tuple[int, int], gradients: Gradients, kept: Future[None]) -> None:
        """Gives the gate a push that the journal has. It counts, even if the service has been closed meanwhile."""
        failure = kept.exception()
        with self._serving.lock:
            if failure is None:
                self.gate.push(*key, gradients)
                self._pulls.forget(*key, self.gate)
                self.counts["pushes"] += 1
            acks = self._unanswered([key]) if failure or self.gate.stages else []
            self._under_way.end()
        self._answer(acks, failure)
        with contextlib.suppress(Exception):  # the pushes whose update fails are answered
            self.advance()

    def _unanswered(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int, Future[Bytes]]]:
        """Takes the futures of pushes that wait for their acknowledgement. Under the lock."""
        return [(*key, ack) for key in keys if (ack := self._acks.pop(key, None)) is not None]

    def _answer(self, acks: Iterable[tuple[int, int, Future[Bytes]]], failure: BaseException | None = None) -> None:
        for rank, step, ack in acks:
            serving = self._serving
            ack.set_result(serving.error(failure) if failure else serving.acknowledgement(rank, step))

    def agree(self, rank: int, step: int, lr_factor: float) -> None:
        """In `sync`, raises ProtocolError if another rank pushed the step with another factor. Under the lock."""
        if not self.gate.stages:
            return
        if self._agreed is None or self._agreed[0] != step:
            self._agreed = step, rank, lr_factor
        elif self._agreed[2] != lr_factor:
            _, other, factor = self._agreed
            raise ProtocolError(
                f"step {step}: worker {other} pushed lr_factor {factor:g}, worker {rank} {lr_factor:g}; "
                "in sync all workers push the same"
            )

    def begin(self, step: int) -> int:
        """Starts all ranks at `step`. Returns the number of lost pushes. Under the lock."""
        self._agreed = None
        return self.gate.begin(step)

    def advance(self) -> None:
        """Applies due pushes, then answers admitted pulls. Several threads may run it; each does other pieces."""
        while True:
            with self._serving.lock:
                work = self.gate.take()
                ready = [] if work else self._pulls.admitted(self.gate)
                if work is not None:
                    self._under_way.begin()
            if work is None:
                break
            self._finish(work)
        for parked, staleness in ready:
            self._pulls.answer(parked, staleness)

    def _finish(self, work: Work[Gradients]) -> None:
        """Applies a piece of work and answers its pushes.

        If the update fails, closes the service, because the tables may be half updated, and raises."""
        try:
            self._apply(work)
        except Exception as error:
            failure = f"server {self._serving.shard} could not apply step {work.step}: {one_line(error)}"
            self._under_way.failure = failure
            with self._serving.lock:
                acks = self._unanswered((rank, work.step) for rank in work.ranks)
            self._answer(acks, error)
            self._on_doubt(failure)
            with self._serving.lock:
                self._under_way.end()
            raise
        with self._serving.lock:
            self.gate.done(work)
            self._under_way.end()
            acks = self._unanswered((rank, work.step) for rank in work.ranks)
        self._answer(acks)

    def _apply(self, work: Work[Gradients]) -> None:
        if self.gate.stages and self.journal is not None:
            self.journal.append(RecordKind.APPLIED, rank=0, step=work.step)
        share = len(work.ranks) / self._num_workers  # 1 in `sync`, whose work has the pushes of all ranks
        self._tables.apply(work.pushes, step=work.step, decay_share=share)

    def complete(self, step: int) -> None:
        """Applies the staged pushes of all steps before `step`. Raises ProtocolError if some are missing."""
        with self._serving.lock:
            self.gate.complete(step)
        self.advance()

    def settle(self) -> None:
        """Blocks until no push is on its way to the gate, and no thread changes a table. Raises TransportError if an
        update has failed."""
        self._under_way.wait()
        self.advance()
        self._under_way.wait()
        with self._tables.locked():  # a checkpoint may be filling them
            pass
        if self._under_way.failure:
            raise TransportError(self._under_way.failure)

    def abandon(self) -> list[Future[Bytes]]:
        """Removes and returns the futures of all pending acknowledgements; the caller fails them. Under the lock."""
        waiting = list(self._acks.values())
        self._acks = {}
        return waiting
