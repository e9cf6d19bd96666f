"""PullQueue: parks each pull and fence until the gate admits it, then replies.

It also remembers the slots of a pull that has a number, because the push of the same step may name it.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.per_table import pull_of
from shardkeep.compression.values.registry import PULL_TAG, tag_of
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, FoundSlots, Gradients, SectionIds
from shardkeep.ps.server.consistency import ConsistencyGate
from shardkeep.ps.server.server_state import ServerState, done, promised
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.ids import ROW_BITS, read_ids, row_bit_bytes, write_row_bits
from shardkeep.ps.wire.message import MAX_PULLS, Kind, Packed, allocate, named_pulls
from shardkeep.ps.wire.rows import PLAIN, RowFormats, RowReader


@dataclass(frozen=True, slots=True)
class ParkedPull:
    """A pull or fence that waits until the gate admits it."""

    future: Future[Bytes]
    message: Packed
    sections: SectionIds
    arrival: int
    """Parked pulls are answered in this order."""

    def __lt__(self, other: ParkedPull) -> bool:
        """The order of a heap: a gate that does not admit a step admits no later one."""
        return self.message.step < other.message.step


_ARRIVAL = attrgetter("arrival")


class PullQueue:
    """The pulls and reads of one server. Thread safe. Some methods require the lock of `serving`; they say so."""

    def __init__(self, serving: ServerState, catalog: Catalog, replies: Replies) -> None:
        self._serving = serving
        self._catalog = catalog
        self._replies = replies
        self._parked: list[ParkedPull] = []  # a heap
        self._fences: list[ParkedPull] = []  # a heap of the fences that wait only for the arrival of pushes
        self._arrivals = itertools.count()
        self._remembered: dict[
            int, dict[int, dict[int, FoundSlots]]
        ] = {}  # by rank, step, number; until the step's push
        self.counts: Counter[str] = Counter()
        """Pulls and reads; read it under the lock."""
        self.staleness: Counter[int] = Counter()
        """Pulls by the staleness of their rows; read it under the lock."""

    @property
    def num_parked(self) -> int:
        """Pulls and fences that wait. Under the lock."""
        return len(self._parked) + len(self._fences)

    @property
    def num_remembered(self) -> int:
        """Pulls whose slots wait for a push. Under the lock."""
        return sum(len(pulls) for steps in self._remembered.values() for pulls in steps.values())

    def park(self, message: Packed, gate: ConsistencyGate[Gradients]) -> Future[Bytes]:
        """Parks a pull or fence until `gate` admits it. Raises ProtocolError, CorruptMessage or TransportError."""
        parked = ParkedPull(promised(), message, self._sections_of(message), next(self._arrivals))
        with self._serving.lock:
            self._serving.check_open(message.generation)
            if message.kind is Kind.PULL:
                gate.arrive(message.rank, message.step)
            elif message.value:
                gate.complete(message.step)
            asks = message.kind is Kind.FENCE and not message.value
            heappush(self._fences if asks else self._parked, parked)
        return parked.future

    def read(self, message: Packed) -> Future[Bytes]:
        """The rows as they are now. Raises ProtocolError, CorruptMessage or TransportError."""
        sections = self._sections_of(message)
        with self._serving.lock:
            self._serving.check_open(message.generation)
            self.counts["reads"] += 1
        return done(self.rows(message, sections, staleness=0))

    def _sections_of(self, message: Packed) -> SectionIds:
        """The ids of a message."""
        if message.values_area.size:
            raise CorruptMessage(f"{message.kind.name} with {message.values_area.size} bytes of values")
        if not 0 <= message.value <= MAX_PULLS:
            raise CorruptMessage(f"{message.kind.name} of number {message.value}; allowed: 0 to {MAX_PULLS}")
        return read_ids(message, self._catalog)

    def admitted(self, gate: ConsistencyGate[Gradients]) -> list[tuple[ParkedPull, int]]:
        """Takes what is parked and the gate admits, with the staleness. Under the lock."""
        ready: list[ParkedPull] = []
        while self._parked and gate.admits(self._parked[0].message.step):
            ready.append(heappop(self._parked))
        while self._fences and gate.resume_range()[1] >= self._fences[0].message.step:
            ready.append(heappop(self._fences))
        ready.sort(key=_ARRIVAL)
        admitted = [(p, gate.staleness(p.message.step)) for p in ready]
        for parked, staleness in admitted:
            if parked.sections:
                self.counts["pulls"] += 1
                self.staleness[staleness] += 1
        return admitted

    def answer(self, parked: ParkedPull, staleness: int) -> None:
        """Sends the rows of an admitted pull, the acknowledgement of a fence, or an error."""
        try:
            answer = self.rows(parked.message, parked.sections, staleness=staleness)
        except Exception as error:
            answer = self._serving.error(error)
        parked.future.set_result(answer)

    def rows(self, message: Packed, sections: SectionIds, *, staleness: int) -> Bytes:
        """The ROWS message of a pull or read; the ACK of a fence."""
        if message.kind is Kind.FENCE:
            return self._serving.acknowledgement(message.rank, message.step)
        answer, pulled = self._replies.rows(message, sections, staleness=staleness)
        if message.kind is Kind.PULL and message.value and sections:
            with self._serving.lock:
                steps = self._remembered.setdefault(message.rank, {})
                steps.setdefault(message.step, {})[message.value] = pulled
        return answer

    def named(self, push: Packed) -> list[FoundSlots]:
        """The pulls that a push names; none if one of them is not known. Under the lock."""
        pulls = self._remembered.get(push.rank, {}).get(push.step, {})
        numbers = named_pulls(push)
        return [pulls[number] for number in numbers] if pulls.keys() >= set(numbers) else []

    def forget(self, rank: int, step: int, gate: ConsistencyGate[Gradients]) -> None:
        """Drops the slots of a step that has been pushed, and of those before that have been too: in `bounded` and
        `async`, pushes may overtake each other. Under the lock."""
        if steps := self._remembered.get(rank):
            kept = {other: pulls for other, pulls in steps.items() if other > step or gate.expects(rank, other)}
            self._remembered[rank] = kept

    def forget_all(self) -> None:
        """Drops the slots of all pulls. Under the lock, or while nothing is served."""
        self._remembered = {}

    def abandon(self) -> list[Future[Bytes]]:
        """Takes the futures of all parked pulls; the caller fails them. Under the lock."""
        waiting = [parked.future for parked in sorted(self._parked + self._fences, key=_ARRIVAL)]
        self._parked, self._fences = [], []
        return waiting


class Replies:
    """Makes one server's replies to pulls and reads.

    The answer to a READ says which of the rows exist; others have their initial values. If ids are coded, the answer to
    a PULL says so too, and leaves the others out: the worker computes them."""

    def __init__(
        self,
        tables: Tables,
        rows: RowReader,
        compression: CompressionConfig,
        specs: Sequence[TableSpec],
        *,
        seed: int,
    ) -> None:
        self._tables = tables
        self._catalog = rows.catalog
        pulls_T = [pull_of(spec.compression, compression.pull) for spec in specs]
        tags_T = [tag_of(pull.values, pull.scale, plug=PULL_TAG) for pull in pulls_T]
        self._formats = RowFormats(rows, tags_T, seed=seed)
        self._plain = RowFormats(rows, [PLAIN] * len(specs))
        self._leaves_out = compression.ids == "coded"

    def rows(self, message: Packed, sections: SectionIds, *, staleness: int) -> tuple[Bytes, FoundSlots]:
        """The ROWS message of a PULL or READ, and the result of the pull."""
        rows_S, tables_S, reads = sections.counts, sections.tables_S, message.kind is Kind.READ
        formats, names = self._plain if reads else self._formats, dict[str, Any]()
        if named := reads or self._leaves_out:
            bytes_S = row_bit_bytes(sections.starts_S1)
            names = {"id_formats_S": np.full_like(rows_S, ROW_BITS), "id_bytes_S": bytes_S}
        direct, ids_V = formats.plain and (reads or not named), sections.ids_V
        if not direct:
            flat = np.empty(int((rows_S * self._catalog.dims_T[tables_S]).sum()), dtype=np.float32)
            pulled = self._tables.pull(sections, flat)
            if named and pulled.absent_S.any():
                there_V = pulled.slots_V >= 0
                ids_V = ids_V[there_V]
                flat = flat[np.repeat(there_V, np.repeat(self._catalog.dims_T[tables_S], rows_S))]
                rows_S = rows_S - pulled.absent_S
            encoded = formats.encode(flat, rows_S, ids_V, message.step, tables_S)
            values, sizes_S = formats.pack(encoded, rows_S, tables_S)
        reply = allocate(
            Kind.ROWS,
            generation=message.generation,
            rank=message.rank,
            step=message.step,
            value=staleness,
            tables_S=tables_S,
            rows_S=rows_S,
            value_bytes_S=rows_S * formats.widths_T[tables_S] if direct else sizes_S,
            value_formats_S=formats.tags_T[tables_S],
            **names,
        )
        if direct:
            pulled = self._tables.pull(sections, reply.values_area.view(np.float32))
        else:
            reply.values_area[:] = values
        if named:
            reply.ids_area[:] = write_row_bits(pulled.slots_V >= 0)
        return reply.buffer, pulled
