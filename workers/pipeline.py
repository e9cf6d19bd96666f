"""The steps to come of one worker: samples that another thread prepares, and pulls in flight."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardkeep.base.arrays import Rows
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import PullHandle, RowClient
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Dataset, ReadsAhead, empty_sample, gathered
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.prefetch import Prefetch
from shardkeep.workers.timing.clock import Stopwatch

if TYPE_CHECKING:
    from shardkeep.workers.retrieval.items import ItemSide, StepItems


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's samples of this rank, read, deduplicated and placed: all that needs no rows."""

    step: int
    batch: Batch
    plan: Plan
    request: Request
    rank_samples: int
    """Samples of this rank; 0 = `batch` holds one dummy sample without ids, which weighs nothing."""
    step_samples: int
    """Samples of all ranks."""
    items: StepItems | None = None
    """The candidates of a retrieval model, whose users `batch` has; None of any other."""


class InFlight(NamedTuple):
    """A step whose rows are on their way."""

    prepared: Prepared
    pull: PullHandle


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """Prepares steps ahead and keeps as many pulls in flight as the window allows."""

    dataset: Dataset
    """The training samples."""
    slices: StepSlices
    client: RowClient
    """Pulls and pushes."""
    embeddings: Embeddings
    """Deduplicates ids."""
    clock: Stopwatch
    """Measures the preparation, and the waits for data."""
    window: int
    """Pulls in flight, at most."""
    item_side: ItemSide | None = None
    """Draws the candidates of a retrieval model."""
    slow_start_s: float = 0.0
    """Seconds more that a call may take until the first push: a peer may compile its tower."""
    _ahead: Prefetch[Prepared] | None = field(default=None, init=False)
    _in_flight: deque[InFlight] = field(default_factory=deque, init=False)
    _pulls: tuple[PullHandle, ...] = field(default=(), init=False)  # of the running step
    _left: int = field(default=0, init=False)  # steps that are not pulled yet

    @contextlib.contextmanager
    def running(self, start: int, stop: int) -> Iterator[None]:
        """Prepares the steps from `start` to before `stop` in another thread, until the block ends."""
        self.client.calls.extend_deadlines(self.slow_start_s)
        ahead = Prefetch(partial(self._measured, start), start=start, stop=stop, depth=self.window + 1)
        self._ahead, self._left = ahead, stop - start
        self._in_flight.clear()
        try:
            yield
        finally:
            self._ahead, self._left = None, 0
            ahead.close()

    def prepare(self, step: int) -> Prepared:
        """Reads, deduplicates and places a step's samples. Touches neither servers nor tower."""
        rows_B = self.slices.rows(step, self.client.rank)
        batch = gathered(self.dataset, rows_B) if rows_B.size else empty_sample(self.dataset.schema)
        place, empty = (step, self.client.rank), not rows_B.size
        batch, plan, items = planned(self.embeddings, self.item_side, batch, place, empty=empty)
        request = self.client.request(plan.unique)
        return Prepared(step, batch, plan, request, int(rows_B.size), self.slices.samples(step), items)

    def next(self) -> InFlight:
        """Returns the next step. Pulls the steps that the window has room for; blocks while samples are prepared."""
        assert self._ahead is not None
        while self._left and len(self._in_flight) < self.window:
            self.clock.enter("data")
            prepared = self._ahead.next()
            self.clock.enter("pull_wait")
            self._add(prepared, self.client.pull(prepared.step, prepared.request))
        self._pulls = (self._in_flight[0].pull,)
        return self._in_flight.popleft()

    def push(
        self, step: int, request: Request, grads: Mapping[str, Rows], *, last: bool = False, lr_factor: float = 1.0
    ) -> None:
        """Pushes a step's gradients. The pull of a later step goes in the same call if the window has room and the
        step is prepared: waiting for data would delay the push, and with it other workers.

        `last`: the job's last step pushes the residuals too. `lr_factor`: as of `RowClient.push`."""
        room, ahead = bool(self._left) and len(self._in_flight) < self.window, self._ahead
        following = ahead.next() if room and ahead is not None and ahead.ready() else None
        if following is None:
            self.client.push(step, request, grads, pulls=self._pulls, last=last, lr_factor=lr_factor)
        else:
            later = following.step, following.request
            pull = self.client.exchange(step, request, grads, *later, pulls=self._pulls, lr_factor=lr_factor)
            self._add(following, pull)
        if self.slow_start_s:
            self.client.calls.extend_deadlines(0.0)
            self.slow_start_s = 0.0

    def _add(self, prepared: Prepared, pull: PullHandle) -> None:
        self._in_flight.append(InFlight(prepared, pull))
        self._left -= 1

    def _measured(self, start: int, step: int) -> Prepared:
        with self.clock.drawn("prepare"):
            if isinstance(self.dataset, ReadsAhead):
                for first, stop in self.slices.ahead(step, begins=step == start):
                    self.dataset.prefetch(first, stop)
            return self.prepare(step)


def planned(
    users: Embeddings, side: ItemSide | None, batch: Batch, place: tuple[int, int], *, empty: bool = False
) -> tuple[Batch, Plan, StepItems | None]:
    """The plan of a rank's samples, of a retrieval model together with that of their candidates, and what the model
    gets of the batch.

    Args:
        place: Step and rank.
        empty: The batch is an `empty_sample`."""
    if side is None:
        return batch, users.plan(batch), None
    return side.plan_empty(users, batch) if empty else side.plan(users, batch, *place)
