"""GenerationLife: begins, freezes, rewinds and ends generations of one server. Handles no message."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator

from shardkeep.base.errors import ProtocolError, TransportError
from shardkeep.ps.server.applier import Applier
from shardkeep.ps.server.journal.journal import JournalRecord, RecordKind
from shardkeep.ps.server.pulls import PullQueue
from shardkeep.ps.server.push_reader import PushReader
from shardkeep.ps.server.server_state import ServerState
from shardkeep.ps.server.snapshot.writer import SnapshotWriter
from shardkeep.ps.wire.message import read


class GenerationLife:
    """The generations of one server. Thread safe."""

    def __init__(
        self, serving: ServerState, applier: Applier, pulls: PullQueue, reader: PushReader, snapshots: SnapshotWriter
    ) -> None:
        self._serving = serving
        self._applier = applier
        self._pulls = pulls
        self._reader = reader
        self._snapshots = snapshots

    @property
    def resume_range(self) -> tuple[int, int]:
        """The first and the last step at which all workers could begin another generation."""
        with self._serving.lock:
            return self._applier.gate.resume_range()

    def begin(self, generation: int, step: int, *, sync: bool | None = None) -> None:
        """Starts to serve another generation, whose workers begin at `step`.

        Staged pushes of earlier steps are applied. In `sync`, staged pushes of `step` are dropped, because workers
        send them again. `sync`: as `Journal.begin`. Raises JournalError, and TransportError if an update has failed."""
        self._applier.settle()
        self._begin_log(generation, step, sync)
        self._rewind(step)
        with self._serving.lock:
            self._serving.generation, self._serving.closed = generation, None

    def _begin_log(self, generation: int, step: int, sync: bool | None = None) -> None:
        if (journal := self._applier.journal) is not None:
            facts = {"generation": generation, "shard": self._serving.shard}
            journal.begin(generation, step=step, facts=facts, sync=sync)

    def resume_at(self, step: int) -> None:
        """Continues at a later step, with the rows of its checkpoint; the journal needs that one. Raises
        JournalError."""
        if (journal := self._applier.journal) is not None:
            journal.clear()
            journal.build_on(step)
            self._begin_log(self._serving.generation, step)
        with self._serving.lock:
            self._applier.begin(step)

    def _rewind(self, step: int) -> None:
        self._applier.complete(step)
        with self._serving.lock:
            self._applier.begin(step)
            self._pulls.forget_all()

    @contextlib.contextmanager
    def frozen(self, step: int) -> Iterator[None]:
        """Inside, all steps before `step` are applied and no push can be. Raises ProtocolError or TransportError."""
        with self._serving.lock:
            if self._serving.closed is not None:
                raise TransportError(self._serving.closed)
            if not self._applier.gate.is_at(step):
                raise ProtocolError(f"a snapshot of step {step} while pushes of other steps are here")
            yield

    def suspend(self, reason: str) -> None:
        """Closes the service until `begin`, and blocks until no thread changes a table.

        Raises TransportError if an update has failed: the tables may then be half updated."""
        self.close(reason)
        self._applier.settle()

    def close(self, reason: str) -> None:
        """Fails every parked future and every later message with TransportError(reason). Idempotent."""
        with self._serving.lock:
            self._serving.closed = self._serving.closed or reason
            waiting = self._pulls.abandon() + self._applier.abandon()
        for future in waiting:
            future.set_exception(TransportError(reason))
        self._snapshots.close(reason)

    def replay(self, records: Iterable[JournalRecord]) -> int:
        """Applies the records of a journal. Returns the number of pushes.

        The tables must hold the checkpoint that the journal builds on. Raises CorruptMessage or ProtocolError if a
        record belongs to another job or one is missing."""
        journal, self._applier.journal = self._applier.journal, None
        count, generation = 0, -1
        for record in records:
            first = self.resume_range[0]
            if record.entry is RecordKind.GENERATION:
                begun = int(json.loads(record.body.tobytes())["generation"])
                if begun != generation and record.step >= first:  # each segment of a generation begins with it
                    self._rewind(record.step)
                generation = begun
            elif record.entry is RecordKind.APPLIED and record.step >= first:
                self._applier.complete(record.step + 1)
            elif record.entry is RecordKind.PUSH:
                count += self._replay_push(record)
        self._applier.journal = journal
        return count

    def _replay_push(self, record: JournalRecord) -> bool:
        """Applies one push. Returns whether it was new."""
        gradients = self._reader.gradients(read(record.body), ())
        with self._serving.lock:
            new = self._applier.gate.expects(record.rank, record.step)
            if new:
                self._applier.agree(record.rank, record.step, gradients.lr_factor)
            self._applier.gate.push(record.rank, record.step, gradients)
        self._applier.advance()
        return new
