"""A worker's part in checkpoints: all ranks meet at a step boundary, then rank 0 writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.ps.checkpoint_probe import check_token, write_token
from shardkeep.ps.checkpoints import Checkpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.checkpoint.interval import CheckpointInterval
from shardkeep.workers.checkpoint.rank_state import rank_state
from shardkeep.workers.checkpoint.tower_state import tower_state
from shardkeep.workers.checkpoint.writer import TIMEOUT_S, CheckpointWriter, Contents
from shardkeep.workers.collectives.collective import Collective
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


class Checkpointer:
    """Takes checkpoints of the whole job in one generation, while training continues. Every rank makes the same calls.

    At a step boundary all ranks meet while rank 0 copies the tower and the servers take their snapshots. A thread of
    rank 0 then writes: one checkpoint at a time.

    Args:
        samples: Returns the samples of the steps that are done; called at the step boundary.
        scores: Of progressive validation; None = there is none.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        *,
        client: RowClient,
        tower: Tower,
        collective: Collective,
        samples: Callable[[], int],
        scores: BinnedScores | None = None,
    ) -> None:
        self._checkpoints = plan.checkpoints
        self._interval = plan.interval
        self._facts = plan.facts
        self._client = client
        self._tower = tower
        self._collective = collective
        self._samples = samples
        self._scores = scores
        self._writer = CheckpointWriter(plan.checkpoints, plan.config, client.admin)

    def open(self, start_step: int) -> None:
        """Makes sure that the folder is this job's and that all servers and workers see it. Raises ConfigError (it
        holds later checkpoints than the step at which the job starts), CheckpointError or RemoteError."""
        self._interval.enter(start_step, self._collective.rank)
        token = "" if self._collective.rank else self._sign(start_step)
        token = str(self._collective.broadcast_object(token, purpose="agreements"))
        if self._collective.rank:
            check_token(self._checkpoints.folder, token)  # it reads its state there
        else:
            self._writer.find_base()

    def _sign(self, start_step: int) -> str:
        """Writes the token by which others know the folder."""
        newest = max((step for step, _ in self._checkpoints.complete()), default=0)
        if newest > start_step:
            raise ConfigError(
                f"checkpoint.dir: {self._checkpoints.folder} holds step {newest} of another run, and this one starts "
                f"at step {start_step}; allowed: another folder, or --resume of that run"
            )
        token = write_token(self._checkpoints.folder)
        self._client.admin.check_folder(token)
        return token

    def reopen(self, start_step: int) -> bool:
        """Opens the folder in a generation that follows another. Returns whether its first step has a checkpoint."""
        self._interval.enter(start_step, self._collective.rank)
        self._interval.share(self._collective)
        if self._collective.rank == 0:
            self._writer.find_base()
        has = start_step in (step for step, _ in self._checkpoints.complete())
        return bool(self._collective.broadcast_object(has, purpose="agreements"))

    def due(self, step: int, *, total_steps: int) -> bool:
        """Whether a checkpoint is taken when `step` steps are done. Called for every step; may block."""
        chosen = self._interval.choose(step, self._collective)
        if chosen is not None and not self._collective.rank:
            more = (step // chosen + 1) * chosen < total_steps
            text = f"one every {chosen:,} steps from here on" if more else "after the last step"
            self._writer.records.append({"step": step, "every_steps": chosen, "text": text})
        return self._interval.ends(step)

    def begin(self, step: int) -> None:
        """Begins the checkpoint of `step` steps done. Blocks until every rank has called it, an earlier checkpoint is
        written, and the state of this step is copied; training may continue then."""
        waiting = time.perf_counter()
        self.wait_for_writer()
        waited_s = time.perf_counter() - waiting
        self.finish()
        began = time.perf_counter()  # a slower rank does not count from here on
        self._client.fence(step)
        # The others' pushes are applied, too, and nobody pushes before the next barrier.
        self._collective.barrier(purpose="agreements")
        ranks = self._collective.gather_arrays(
            rank_state(self._client, self._tower, self._scores), purpose="agreements"
        )
        if self._collective.rank == 0:
            self._lead(step, ranks, began, waited_s)
        self._collective.barrier(purpose="agreements")

    def _lead(self, step: int, ranks: list[Any], began: float, waited_s: float) -> None:
        try:
            contents = Contents(step, self._facts(self._samples()), tower_state(self._tower), ranks)
            base = self._writer.take_snapshot(step)
        except Exception as error:  # any error of a model's state: the job is worth more than a checkpoint
            self._writer.give_up(step, error)
            return
        self._writer.start(contents, base, began, held_s=waited_s + time.perf_counter() - began)

    def finish(self) -> None:
        """Blocks until no rank writes a checkpoint any more."""
        self.wait_for_writer()  # its calls have deadlines
        self._collective.barrier(timeout_s=TIMEOUT_S + 60.0, purpose="agreements")

    def wait_for_writer(self) -> None:
        """Blocks until this rank's thread has ended. Needs no other rank."""
        self._writer.wait()

    def leave(self) -> None:
        """Training ends early: a checkpoint under way may still become complete. Does not wait; idempotent."""
        self._writer.leave()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields rank 0's records for the user since the last call."""
        while self._writer.records:
            yield self._writer.records.popleft()
