"""Pulls: pulls that wait for the gate, the rows they receive, and the slots that the push of the same step reuses."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

from shardkeep.ps.shard.consistency import Gate
from shardkeep.ps.shard.futures import done, promised
from shardkeep.ps.shard.replies import Answers
from shardkeep.ps.shard.requests import Decoder
from shardkeep.ps.shard.serving import Serving
from shardkeep.ps.shard.tables import Gradients, Pulled, Sections
from shardkeep.ps.wire.message import Bytes, Kind, Packed


@dataclass(frozen=True, slots=True)
class Parked:
    """A pull that waits until the gate admits it."""

    future: Future[Bytes]
    message: Packed
    wanted: Sections


class Pulls:
    """The pulls and reads of one server. Thread safe; a method that says so runs under the lock of `serving`."""

    def __init__(self, serving: Serving, decoder: Decoder, answers: Answers, *, window: int) -> None:
        """`window`: steps of a rank whose slots are remembered."""
        self._serving = serving
        self._decoder = decoder
        self._answers = answers
        self._window = window
        self._parked: list[Parked] = []
        self._remembered: dict[int, dict[int, Pulled]] = {}  # by rank and step, until the push of the step comes
        self.counts: Counter[str] = Counter()
        """Pulls and reads; read it under the lock."""
        self.staleness: Counter[int] = Counter()
        """Pulls by the staleness of their rows; read it under the lock."""

    def park(self, message: Packed, gate: Gate[Gradients]) -> Future[Bytes]:
        """Lets a pull wait for `gate`. Raises ProtocolError, CorruptMessage or TransportError."""
        parked = Parked(promised(), message, self._decoder.wanted(message))
        with self._serving.lock:
            self._serving.check_open(message.generation)
            gate.arrive(message.rank, message.step)
            self._parked.append(parked)
        return parked.future

    def read(self, message: Packed) -> Future[Bytes]:
        """The rows as they are now. Raises ProtocolError, CorruptMessage or TransportError."""
        wanted = self._decoder.wanted(message)
        with self._serving.lock:
            self._serving.check_open(message.generation)
            self.counts["reads"] += 1
        return done(self.rows(message, wanted, staleness=0))

    def admitted(self, gate: Gate[Gradients]) -> list[tuple[Parked, int]]:
        """Takes the parked pulls that the gate admits, with their staleness. Under the lock."""
        ready = [p for p in self._parked if gate.admits(p.message.step)]
        if not ready:
            return []
        self._parked = [p for p in self._parked if not gate.admits(p.message.step)]
        admitted = [(p, gate.staleness(p.message.step)) for p in ready]
        for parked, staleness in admitted:
            if parked.wanted:
                self.counts["pulls"] += 1
                self.staleness[staleness] += 1
        return admitted

    def answer(self, parked: Parked, staleness: int) -> None:
        """Sends the rows of an admitted pull, or its error."""
        try:
            answer = self.rows(parked.message, parked.wanted, staleness=staleness)
        except Exception as error:
            answer = self._serving.error(error)
        parked.future.set_result(answer)

    def rows(self, message: Packed, wanted: Sections, *, staleness: int) -> Bytes:
        """The ROWS message of a pull or read."""
        answer, pulled = self._answers.rows(message, wanted, staleness=staleness)
        if message.kind is Kind.PULL and wanted:
            self._remember(message.rank, message.step, pulled)
        return answer

    def _remember(self, rank: int, step: int, pulled: Pulled) -> None:
        """Keeps the slots of a pull for the push of its step, which usually has the same ids."""
        with self._serving.lock:
            mine = self._remembered.setdefault(rank, {})
            mine[step] = pulled
            while len(mine) > self._window:
                del mine[min(mine)]

    def remembered(self, rank: int, step: int) -> Pulled | None:
        """The slots of an earlier pull. Under the lock."""
        return self._remembered.get(rank, {}).get(step)

    def forget(self, rank: int, step: int) -> None:
        """Drops the slots of a step that has been pushed. Under the lock."""
        self._remembered.get(rank, {}).pop(step, None)

    def forget_all(self) -> None:
        """Drops the slots of all pulls. Under the lock, or while nothing is served."""
        self._remembered = {}

    def abandon(self) -> list[Future[Bytes]]:
        """Takes the futures of all parked pulls; the caller fails them. Under the lock."""
        waiting = [parked.future for parked in self._parked]
        self._parked = []
        return waiting
