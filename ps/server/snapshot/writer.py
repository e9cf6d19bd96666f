"""SnapshotWriter: takes one server's snapshot at a step boundary and writes it in a thread while training continues.

The format of the files is in files.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkeep.base.errors import CheckpointError, ProtocolError, TransportError
from shardkeep.base.logs.local_time import time_of_day
from shardkeep.base.machine.topology import usable_cores
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.server.snapshot.files import CORES_PER_WRITER, MAX_WRITERS, write_snapshot
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.admin import SnapshotFiles


class SnapshotWriter:
    """Holds at most one snapshot and writes at most one at a time. Thread safe."""

    def __init__(
        self, tables: Tables, checkpoints: Checkpoints | None, *, shard: int, observer: Callable[[int], None]
    ) -> None:
        """`observer`: called as `moved`."""
        self._tables, self._checkpoints, self._shard, self._observer = tables, checkpoints, shard, observer
        self.rows_done = 0
        """Of all snapshots that were written or loaded."""
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._step = -1  # of the last snapshot, unless writing it failed
        self._answer: Future[SnapshotFiles] | None = None  # of the snapshot under way
        self.written: dict[str, Any] | None = None
        """The last snapshot that was written: its step, how long writing took, and when it ended."""

    def folder(self) -> Checkpoints:
        """The folder of checkpoints. Raises CheckpointError if the server has none."""
        if self._checkpoints is None:
            raise CheckpointError("this server has no folder for checkpoints")
        return self._checkpoints

    def moved(self, rows: int) -> None:
        """Counts rows that are written or loaded."""
        self.rows_done += rows
        self._observer(rows)

    def take(self, step: int, base: str = "") -> None:
        """Fixes the rows as they are now, in about a millisecond. No push may be applied during the call.

        Drops an earlier snapshot that is not being written. `base`: the id of a checkpoint. If this server knows which
        rows changed since, the snapshot has only these. Raises CheckpointError while a snapshot is being written."""
        with self._lock:
            if self._answer is not None:
                raise CheckpointError(f"the snapshot of step {self._step} is still being written")
            self._snapshot, self._step = self._tables.snapshot(base), step

    def write(self, step: int, folder: str = "") -> Future[SnapshotFiles]:
        """Starts to write the snapshot of `step`. The result has the files' records, and whether they hold all rows.

        `folder`: of checkpoints; "" = the job's. Raises ProtocolError if there is no such snapshot."""
        with self._lock:
            if self._snapshot is None or self._step != step or self._answer is not None:
                raise ProtocolError(f"cannot write the snapshot of step {step}: no snapshot was taken at that step")
            partial = (Checkpoints(folder) if folder else self.folder()).partial(step)
            answer, snapshot = Future[SnapshotFiles](), self._snapshot
            answer.set_running_or_notify_cancel()
            self._answer = answer
        threading.Thread(target=self._run, args=(answer, snapshot, partial), name="snapshot", daemon=True).start()
        return answer

    def saved(self, step: int, checkpoint: str) -> None:
        """Records that the checkpoint of `step` is complete. Later snapshots may have only the rows changed since.

        `checkpoint`: its id."""
        with self._lock:
            if self._step == step and self._snapshot is None:
                self._tables.changed.complete(checkpoint)

    def drop(self) -> None:
        """Drops the snapshot. If it is being written, its future fails with CheckpointError. Idempotent."""
        self._end(CheckpointError(f"the snapshot of step {self._step} was given up"))

    def close(self, reason: str) -> None:
        """Like `drop`, with TransportError. Idempotent."""
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
        step, began = self._step, time.monotonic()
        try:
            threads = max(1, min(MAX_WRITERS, len(usable_cores()) // CORES_PER_WRITER))
            files = write_snapshot(snapshot, partial, shard=self._shard, threads=threads, moved=self.moved)
            written = SnapshotFiles([asdict(file) for file in files], snapshot.full, snapshot.removes)
        except OSError as error:
            failed = CheckpointError(f"{error.filename or partial}: {error.strerror or error}")
        except Exception as error:  # the caller must learn of a bug, too
            failed = error.with_traceback(None)  # its frames hold the walk's memory
        snapshot.drop("its snapshot is done")
        with self._lock:
            if self._answer is not answer:  # it was dropped, and its future has failed
                return
            self._answer = self._snapshot = None
            if failed is not None:
                self._step = -1
            else:
                seconds = round(time.monotonic() - began, 3)
                self.written = {"step": step, "seconds": seconds, "time": time_of_day()}
        if failed is not None:
            answer.set_exception(failed)
        else:
            answer.set_result(written)
