"""Follower: loads each new checkpoint of a run that trains, increments as layers over the rows that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkeep.assembly.model import table_specs
from shardkeep.base.machine.memory import memory_errors
from shardkeep.inference.sorted_rows import SortedRows, SortedTable, merged
from shardkeep.inference.trained import Trained, computing_in, needed_inputs, trained_of_checkpoint
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.row_stream import Removed, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.trained import config_of
from shardkeep.workers.config import Amp

MOST_LAYERS = 8
"""Layers that a lookup may go through; more become one."""
AGAIN_S = 30.0
"""After which a checkpoint that could not be read is tried again."""


@dataclass(frozen=True)
class Followed:
    """A model of a run.

    Attributes:
        written_s: When its checkpoint was complete, seconds since 1970.
        full: Whether all rows were read for it; else increments alone.
    """

    trained: Trained
    written_s: float
    full: bool


class Follower:
    """Reads a run's newest checkpoint whenever there is another one. Holds all rows in memory. The run may begin later.

    A job deletes old checkpoints while this reads. What is gone then is left out: the next look begins with the newest
    one, and reads all rows where its chain is not known."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic, *, amp: Amp | None = None) -> None:
        """`run`: a run folder, or the path of one that a job will make; `amp`: arithmetic of the dense model, None =
        that of the job. Raises UserError: it is something else."""
        self._run, self._clock, self._amp = run, clock, amp
        if not self._missing():
            config_of(run)
        self.step = 0
        """The step of the model that `look` returned last; 0 = none yet."""
        self._chain: list[str] = []
        self._rows: SortedRows | None = None
        self._unread, self._again_s = "", 0.0

    def _missing(self) -> bool:
        """Whether there is no run yet: a job that starts makes an empty folder first."""
        return not self._run.exists() or (self._run.is_dir() and next(self._run.iterdir(), None) is None)

    def awaited(self) -> str | None:
        """What there must be before a model can be read, as one line; None = it is there."""
        if self._missing():
            return f"{self._run} does not exist yet"
        steps = [step for step, _ in checkpoints_of(config_of(self._run), self._run).complete() if step]
        return None if steps else f"{self._run} has no checkpoint yet"

    def look(self) -> Followed | None:
        """The newest model, None = it is the one that `look` returned before, or there is none yet. Blocks while rows
        are read.

        Raises CheckpointError, OSError and others where the newest checkpoint cannot be read. It is tried again
        `AGAIN_S` later; until then `look` returns None."""
        if self._missing():
            return None
        config = computing_in(config_of(self._run), self._amp)
        checkpoint = checkpoints_of(config, self._run).latest()
        if checkpoint is None or not checkpoint.step or [checkpoint.id] == self._chain[-1:]:
            return None
        if checkpoint.id == self._unread and self._clock() < self._again_s:
            return None
        self._unread, self._again_s = checkpoint.id, self._clock() + AGAIN_S
        written_s = (checkpoint.folder / "manifest.json").stat().st_mtime
        inputs = needed_inputs(config, checkpoint)
        schema = inputs.layout.schema
        with memory_errors("the rows of the run that is followed"):
            rows, full = self._read(table_specs(config, schema), checkpoint, seed=config.seed)
        trained = trained_of_checkpoint(config, checkpoint, schema, inputs, rows, run=self._run)
        self._rows, self._chain = rows, [link.id for link in checkpoint.chain]
        self.step = trained.step
        return Followed(trained, written_s, full)

    def forget(self) -> None:
        """The model that `look` returned last could not be used: `AGAIN_S` after it was read, all rows are read again
        and `look` returns it once more."""
        self._rows, self._chain = None, []

    def _read(self, specs: Sequence[TableSpec], checkpoint: Checkpoint, *, seed: int) -> tuple[SortedRows, bool]:
        """The rows of a checkpoint, and whether all were read."""
        chain, known = checkpoint.chain, len(self._chain)
        rows = self._rows
        full = rows is None or [link.id for link in chain[:known]] != self._chain or rows.specs != list(specs)
        full = full or any(Removed.of(link, spec.name).ranges for link in chain[known:] for spec in specs)
        if full:
            return SortedRows(specs, [[_table(spec, checkpoint) for spec in specs]], seed=seed), True
        assert rows is not None
        for link in chain[known:]:
            rows = rows.over([_increment(spec, link, seed) for spec in specs], most_layers=MOST_LAYERS)
        return rows, False


def _table(spec: TableSpec, checkpoint: Checkpoint) -> SortedTable:
    """The rows of a table in a checkpoint and those that it builds on. Raises CheckpointError."""
    blocks = stream_rows(checkpoint, spec.name, slots=False)
    return SortedTable.of_blocks(((block.ids_N, block.rows_ND) for block in blocks), spec.dim)


def _increment(spec: TableSpec, link: Checkpoint, seed: int) -> SortedTable:
    """The rows of a table in an increment alone; rows that it removes are as if they had never been pushed."""
    rows, gone_R = _table(spec, replace(link, base=None)), Removed.of(link, spec.name).ids_R
    if not gone_R.size:
        return rows
    initial = Initial(spec.init, seed=seed, name=spec.name).rows(gone_R, spec.dim)
    return merged([rows, SortedTable.of(gone_R, initial)])
