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
from shardkeep.base.sizes import size_text
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.client.admin import AdminClient
from shardkeep.workers.checkpoint.rank_state import save_rank_states
from shardkeep.workers.checkpoint.tower_state import TowerState, save_tower
from shardkeep.workers.config import CheckpointConfig

TIMEOUT_S = 1800.0
"""Seconds that all servers together get to write their snapshots."""


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
        tell: Called, in the thread that writes, with each record; None = no call.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        admin: AdminClient,
        *,
        folder: str = "",
        tell: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.records: deque[dict[str, Any]] = deque()
        """For the user: one record for each checkpoint that is complete or failed."""
        self._checkpoints = checkpoints
        self._config = config
        self._admin, self._folder, self._tell = admin, folder, tell
        self._thread: threading.Thread | None = None
        self._left = False
        self._base: Checkpoint | None = None  # the newest complete one, if increments are wanted

    def find_base(self) -> None:
        """Looks for the checkpoint that an increment could build on, if increments are wanted."""
        self._base = None
        with contextlib.suppress(CheckpointError):  # then the next checkpoint holds all rows
            newest = self._checkpoints.latest() if self._config.full_every != 1 else None
            if newest is not None:
                newest.check_sizes()
            self._base = newest

    def take_snapshot(self, step: int) -> Checkpoint | None:
        """Has the servers take their snapshots. Returns the checkpoint on which they build; None = they hold all rows.
        Raises what admin calls raise."""
        base = self._base
        if base is not None and (base.step >= step or len(base.chain) >= self._config.full_every):
            base = None
        self._admin.take_snapshot(step, "" if base is None else base.id)
        return base

    def start(self, contents: Contents, base: Checkpoint | None, began: float, held_s: float) -> None:
        """Starts the thread that writes. `began`: when all ranks had met; `held_s`: seconds that training stood."""
        self._thread = threading.Thread(
            target=self._run, args=(contents, base, began, held_s), name="checkpoint", daemon=True
        )
        self._thread.start()

    def give_up(self, step: int, error: Exception) -> None:
        """Records why there is no checkpoint, and frees its space on disk and on the servers."""
        if self._left:
            return
        with contextlib.suppress(ShardkeepError):  # a server that is gone has no snapshot
            self._admin.drop_snapshot()
        self._checkpoints.abandon(step)
        why = " ".join(str(error).split()) or type(error).__name__
        self._note({"step": step, "text": f"no checkpoint at step {step:,}: {why}; training continues"})

    def wait(self) -> None:
        """Blocks until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

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
        seconds, size = time.perf_counter() - began, sum(file.size for file in done.files)
        what = size_text(size) + (f" changed since step {done.base.step:,}" if done.base is not None else "")
        text = f"step {step:,} in {done.folder.name}: {what}, {seconds:.2f} s, training held up {held_s:.2f} s"
        self._note({"step": step, "bytes": size, "seconds": seconds, "held_s": held_s, "text": text})

    def _note(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._tell is not None:
            self._tell(record)

    def _write(self, contents: Contents, base: Checkpoint | None) -> Checkpoint:
        """Writes all parts, then the manifest."""
        step = contents.step
        partial = self._checkpoints.begin(step)
        snapshots = self._admin.write_snapshot(step, timeout_s=TIMEOUT_S, folder=self._folder)
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
            self._admin.checkpoint_saved(step, done.id)
        with contextlib.suppress(OSError):  # the next one tries again
            self._checkpoints.prune(self._config.keep, also=contents.facts.get("best_step"))
        return done
