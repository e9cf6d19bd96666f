"""ShardService: one server's tables behind messages. Takes packed bytes, gives a Future of packed bytes.

Knows no transport. Work is done in the calling thread, but for snapshots; what has to wait for others is a parked
Future, so any number of pulls can wait with any number of threads.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shardkeep.base.errors import ProtocolError, ShardkeepError, TransportError
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.checkpoints import Checkpoints
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.shard.admin import Questions
from shardkeep.ps.shard.consistency import Gate, Work, open_gate
from shardkeep.ps.shard.futures import done, failed, pass_on, promised
from shardkeep.ps.shard.journal.journal import Entry, Journal, Record
from shardkeep.ps.shard.replies import Answers
from shardkeep.ps.shard.requests import Decoder, refers
from shardkeep.ps.shard.snapshot.writer import SnapshotWriter
from shardkeep.ps.shard.tables import NO_GRADIENTS, Gradients, Pulled, Sections, Tables
from shardkeep.ps.wire.message import KIND_AT, Bytes, Kind, Packed, allocate, read, text_message, text_of, unpack


@dataclass(frozen=True, slots=True)
class _Parked:
    future: Future[Bytes]
    message: Packed
    wanted: Sections


class ShardService:
    """One server's share of every table.

    Thread safe. `handle` never blocks waiting for others. Every answer is a message; a ShardkeepError becomes an
    ERROR message and has changed nothing. Messages are immutable: staged pushes stay views of them.
    """

    def __init__(
        self,
        *,
        shard: int,
        num_shards: int,
        tables: Sequence[TableSpec],
        consistency: ConsistencyConfig,
        num_workers: int,
        seed: int,
        compression: CompressionConfig | None = None,
        generation: int = 0,
        start_step: int = 0,
        checkpoints: Checkpoints | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`compression`: of what is pulled; `journal`: where pushes are kept until a checkpoint holds them, None =
        nowhere."""
        self.shard = shard
        self.num_shards = num_shards
        self.generation = generation
        self.process: Callable[[], dict[str, Any]] = dict
        """What `report` says of the process; set by who runs one."""
        self.tables = Tables(tables, seed=seed)
        self.gate: Gate[Gradients] = open_gate(consistency, num_workers=num_workers, start_step=start_step)
        self._journal = journal
        self._snapshots = SnapshotWriter(self.tables, checkpoints, shard=shard)
        self._catalog = Catalog(tables)
        self._decoder = Decoder(self._catalog)
        self._answering = Answers(self.tables, self._catalog, compression or CompressionConfig())
        self._num_workers = num_workers
        self._pulled: dict[int, dict[int, Pulled]] = {}  # by rank and step, until their push comes
        self._window = consistency.window
        self._lock = threading.Lock()  # the gate, what is parked, the counts; never held while tables work
        self._idle = threading.Condition(self._lock)
        self._applying = 0  # pieces of work that were taken from the gate and are not done
        self._parked: list[_Parked] = []
        self._acks: dict[tuple[int, int], Future[Bytes]] = {}  # of pushes being applied, by (rank, step)
        self._held = False
        self._closed: str | None = None
        self._in_doubt = ""
        self._counts: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._answers: dict[Kind, Callable[[Packed], Future[Bytes]]] = {
            Kind.PULL: self._pull,
            Kind.READ: self._read,
            Kind.PUSH: self._push,
            Kind.ASK: self._ask,
        }
        self._questions = Questions(self._snapshots, journal, boundary=self._boundary, report=lambda: self.report())

    # ---- messages in, futures out ----

    def handle(self, buffer: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        """Answers one packed message: PULL and READ -> ROWS, PUSH -> ACK, ASK -> ANSWER, anything bad -> ERROR.

        With `then`, a second message, the answer is the second's, which is looked at when the first has been answered;
        an ERROR of the first is the answer to both.

        The future ends with an exception, a TransportError, only when the service is closed."""
        if then is None:
            return self._handle(buffer)
        both = promised()

        def go_on(first: Future[Bytes]) -> None:
            if first.exception() is not None or first.result()[KIND_AT] == Kind.ERROR:
                pass_on(first, both)
            else:
                self._handle(then).add_done_callback(lambda second: pass_on(second, both))

        self._handle(buffer).add_done_callback(go_on)
        return both

    def _handle(self, buffer: Bytes) -> Future[Bytes]:
        try:
            message = read(buffer)
            self._check_header(message)
            return self._answers[message.kind](message)
        except TransportError as error:
            return failed(error)
        except ShardkeepError as error:
            return done(self._error(error))
        except Exception as error:  # a defect of ours must reach the worker as one line, not as its deadline
            return done(self._error(error))

    def close(self, reason: str) -> None:
        """Fails every parked future, and every later message, with TransportError(reason). Idempotent."""
        with self._lock:
            self._closed = self._closed or reason
            waiting = [parked.future for parked in self._parked] + list(self._acks.values())
            self._parked, self._acks = [], {}
        for future in waiting:
            future.set_exception(TransportError(reason))
        self._snapshots.close(reason)

    # ---- generations ----

    def suspend(self, reason: str) -> None:
        """`close`, until `begin`; returns when no thread changes a table any more. Raises TransportError when applying
        has failed: then the tables are in doubt."""
        self.close(reason)
        self._advance()
        with self._idle:
            self._idle.wait_for(lambda: not self._applying)
        if self._in_doubt:
            raise TransportError(self._in_doubt)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step at which all workers could begin another generation."""
        with self._lock:
            return self.gate.span()

    def begin(self, generation: int, step: int) -> None:
        """Serves another generation, whose workers begin at `step`: what is staged of earlier steps is applied, what
        was pushed of it in `sync` is forgotten, for it comes again. Raises JournalError."""
        if self._journal is not None:
            self._journal.begin(generation, step=step, facts={"generation": generation, "shard": self.shard})
        self._begin(step)
        with self._lock:
            self.generation, self._closed = generation, None

    def _begin(self, step: int) -> None:
        with self._lock:
            self.gate.complete(step)
        self._advance()
        with self._lock:
            self.gate.begin(step)
            self._pulled = {}

    def replay(self, records: Iterable[Record]) -> int:
        """Does again what a journal tells; the number of pushes. The service must be that of the checkpoint before.

        Raises CorruptMessage or ProtocolError when a record is not of this job, or one is missing."""
        journal, self._journal = self._journal, None
        count, generation = 0, -1
        for record in records:
            first = self.span[0]
            if record.entry is Entry.GENERATION:
                begun = int(json.loads(record.body.tobytes())["generation"])
                if begun != generation and record.step >= first:  # each segment of a generation begins with it
                    self._begin(record.step)
                generation = begun
            elif record.entry is Entry.APPLIED and record.step >= first:
                with self._lock:
                    self.gate.complete(record.step + 1)
                self._advance()
            elif record.entry is Entry.PUSH:
                gradients = self._decoder.gradients(read(record.body), None)
                with self._lock:
                    count += self.gate.expects(record.rank, record.step)
                    self.gate.push(record.rank, record.step, gradients)
                self._advance()
        self._journal = journal
        return count

    def hold_pushes(self) -> None:
        """For tests: pushes are acknowledged but not applied until `release_pushes`."""
        with self._lock:
            self._held = True

    def release_pushes(self) -> None:
        """Applies what was held back, in the order of arrival, and answers the pulls that waited for it."""
        with self._lock:
            self._held = False
        self._advance()

    def report(self) -> dict[str, Any]:
        """Tables, digests and counts, as JSON types. Blocks for a scan of all rows."""
        digests = self.tables.digests()
        with self._lock:
            counts, staleness = Counter(self._counts), dict(sorted(self._staleness.items()))
            applied = self.gate.span()[1]
        return {
            "shard": self.shard,
            "process": self.process(),
            "tables": [{"name": t.spec.name, "rows": t.num_rows, "bytes": t.size_bytes} for t in self.tables],
            "digest": {name: f"{digest:032x}" for name, digest in digests.items()},
            "pushes": counts["pushes"],
            "pulls": counts["pulls"],
            "reads": counts["reads"],
            "duplicates": counts["duplicates"],
            "skipped_rows": sum(t.skipped_rows for t in self.tables),
            "applied_steps": applied,
            "staleness": {str(steps): times for steps, times in staleness.items()},
        }

    # ---- one method per kind ----

    def _pull(self, message: Packed) -> Future[Bytes]:
        parked = _Parked(promised(), message, self._decoder.wanted(message))
        with self._lock:
            self._check_open(message)
            self.gate.arrive(message.rank, message.step)
            self._parked.append(parked)
        self._advance()
        return parked.future

    def _read(self, message: Packed) -> Future[Bytes]:
        wanted = self._decoder.wanted(message)
        with self._lock:
            self._check_open(message)
            self._counts["reads"] += 1
        return done(self._rows(message, wanted, staleness=0))

    def _push(self, message: Packed) -> Future[Bytes]:
        """Acknowledged when staged (`sync`) or applied (other modes); a duplicate when the first one is."""
        key = (message.rank, message.step)
        ack: Future[Bytes] = promised()
        with self._lock:
            self._check_open(message)
            pulled = self._pulled.get(message.rank, {}).get(message.step)
            new = self.gate.expects(*key)
        forgotten = not new and refers(message)  # to a pull that is not known any more, because it was pushed
        gradients = NO_GRADIENTS if forgotten else self._decoder.gradients(message, pulled)
        if new and self._journal is not None:
            body = self._decoder.self_contained(message, gradients)
            self._journal.append(Entry.PUSH, rank=message.rank, step=message.step, body=body)
        with self._lock:  # once in the journal it counts, whatever happened meanwhile
            new = self.gate.push(*key, gradients)
            self._pulled.get(message.rank, {}).pop(message.step, None)
            self._counts["pushes" if new else "duplicates"] += 1
            at_once = self.gate.stages or self._held or (not new and key not in self._acks)
            if not at_once:
                ack = self._acks.setdefault(key, ack)
        if at_once:
            ack.set_result(self._ack(*key))
        self._advance()
        return ack

    def _ack(self, rank: int, step: int) -> Bytes:
        return allocate(Kind.ACK, generation=self.generation, rank=rank, step=step).buffer

    def _ask(self, message: Packed) -> Future[Bytes]:
        question = self._questions.read(text_of(unpack(message.buffer)))
        with self._lock:
            self._check_open(message)
        found = self._questions.answer(question)
        if isinstance(found, Future):
            return self._later(found, message.rank)
        return done(self._told(found, message.rank))

    @contextlib.contextmanager
    def _boundary(self, step: int) -> Iterator[None]:
        """Inside, nothing is applied, and all of the steps before `step` is. Raises ProtocolError or TransportError."""
        with self._lock:
            if self._closed is not None:
                raise TransportError(self._closed)
            if not self.gate.is_at(step):
                raise ProtocolError(f"a mark of step {step} while pushes of other steps are here")
            yield

    def _told(self, found: dict[str, Any], rank: int) -> Bytes:
        return text_message(Kind.ANSWER, json.dumps(found), generation=self.generation, rank=rank)

    def _later(self, found: Future[dict[str, Any]], rank: int) -> Future[Bytes]:
        """The answer to a question that takes its time."""
        answer = promised()

        def finish(found: Future[dict[str, Any]]) -> None:
            error = found.exception()
            if isinstance(error, TransportError):
                answer.set_exception(error)
            else:
                answer.set_result(
                    self._error(error) if isinstance(error, Exception) else self._told(found.result(), rank)
                )

        found.add_done_callback(finish)
        return answer

    # ---- progress: apply what is due, then answer what may be answered ----

    def _advance(self) -> None:
        """Applies and answers until nothing is due. Any thread may run it; each piece of work is one thread's."""
        while True:
            with self._lock:
                work = None if self._held else self.gate.take()
                ready = [] if work else self._admitted()
                self._applying += work is not None
            if work is None:
                break
            try:
                self._apply(work)
            except Exception as error:
                # The state of this server is in doubt; nobody may go on with it.
                self._in_doubt = f"server {self.shard} could not apply step {work.step}: {_line(error)}"
                self.close(self._in_doubt)
                with self._idle:
                    self._applying -= 1
                    self._idle.notify_all()
                raise
            with self._idle:
                self.gate.done(work)
                self._applying -= 1
                self._idle.notify_all()
                acks = [(rank, self._acks.pop((rank, work.step), None)) for rank in work.ranks]
            for rank, ack in acks:
                if ack is not None:
                    ack.set_result(self._ack(rank, work.step))
        for parked, staleness in ready:
            self._answer(parked, staleness)

    def _admitted(self) -> list[tuple[_Parked, int]]:
        """Takes the parked pulls that the gate lets through, with their staleness. Under the lock."""
        ready = [p for p in self._parked if self.gate.admits(p.message.step)]
        if not ready:
            return []
        self._parked = [p for p in self._parked if not self.gate.admits(p.message.step)]
        found = [(p, self.gate.staleness(p.message.step)) for p in ready]
        for parked, staleness in found:
            if parked.wanted:
                self._counts["pulls"] += 1
                self._staleness[staleness] += 1
        return found

    def _apply(self, work: Work[Gradients]) -> None:
        if self.gate.stages and self._journal is not None:
            self._journal.append(Entry.APPLIED, rank=0, step=work.step)
        self.tables.apply(work.pushes, step=work.step)

    def _answer(self, parked: _Parked, staleness: int) -> None:
        try:
            answer = self._rows(parked.message, parked.wanted, staleness=staleness)
        except Exception as error:
            answer = self._error(error)
        parked.future.set_result(answer)

    def _rows(self, message: Packed, wanted: Sections, *, staleness: int) -> Bytes:
        answer, pulled = self._answering.rows(message, wanted, staleness=staleness)
        if message.kind is Kind.PULL and wanted:
            self._remember(message.rank, message.step, pulled)
        return answer

    def _remember(self, rank: int, step: int, pulled: Pulled) -> None:
        """Keeps what a pull found for the push of its step: usually the same ids."""
        with self._lock:
            mine = self._pulled.setdefault(rank, {})
            mine[step] = pulled
            while len(mine) > self._window:
                del mine[min(mine)]

    # ---- checks ----

    def _check_header(self, message: Packed) -> None:
        if message.generation != self.generation:
            raise ProtocolError(
                f"server {self.shard} is in generation {self.generation}, "
                f"the message is of generation {message.generation}"
            )
        if message.kind not in self._answers:
            raise ProtocolError(f"server {self.shard} was sent a message of kind {message.kind.name}")
        if message.kind is not Kind.ASK and message.rank >= self._num_workers:
            raise ProtocolError(f"rank {message.rank} of {self._num_workers} workers")

    def _check_open(self, message: Packed) -> None:
        """Under the lock: between `_check_header` and here another generation may have begun."""
        if self._closed is not None or message.generation != self.generation:
            raise TransportError(self._closed or f"server {self.shard} is in generation {self.generation} now")

    def _error(self, error: Exception) -> Bytes:
        return text_message(Kind.ERROR, _line(error), generation=self.generation)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ShardkeepError) else f"{type(error).__name__}: {text}"
