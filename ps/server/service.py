"""ShardService: dispatches the messages of one server by kind. Takes packed bytes, gives a Future of packed bytes.

Knows no transport. The calling thread does the work, except writing snapshots. A request that has to wait is a parked
Future, so waiting pulls occupy no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError, TransportError
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.index import earlier_steps
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog, Gradients
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.admin import AdminServer
from shardkeep.ps.server.applier import Applier
from shardkeep.ps.server.consistency import ConsistencyGate, open_gate
from shardkeep.ps.server.generation import GenerationLife
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.pulls import PullQueue, Replies
from shardkeep.ps.server.push_reader import PushReader, tables_with_moments
from shardkeep.ps.server.server_state import ServerState, done, failed, pass_on, promised
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.snapshot.writer import SnapshotWriter
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.admin import LoadRows
from shardkeep.ps.wire.message import Kind, Packed, kind_of, read
from shardkeep.ps.wire.rows import RowReader


class ShardService:
    """One server's share of every table.

    Thread safe. `handle` never waits for another process. Every reply is a message. A ShardkeepError becomes an ERROR
    message, and the request has changed nothing. Messages are immutable, because staged pushes are views of them.
    """

    def __init__(
        self,
        *,
        shard: int,
        tables: Sequence[TableSpec],
        consistency: ConsistencyConfig,
        num_workers: int,
        seed: int,
        compression: CompressionConfig | None = None,
        generation: int = 0,
        start_step: int = 0,
        checkpoints: Checkpoints | None = None,
        journal: Journal | None = None,
        buckets: tuple[int, int] = (0, BUCKETS),
        process: Callable[[], dict[str, Any]] = dict,
        moved: Callable[[int], None] = lambda _rows: None,
        import_from: Path | None = None,
    ) -> None:
        """`journal`: keeps pushes until a checkpoint holds them; None = no journal. `buckets`: placement buckets
        [first, end) of the server's ids. `process`: returns the facts about the process for `report`. `moved`: called
        with the rows of each part of a snapshot that is written or loaded. `import_from`: folder that is searched last
        for codecs; ConfigError for one that cannot be loaded."""
        self._process = process
        self._num_workers = num_workers
        self._serving = ServerState(shard=shard, generation=generation)
        compression = compression or CompressionConfig()
        moments = tables_with_moments(tables, compression.push)
        self.tables = Tables(tables, seed=seed, buckets=buckets, moments=moments)
        rows = RowReader(catalog := Catalog(tables), compression, import_from)
        reader = PushReader(rows, tables, compression.push)
        replies = Replies(self.tables, rows, compression, tables, seed=seed)
        self.pulls = PullQueue(self._serving, catalog, replies)
        gate: ConsistencyGate[Gradients] = open_gate(consistency, num_workers=num_workers, start_step=start_step)
        self.applier = Applier(
            self._serving, gate, self.tables, self.pulls, reader, journal, num_workers=num_workers, on_doubt=self.close
        )
        self.snapshots = SnapshotWriter(self.tables, checkpoints, shard=shard, observer=moved)
        self.life = GenerationLife(self._serving, self.applier, self.pulls, reader, self.snapshots)
        frozen, report = self.life.frozen, self.report
        self._admin = AdminServer(
            self._serving, self.snapshots, journal, frozen=frozen, report=report, load=self._load_rows
        )
        self._handlers: dict[Kind, Callable[[Packed], Future[Bytes]]] = {
            Kind.PULL: self._pull,
            Kind.FENCE: self._pull,
            Kind.READ: self.pulls.read,
            Kind.PUSH: self.applier.push,
            Kind.ASK: self._admin.handle,
        }

    def handle(self, buffer: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        """Answers one packed message: PULL and READ -> ROWS, PUSH and FENCE -> ACK, ASK -> ANSWER, a bad one -> ERROR.

        `then`: a second message, handled after the first has been answered. The result is then the second's reply. If
        the first ends with ERROR, that is the result, and the second is not handled.

        The future fails, with TransportError, only if the service is closed."""
        if then is None:
            return self._handle(buffer)
        both = promised()

        def go_on(first: Future[Bytes]) -> None:
            if first.exception() is not None or kind_of(first.result()) == Kind.ERROR:
                pass_on(first, both)
            else:
                self._handle(then).add_done_callback(lambda second: pass_on(second, both))

        self._handle(buffer).add_done_callback(go_on)
        return both

    def _handle(self, buffer: Bytes) -> Future[Bytes]:
        try:
            message = read(buffer)
            self._check(message)
            return self._handlers[message.kind](message)
        except TransportError as error:
            return failed(error)
        except Exception as error:  # also a bug: it must reach the worker as one line, not as a missed deadline
            return done(self._serving.error(error))

    def _pull(self, message: Packed) -> Future[Bytes]:
        future = self.pulls.park(message, self.applier.gate)
        self.applier.advance()
        return future

    def _check(self, message: Packed) -> None:
        """Raises ProtocolError for a message that this server does not serve."""
        self._serving.check_generation(message.generation)
        shard = self._serving.shard
        if message.kind not in self._handlers:
            raise ProtocolError(f"server {shard} was sent a message of kind {message.kind.name}")
        if message.kind is not Kind.ASK and message.rank >= self._num_workers:
            raise ProtocolError(f"rank {message.rank} of {self._num_workers} workers")

    @property
    def generation(self) -> int:
        """The generation that is served."""
        return self._serving.generation

    def close(self, reason: str) -> None:
        """Fails every parked future and every later message with TransportError(reason). Idempotent."""
        self.life.close(reason)

    def _load_rows(self, call: LoadRows) -> None:
        """Fills empty tables. Raises CheckpointError, and ProtocolError where there are rows."""
        shard = self._serving.shard
        if shard >= call.servers:
            raise ProtocolError(f"server {shard} of {call.servers}; allowed: a job that has this server")
        with self.tables.locked():
            if any(table.num_rows for table in self.tables):
                raise ProtocolError(f"server {shard} has rows; a checkpoint is loaded before the first step")
            checkpoint = Checkpoints(call.folder).load(call.step)
            load_snapshots(self.tables, checkpoint, shard=shard, num_shards=call.servers, moved=self.snapshots.moved)
            self.tables.earlier_steps = earlier_steps(checkpoint)
            self.life.resume_at(call.step)

    def figures(self) -> dict[str, Any]:
        """What the server counts, as JSON types: rows and bytes of tables, requests, the journal, the last snapshot
        that was written. Scans no rows."""
        with self._serving.lock:
            counts = self.applier.counts + self.pulls.counts
            applied, parked = self.applier.gate.resume_range()[1], self.pulls.num_parked
        journal = self.applier.journal
        return {
            "generation": self._serving.generation,
            "step": applied,
            "tables": [_table_figures(table) for table in self.tables.figures()],
            "pulls": counts["pulls"],
            "pushes": counts["pushes"],
            "parked_pulls": parked,
            "journal_bytes": 0 if journal is None else journal.size_bytes,
            "checkpoint": self.snapshots.written,
        }

    def report(self, digest: bool = True) -> dict[str, Any]:
        """Tables, counts and, if asked for, digests, as JSON types. Blocks while it scans all rows for a digest."""
        digests = self.tables.digests() if digest else {}
        with self._serving.lock:
            counts = self.applier.counts + self.pulls.counts
            staleness = dict(sorted(self.pulls.staleness.items()))
            applied = self.applier.gate.resume_range()[1]
        return {
            "shard": self._serving.shard,
            "process": self._process(),
            "tables": self.tables.figures(),
            "digest": {name: f"{digest:032x}" for name, digest in digests.items()},
            **{name: counts[name] for name in ("pushes", "pulls", "reads", "duplicates")},
            "skipped_rows": sum(t.skipped_rows for t in self.tables),
            "applied_steps": applied,
            "staleness": {str(steps): times for steps, times in staleness.items()},
        }


def _table_figures(table: dict[str, Any]) -> dict[str, Any]:
    rows, removed = table["rows"], table.get("evicted_rows", 0)
    return {
        "name": table["name"],
        "rows": rows,
        "bytes": table["bytes"],
        "created": rows + removed,
        "removed": removed,
        "refused": table.get("refused_rows", 0),
        "candidates": table.get("candidates", 0),
    }
