"""Rank 0's part in checkpoints: asks the servers for snapshots, and writes one checkpoint at a time in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CheckpointError, ShardkeepError
from shardkeep.base.settings import DAY_S
from shardkeep.base.sizes import size_text
from shardkeep.base.system_errors import in_words
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.client.calls import ServerCalls
from shardkeep.ps.wire.admin import CheckpointSaved, Done, DropSnapshot, SnapshotFiles, TakeSnapshot, WriteSnapshot
from shardkeep.workers.checkpoint.rank_state import save_rank_states
from shardkeep.workers.checkpoint.tower_state import TowerState, save_tower
from shardkeep.workers.config import CheckpointConfig

AGAIN_S = (1.0, 5.0)
"""Seconds before each further attempt to write the checkpoint of the last step."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The workers' part of a checkpoint, copied at its step boundary."""

    step: int
    facts: dict[str, Any]
    """What the manifest says about the job, as JSON types."""
    tower: TowerState
    ranks: Sequence[Bytes]


class CheckpointWriter:
    """Writes the checkpoints of one generation. Only `records` is shared with the thread that writes.

    Args:
        folder: Where servers write their rows, which is not where the job looks for checkpoints; "" = it is.
        tell: Called, in the thread that writes, with each record.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        calls: ServerCalls,
        *,
        folder: str = "",
        tell: Callable[[dict[str, Any]], None] = lambda _record: None,
    ) -> None:
        self.records: deque[dict[str, Any]] = deque()
        """For the user: one record for each checkpoint that is complete or failed."""
        self._checkpoints = checkpoints
        self._config = config
        self._calls, self._folder, self._tell = calls, folder, tell
        self._thread: threading.Thread | None = None
        self._left = False
        self._pending: Contents | None = None  # of the last checkpoint, until it is complete
        self.failure = ""
        """Why the last checkpoint is not there; "" = it is."""
        self._base: Checkpoint | None = None  # the newest complete one, if increments are wanted

    def find_base(self) -> None:
        """Looks for the checkpoint that an increment could build on, if increments are wanted."""
        self._base = None
        with contextlib.suppress(CheckpointError):  # then the next checkpoint holds all rows
            newest = self._checkpoints.latest() if self._config.full_every != 1 else None
            if newest is not None:
                newest.check_sizes()
            self._base = newest

    def begin(self, contents: Contents, began: float, waited_s: float = 0.0) -> None:
        """Has the servers take their snapshots, and starts the thread that writes. `began`: when all ranks had met;
        `waited_s`: seconds that training had stood before."""
        base, step = self._base, contents.step
        if base is not None and (base.step >= step or len(base.chain) >= self._config.full_every):
            base = None
        self._pending, self.failure = contents, ""
        try:
            self._calls.ask(TakeSnapshot(step, "" if base is None else base.id), Done)
        except Exception as error:
            self.give_up(step, error)
            return
        held_s = waited_s + time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._run, args=(contents, base, began, held_s), name="checkpoint", daemon=True
        )
        self._thread.start()

    def give_up(self, step: int, error: Exception) -> None:
        """Records why there is no checkpoint, and frees its space on disk and on the servers."""
        if self._left:
            return
        with contextlib.suppress(ShardkeepError):  # a server that is gone has no snapshot
            self._calls.ask(DropSnapshot(), Done)
        self._checkpoints.abandon(step)
        self.failure = " ".join(in_words(error).split())
        text = f"no checkpoint at step {step:,}: {self.failure}"
        self._note({"step": step, "text": text, "unkept": "checkpoint"})

    def wait(self, writes: Callable[[], object] = int) -> None:
        """Blocks until the thread has ended. Calls `writes` several times within the deadline of a call until then."""
        while self._thread is not None:
            self._thread.join(self._calls.limit_s / 4)
            if self._thread.is_alive():
                writes()
            else:
                self._thread = None

    def again(self, step: int, writes: Callable[[], object] = int) -> None:
        """Tries again to write the checkpoint of `step` if it failed and no step has followed. Blocks, as `wait`."""
        for pause_s in AGAIN_S:
            self.wait(writes)
            if (contents := self._pending) is None or contents.step != step:
                return
            time.sleep(pause_s)
            self.begin(contents, time.perf_counter())
        self.wait(writes)

    def leave(self) -> None:
        """Training ends early: a checkpoint that fails from now on is left as it is, because another process may write
        one in its place. Does not wait; idempotent."""
        self._left = True

    def _run(self, contents: Contents, base: Checkpoint | None, began: float, held_s: float) -> None:
        step = contents.step
        try:
            done = self._write(contents, base)
        except Exception as error:
            self.give_up(step, error)
            self.find_base()
            return
        self._pending = None
        seconds, size = time.perf_counter() - began, sum(file.size for file in done.files)
        what = size_text(size) + (f" changed since step {done.base.step:,}" if done.base is not None else "")
        text = f"step {step:,} in {done.folder.name}: {what}, {seconds:.2f} s, training held up {held_s:.2f} s"
        self._note({"step": step, "bytes": size, "seconds": seconds, "held_s": held_s, "text": text})

    def _note(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._tell(record)

    def _write(self, contents: Contents, base: Checkpoint | None) -> Checkpoint:
        """Writes all parts, then the manifest."""
        step = contents.step
        partial = self._checkpoints.begin(step)
        snapshots = self._calls.ask(WriteSnapshot(step, self._folder), SnapshotFiles, DAY_S)
        files = [FileRecord(**file) for snapshot in snapshots for file in snapshot.files]
        files += save_tower(contents.tower, partial)  # last: servers keep rows until they write them
        files += save_rank_states(contents.ranks, partial)
        if all(snapshot.full for snapshot in snapshots):  # no server knew the base
            base = None
        removes = any(snapshot.removes for snapshot in snapshots)
        done = self._checkpoints.commit(step, files, contents.facts, base=base, removes=removes)
        if self._config.full_every > 1:
            self._base = done
        if self._folder:
            return done
        with contextlib.suppress(ShardkeepError):  # then journals, and the next checkpoint, have more than they need
            self._calls.ask(CheckpointSaved(step, done.id), Done)
        with contextlib.suppress(OSError):  # the next one tries again
            self._checkpoints.prune(self._config.keep, also=contents.facts.get("best_step"))
        return done
