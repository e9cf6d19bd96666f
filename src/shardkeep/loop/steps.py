"""LoopSteps: the pulls and the push of each step of a loop. Rows of later steps are requested while a step trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from shardkeep.base.errors import UserError
from shardkeep.base.logs.log import EventLog
from shardkeep.loop.demands import Demand, Demands, IdsOrBags, Made
from shardkeep.loop.gradients import gradients_of
from shardkeep.loop.metering import Meter
from shardkeep.loop.verdict import Verdict
from shardkeep.ps.client.push import Grads, PullHandles
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import PullHandle, RowClient
from shardkeep.workers.embeddings.loop_lookup import Lookup, check_lookups

B = TypeVar("B")
L = TypeVar("L")

_log = EventLog("custom")


class Pending(Generic[L]):
    """Rows of a later step, which are on their way."""

    def __init__(self, step: int, request: Request, rows_of: Callable[[PullHandle], L]) -> None:
        self.step = step
        """The step that the rows are of."""
        self.request = request
        self._rows_of = rows_of
        self.pull: PullHandle | None = None
        """None = not sent yet."""

    def result(self) -> L:
        """The lookup. Blocks until its rows are there.

        Raises UserError where they cannot come before an earlier step is applied, and what `lookup` raises."""
        if self.pull is None:
            raise UserError(f"prefetch: the rows of step {self.step} cannot come yet; apply the steps before it first")
        return self._rows_of(self.pull)


class LoopSteps:
    """The running step, and the lookups of later ones. They are sent in the order of their steps, as early as the
    consistency mode allows. Arguments and errors of the methods: see `EmbeddingClient`.

    Args:
        owner: The client, which its lookups hold.
        meter: Counts the steps.
        verdict: Is around the calls to the servers.
        step: The first step.
    """

    def __init__(self, owner: object, rows: RowClient, meter: Meter, verdict: Verdict, step: int) -> None:
        self.step = step
        """The running step: number of steps done."""
        self.dropped_rows = 0
        self._owner, self._rows, self._demands = owner, rows, Demands(rows)
        self._meter, self._verdict = meter, verdict
        self._applied: Sequence[Lookup] = ()
        self._waiting: list[Pending[Lookup]] = []
        self._next = 0

    @property
    def begun(self) -> bool:
        """Whether a step was done, or a lookup was requested ahead."""
        return self.step > 0 or self._next > 0

    def lookup(self, call: str, ids: IdsOrBags) -> Lookup:
        """Rows for the running step. Without gradients they are as those of `read`."""
        request, made = self._ask(call, ids)
        with self._verdict, self._meter.part("pull_wait"):
            if not torch.is_grad_enabled():
                self._rows.fence(self.step)
            pull = self._rows.pull(self.step, request, for_push=torch.is_grad_enabled())
        return self._lookup_of(pull, made)

    def prefetch(self, ids: IdsOrBags, step: int | None) -> Pending[Lookup]:
        """Requests the rows of a step; None = the first one, from the running one on, that has no prefetch yet."""
        request, made = self._ask("prefetch", ids)
        with self._verdict, self._meter.part("pull_wait"):
            step = max(self._next, self.step) if step is None else step
            self._next = max(self._next, step + 1)
            pending = Pending(step, request, lambda pull: self._lookup_of(pull, made))
            self._waiting.append(pending)
            self._pull(self._due(self.step))
        return pending

    def _ask(self, call: str, ids: IdsOrBags) -> Demand:
        with self._meter.part("lookup"):
            request, made = self._demands.of(call, self._owner, ids)
        self._meter.asked(ids, request)
        return request, made

    def _lookup_of(self, pull: PullHandle, made: Made) -> Lookup:
        """Waits for rows of the running step."""
        with self._verdict, self._meter.part("pull_wait"):
            rows = pull.result()
        self._meter.rows_there()
        with self._meter.part("lookup"):
            return made(pull, rows)

    def ahead(
        self, batches: Iterable[B], prefetch: Callable[[B], Pending[Lookup]], *, depth: int
    ) -> Iterator[tuple[B, Lookup]]:
        """Yields each batch with its rows. `prefetch`: requests those of a batch."""
        if depth < 1:
            raise UserError(f"ahead: depth {depth}; allowed: 1 or more")
        return self._with_rows(self._meter.batches(batches), prefetch, depth)

    def _with_rows(
        self, batches: Iterable[B], prefetch: Callable[[B], Pending[Lookup]], depth: int
    ) -> Iterator[tuple[B, Lookup]]:
        waiting: deque[tuple[B, Pending[Lookup]]] = deque()

        def first() -> tuple[B, Lookup]:
            batch, pending = waiting.popleft()
            if pending.step != self.step:
                why = "call apply for every batch, without rows to skip it"
                raise UserError(f"ahead: step {self.step} was not ended; {why}")
            return batch, pending.result()

        try:
            for batch in batches:
                waiting.append((batch, prefetch(batch)))
                if len(waiting) > depth:
                    yield first()
            while waiting:
                yield first()
        finally:  # the loop will not use the others
            self._waiting.clear()
            self._next = self.step

    def read(self, ids: IdsOrBags, *, fresh: bool) -> dict[str, torch.Tensor]:
        """Rows without gradients."""
        request, made = self._demands.of("read", self._owner, ids)
        with self._verdict, self._meter.reading(), torch.no_grad():
            if fresh:
                self._rows.fence(self.step)
            pull = self._rows.read(request)
            return {name: found.detach() for name, found in made(pull, pull.result()).items()}

    def apply(self, lookups: Sequence[Lookup], *, scale: float, lr_factor: float) -> None:
        """Pushes the gradients of the running step, and begins the next one."""
        check_lookups(lookups, owner=self._owner, step=self.step, applied=self._applied)
        with self._meter.part("collect"):
            request, grads, dropped = gradients_of(self._rows, self.step, lookups, scale)
        if dropped:
            self.dropped_rows += dropped
            _log.warning("rows with non-finite gradients are not sent", step=self.step, once="non-finite")
        with self._verdict, self._meter.part("push"):
            self._push(request, grads, [lookup.pull for lookup in lookups], lr_factor)
        self._meter.pushed(dropped)
        self._applied = lookups
        self.step += 1

    def _push(self, request: Request, grads: Grads, pulls: PullHandles, lr_factor: float) -> None:
        """Ends the step by its push, with the pull of a later step in the same call where one may go. A loop that has
        requested the next step's rows requests those after it at once, so the push waits for that call."""
        due = self._due(self.step + 1)
        if not due:
            rides = self._rows.pushes.window > 1 and self._next > self.step + 1
            self._rows.push(self.step, request, grads, pulls=pulls, lr_factor=lr_factor, rides=rides)
            return
        following = due[0].step, due[0].request
        due[0].pull = self._rows.exchange(self.step, request, grads, *following, pulls=pulls, lr_factor=lr_factor)
        self._pull(due[1:])

    def _pull(self, due: Sequence[Pending[Lookup]]) -> None:
        for pending in due:
            pending.pull = self._rows.pull(pending.step, pending.request)

    def _due(self, step: int) -> list[Pending[Lookup]]:
        """Takes the lookups whose pulls may go while `step` runs, in the order of their steps."""
        end = step + self._rows.pushes.window
        due = [pending for pending in self._waiting if step <= pending.step < end]
        self._waiting = [pending for pending in self._waiting if pending.step >= end]
        return sorted(due, key=lambda pending: pending.step)
