"""SnapshotWriter: takes one server's snapshot at a step boundary and writes it in a thread while training continues."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from shardkeep.base.errors import CheckpointError, ProtocolError, TransportError
from shardkeep.ps.checkpoints import Checkpoints
from shardkeep.ps.shard.snapshot.files import write_snapshot
from shardkeep.ps.shard.snapshot.snapshot import Snapshot
from shardkeep.ps.shard.tables import Tables
from shardkeep.ps.wire.admin import SnapshotFiles


class SnapshotWriter:
    """At most one snapshot, and at most one snapshot under way. Thread safe."""

    def __init__(self, tables: Tables, checkpoints: Checkpoints | None, *, shard: int) -> None:
        self._tables, self._checkpoints, self._shard = tables, checkpoints, shard
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._step = -1  # of the last snapshot, unless writing it failed
        self._answer: Future[SnapshotFiles] | None = None  # of the snapshot under way

    def folder(self) -> Checkpoints:
        """Where checkpoints go. Raises CheckpointError when the server was told no folder."""
        if self._checkpoints is None:
            raise CheckpointError("this server was told no folder for checkpoints")
        return self._checkpoints

    def take(self, step: int, base: str = "") -> None:
        """Fixes the rows as they are now, in a millisecond; nobody may apply a push meanwhile.

        Drops an earlier snapshot that is not being written. `base`: the id of the checkpoint since which changed rows
        are enough, if this server knows them. Raises CheckpointError while a snapshot is written."""
        self.folder()
        with self._lock:
            if self._answer is not None:
                raise CheckpointError(f"the snapshot of step {self._step} is still being written")
            self._snapshot, self._step = self._tables.snapshot(base), step

    def write(self, step: int) -> Future[SnapshotFiles]:
        """Starts writing the snapshot of `step`; ends with the files' records, and whether they hold all rows.

        Raises ProtocolError when there is no such snapshot."""
        with self._lock:
            if self._snapshot is None or self._step != step or self._answer is not None:
                raise ProtocolError(f"step {step} is to be written, but no snapshot was made at that step")
            answer = self._answer = Future()
            answer.set_running_or_notify_cancel()
            partial, snapshot = self.folder().partial(step), self._snapshot
        threading.Thread(target=self._run, args=(answer, snapshot, partial), name="snapshot", daemon=True).start()
        return answer

    def saved(self, step: int, checkpoint: str) -> None:
        """The checkpoint of `step` is complete; its id. Later snapshots may hold only the rows that changed since."""
        with self._lock:
            if self._step == step and self._snapshot is None:
                self._tables.changed.complete(checkpoint)

    def drop(self) -> None:
        """Ends a snapshot under way with CheckpointError, and drops the snapshot. Idempotent."""
        self._end(CheckpointError(f"the snapshot of step {self._step} was given up"))

    def close(self, reason: str) -> None:
        """As `drop`, with TransportError. Idempotent."""
        self._end(TransportError(reason))

    def _end(self, error: CheckpointError | TransportError) -> None:
        with self._lock:
            answer, snapshot, self._answer, self._snapshot = self._answer, self._snapshot, None, None
            self._step = -1
        if snapshot is not None:
            snapshot.drop(str(error))
        if answer is not None:
            answer.set_exception(error)

    def _run(self, answer: Future[SnapshotFiles], snapshot: Snapshot, partial: Path) -> None:
        written = SnapshotFiles([], full=True)
        failed: Exception | None = None
        try:
            files = [asdict(file) for file in write_snapshot(snapshot, partial, shard=self._shard)]
            written = SnapshotFiles(files, snapshot.full)
        except OSError as error:
            failed = CheckpointError(f"{error.filename or self.folder().folder}: {error.strerror or error}")
        except Exception as error:  # its asker must learn of a defect of ours, too
            failed = error.with_traceback(None)  # its frames hold the walk's memory
        snapshot.drop("its snapshot is done")
        with self._lock:
            if self._answer is not answer:  # it was given up, and its asker told
                return
            self._answer = self._snapshot = None
            if failed is not None:
                self._step = -1
        if failed is not None:
            answer.set_exception(failed)
        else:
            answer.set_result(written)
