"""A worker's part in checkpoints: all ranks meet at a step boundary, then rank 0 writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkeep.base.errors import ConfigError
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.probe import check_token, write_token
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.wire.admin import CheckFolder, Done
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.checkpoint.rank_state import rank_state
from shardkeep.workers.checkpoint.tower_state import tower_state
from shardkeep.workers.checkpoint.writer import CheckpointWriter, Contents
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import all_reduce_sum, broadcast_object, gather_arrays
from shardkeep.workers.config import CheckpointConfig
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.metrics.binned import BinnedScores


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Where and when the job's checkpoints are taken; lives as long as the process."""

    checkpoints: Checkpoints
    config: CheckpointConfig
    interval: CheckpointInterval
    facts: Callable[[int], dict[str, Any]]
    """What the manifest says about the job after a number of samples, as JSON types."""


@dataclass(kw_only=True)
class Checkpointer:
    """Takes checkpoints of the whole job in one generation, while training continues. Every rank makes the same calls.

    At a step boundary all ranks meet while rank 0 copies the tower and the servers take their snapshots. A thread of
    rank 0 then writes: one checkpoint at a time.
    """

    plan: CheckpointPlan
    client: RowClient
    tower: Tower
    collective: Collective
    facts: Callable[[], dict[str, Any]]
    """What the manifest says about the job; called at the step boundary."""
    scores: BinnedScores | None = None
    """Of progressive validation; None = there is none."""
    _writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        self._writer = CheckpointWriter(self.plan.checkpoints, self.plan.config, self.client.calls)

    def open(self, start_step: int) -> None:
        """Makes sure that the folder is this job's and that all servers and workers see it. Raises ConfigError (it
        holds later checkpoints than the step at which the job starts), CheckpointError or RemoteError."""
        self.plan.interval.enter(start_step, self.collective.rank)
        token = "" if self.collective.rank else self._sign(start_step)
        token = str(broadcast_object(self.collective, token, purpose="agreements"))
        if self.collective.rank:
            check_token(self.plan.checkpoints.folder, token)  # it reads its state there
        else:
            self._writer.find_base()

    def _sign(self, start_step: int) -> str:
        """Writes the token by which others know the folder."""
        checkpoints = self.plan.checkpoints
        newest = checkpoints.last_step()
        if newest > start_step:
            raise ConfigError(
                f"checkpoint.dir: {checkpoints.folder} holds step {newest} of another run, and this one starts "
                f"at step {start_step}; allowed: another folder, or --resume of that run"
            )
        token = write_token(checkpoints.folder)
        self.client.calls.ask(CheckFolder(token), Done)
        return token

    def reopen(self, start_step: int) -> bool:
        """Opens the folder in a generation that follows another. Returns whether its first step has a checkpoint."""
        self.plan.interval.enter(start_step, self.collective.rank)
        self.plan.interval.share(self.collective)
        if self.collective.rank == 0:
            self._writer.find_base()
        has = start_step in (step for step, _ in self.plan.checkpoints.complete())
        return bool(broadcast_object(self.collective, has, purpose="agreements"))

    def due(self, step: int, *, total_steps: int) -> bool:
        """Whether a checkpoint is taken when `step` steps are done. Called for every step; may block."""
        chosen = self.plan.interval.choose(step, self.collective)
        if chosen is not None and not self.collective.rank:
            more = (step // chosen + 1) * chosen < total_steps
            text = f"one every {chosen:,} steps from here on" if more else "a regular one after the last step only"
            self._writer.records.append({"step": step, "every_steps": chosen, "text": text})
        return self.plan.interval.ends(step)

    def begin(self, step: int) -> None:
        """Begins the checkpoint of `step` steps done. Blocks until every rank has called it, an earlier checkpoint is
        written, and the state of this step is copied; training may continue then."""
        waiting = time.perf_counter()
        self.wait_for_writer(self._leader_writes)
        waited_s = time.perf_counter() - waiting
        self.finish()
        began = time.perf_counter()  # a slower rank does not count from here on
        self.client.fence(step)
        # The others' pushes are applied, too, and nobody pushes before the next barrier.
        self.collective.barrier(purpose="agreements")
        ranks = gather_arrays(self.collective, rank_state(self.client, self.tower, self.scores), purpose="agreements")
        if self.collective.rank == 0:
            self._lead(step, ranks, began, waited_s)
        elif self.tower.shards is not None:
            tower_state(self.tower)  # rank 0 takes its parts
        self.collective.barrier(purpose="agreements")

    def _lead(self, step: int, ranks: list[Any], began: float, waited_s: float) -> None:
        try:
            state = tower_state(self.tower, self.plan.checkpoints.folder)
            contents = Contents(step, self.facts(), state, ranks)
        except Exception as error:  # any error of a model's state: the job is worth more than a checkpoint
            self._writer.give_up(step, error)
            return
        self._writer.begin(contents, began, waited_s)

    def finish(self, step: int | None = None) -> None:
        """Blocks until no rank writes a checkpoint any more. That of `step`, the last one, is tried again if it
        failed; None = steps follow."""
        self.wait_for_writer(self._leader_writes)  # its calls have deadlines
        if step is not None and not self.collective.rank:
            self._writer.again(step, self._leader_writes)
        while self._leader_writes(False):
            pass

    def _leader_writes(self, writes: bool = True) -> bool:
        """All ranks meet, and return what rank 0 says: it writes, however long, and another call follows; or not."""
        flag = torch.tensor([writes and not self.collective.rank], dtype=torch.uint8)
        all_reduce_sum(self.collective, flag, purpose="agreements")
        return bool(flag)

    def lacks(self, steps: int, best: int | None) -> str:
        """What rank 0 does not find on disk of the model after `steps` steps and the one of step `best`; "" = nothing.
        `best`: None = no other model is to be kept."""
        saved = {step for step, _ in self.plan.checkpoints.complete()}
        if steps and steps not in saved:
            return f"the model of step {steps:,} is not saved: {self._writer.failure or 'its checkpoint is gone'}"
        if best is not None and best not in saved:
            return f"the best model, of step {best:,}, is not saved"
        return ""

    def wait_for_writer(self, writes: Callable[[], object] = int) -> None:
        """Blocks until this rank's thread has ended. Needs no other rank. `writes`: as `CheckpointWriter.wait`."""
        self._writer.wait(writes)

    def leave(self) -> None:
        """Training ends early: a checkpoint under way may still become complete. Does not wait; idempotent."""
        self._writer.leave()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields rank 0's records for the user since the last call."""
        while self._writer.records:
            yield self._writer.records.popleft()
