"""The steps to come of one worker: samples that another thread prepares, and pulls in flight."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardkeep.base.arrays import Rows
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.prefetch import Prefetch
from shardkeep.workers.timing.clock import Stopwatch


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


class InFlight(NamedTuple):
    """A step whose rows are on their way."""

    prepared: Prepared
    pull: Pull


class Pipeline:
    """Prepares steps ahead and keeps as many pulls in flight as the window allows.

    Args:
        dataset: The training samples.
        slices: Which samples a step and rank have.
        client: Pulls and pushes.
        embeddings: Deduplicates ids.
        rank: This worker's.
        clock: Measures the preparation, and the waits for data.
        window: Pulls in flight, at most.
        slow_start_s: Seconds more that a call may take until the first push: a peer may compile its tower.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        slices: StepSlices,
        client: RowClient,
        embeddings: Embeddings,
        rank: int,
        clock: Stopwatch,
        window: int,
        slow_start_s: float = 0.0,
    ) -> None:
        self.slices = slices
        self._dataset = dataset
        self._client = client
        self._embeddings = embeddings
        self._rank = rank
        self._clock = clock
        self._window = window
        self._slow_start_s = slow_start_s
        self._ahead: Prefetch[Prepared] | None = None
        self._in_flight: deque[InFlight] = deque()
        self._pulls: tuple[Pull, ...] = ()  # of the running step
        self._left = 0  # steps that are not pulled yet

    @contextlib.contextmanager
    def running(self, start: int, stop: int) -> Iterator[None]:
        """Prepares the steps from `start` to before `stop` in another thread, until the block ends."""
        self._client.calls.extend_deadlines(self._slow_start_s)
        ahead = Prefetch(self._measured, start=start, stop=stop, depth=self._window + 1)
        self._ahead, self._left = ahead, stop - start
        self._in_flight.clear()
        try:
            yield
        finally:
            self._ahead, self._left = None, 0
            ahead.close()

    def prepare(self, step: int) -> Prepared:
        """Reads, deduplicates and places a step's samples. Touches neither servers nor tower."""
        rows_B = self.slices.rows(step, self._rank)
        batch = gathered(self._dataset, rows_B) if rows_B.size else self._dummy()
        plan = self._embeddings.plan(batch)
        request = self._client.request(plan.unique)
        return Prepared(step, batch, plan, request, int(rows_B.size), self.slices.samples(step))

    def next(self) -> InFlight:
        """Returns the next step. Pulls the steps that the window has room for; blocks while samples are prepared."""
        assert self._ahead is not None
        while self._left and len(self._in_flight) < self._window:
            self._clock.enter("data")
            prepared = self._ahead.next()
            self._clock.enter("pull_wait")
            self._add(prepared, self._client.pull(prepared.step, prepared.request))
        self._pulls = (self._in_flight[0].pull,)
        return self._in_flight.popleft()

    def push(
        self, step: int, request: Request, grads: Mapping[str, Rows], *, last: bool = False, lr_factor: float = 1.0
    ) -> None:
        """Pushes a step's gradients. The pull of a later step goes in the same call if the window has room and the
        step is prepared: waiting for data would delay the push, and with it other workers.

        `last`: the job's last step pushes the residuals too. `lr_factor`: as of `RowClient.push`."""
        following = self._ahead.next() if self._ahead is not None and self._may_pull(self._ahead) else None
        if following is None:
            self._client.push(step, request, grads, pulls=self._pulls, last=last, lr_factor=lr_factor)
        else:
            later = following.step, following.request
            pull = self._client.exchange(step, request, grads, *later, pulls=self._pulls, lr_factor=lr_factor)
            self._add(following, pull)
        if self._slow_start_s:
            self._client.calls.extend_deadlines(0.0)
            self._slow_start_s = 0.0

    def _may_pull(self, ahead: Prefetch[Prepared]) -> bool:
        return bool(self._left) and len(self._in_flight) < self._window and ahead.ready()

    def _add(self, prepared: Prepared, pull: Pull) -> None:
        self._in_flight.append(InFlight(prepared, pull))
        self._left -= 1

    def _measured(self, step: int) -> Prepared:
        with self._clock.drawn("prepare"):
            return self.prepare(step)

    def _dummy(self) -> Batch:
        """Returns one sample without ids for a rank that has none in this step: the reduction needs every rank."""
        schema = self._dataset.schema
        empty = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32))
        weighted = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32), np.empty(0, np.float32))
        ids = {f.name: weighted if f.pooling == "weighted" else empty for f in schema.features}
        return Batch(np.zeros((1, schema.num_dense), np.float32), ids, np.zeros((1, len(schema.labels)), np.float32))
