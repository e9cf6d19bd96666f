"""LoopMeter: counts the steps of a loop of the user's own, from its client's calls, and makes the loop's records.

It knows no ids and no rows. A loop without telemetry has none: its calls are bare.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shardkeep.base.arrays import Rows
from shardkeep.base.errors import UserError
from shardkeep.compression.ledger import Ledger
from shardkeep.config import JobConfig
from shardkeep.loop.calls import Around, Asks, Calls, Gradients
from shardkeep.loop.demands import IdsByTable
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings.bags import Bag, Pooled
from shardkeep.workers.embeddings.lookup import Lookup
from shardkeep.workers.figures import Record, WorkerFigures, worker_record
from shardkeep.workers.report import Progress, Report
from shardkeep.workers.step import StepResult
from shardkeep.workers.step_counts import StepCounts
from shardkeep.workers.telemetry import Telemetry
from shardkeep.workers.timing.clock import Stopwatch

NOT_METRICS = ("step", "samples", "train_samples", "kind", "role", "index", "time", "seq")
"""Keys of a record of an evaluation that have another meaning."""
B = TypeVar("B")
L = TypeVar("L")


class LoopMeter:
    """Meters one client.

    A step begins with the end of the step before, or with the first call for rows. It ends with `apply`. Reads between
    two steps are an evaluation: they, and the time until the next call for rows, belong to no step. The same holds for
    checkpoints.

    Args:
        rows: The client's.
        ledger: Counts its bytes.
        config: Of the job; its telemetry is on.
        progress: Takes the records.
        samples: Of the steps before the first one here.
        generation: Returns the generation that the client is in.
        metrics: The address of the process's metrics.
    """

    def __init__(
        self,
        rows: RowClient,
        ledger: Ledger,
        config: JobConfig,
        progress: Progress,
        *,
        samples: int,
        generation: Callable[[], int],
        metrics: str | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rows = rows
        self._trainers = config.workers
        self._watch = Stopwatch(clock)
        self._step = _OpenStep()
        self._between = contextlib.ExitStack()  # holds the time that belongs to no step
        self._paused = False
        self._pause()
        counts = StepCounts(self._watch)
        self._telemetry = Telemetry(self._watch, counts=counts)
        self.begin(samples)
        self.figures = WorkerFigures(
            rows,
            self._telemetry,
            counts,
            ledger,
            step=lambda: rows.pushes.next_step,
            generation=generation,
            sums=None,
            metrics=metrics,
        )
        self._records = TelemetryRecords(
            config.telemetry_s, figures=self.figures.figures, record=loop_record, report=progress.report
        )
        self._report = Report(
            progress, rows, self._telemetry, every_s=config.train.report_every_s, records=[self._records]
        )

    @property
    def samples(self) -> int:
        """Samples of all steps so far, over all trainers; 0 = the loop reports none."""
        return self._telemetry.samples

    def begin(self, samples: int) -> None:
        """The first step follows those of so many samples."""
        self._telemetry.enter(samples)

    def around(self, calls: Calls) -> Calls:
        """The calls with this meter around them."""
        return Calls(
            demands=_CountedDemands(calls.demands, self),
            gradients=partial(self._gradients, calls.gradients),
            waiting=partial(self._waiting, calls.waiting),
            pushing=partial(self._pushing, calls.pushing),
            reading=partial(self._reading, calls.reading),
            apart=partial(self._apart, calls.apart),
            batches=self._batches,
        )

    def report(self, *, loss: float | None, samples: int) -> None:
        """Counts what the loop says of a step: its loss, and the samples of this trainer."""
        self._telemetry.reported(loss=loss, samples=samples * self._trainers)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports the loop's own metrics after `step` steps."""
        trained = {"train_samples": self.samples} if self.samples else {}
        self._report.evaluation(step, dict(metrics), trained)

    def summary(self) -> Record:
        """What the job's summary says of the steps that were done here."""
        if not self._step.count:
            return {}
        speed = {"samples": self.samples, "samples_per_s": round(self._telemetry.samples_per_s(), 3)}
        last = self._report.last_evaluation
        scores = {} if last is None else {"eval": last}
        figures = self.figures.figures()
        sent = {"bytes": {**figures["bytes"], "fp32": figures["fp32_bytes"]}}
        return (speed if self.samples else {}) | {"step_ms": self._telemetry.step_ms()} | scores | sent

    def end(self) -> None:
        """Sends the last records: no step follows."""
        self._resume()
        self._report.loop_ended(self._rows.pushes.next_step)

    def requested(self, request: Request, ids: Iterable[Any]) -> None:
        """Counts the ids of a request for a step. `ids`: tensors and arrays."""
        self._step.ids += sum(each.numel() if hasattr(each, "numel") else each.size for each in ids)
        self._step.unique_ids += request.ids.ids_V.size

    @contextlib.contextmanager
    def looking_up(self) -> Iterator[None]:
        """Is around work for a lookup."""
        self._resume()
        with self._watch.within("lookup"):
            yield

    def in_step(self) -> None:
        """A step has its rows."""
        self._step.has_rows = True

    @contextlib.contextmanager
    def _waiting(self, inner: Around) -> Iterator[None]:
        self._resume()
        with self._watch.within("pull_wait"), inner():
            yield

    @contextlib.contextmanager
    def _reading(self, inner: Around) -> Iterator[None]:
        if self._step.has_rows:
            with self._watch.within("pull_wait"), inner():
                yield
            return
        self._pause()
        with inner():
            yield

    @contextlib.contextmanager
    def _apart(self, inner: Around) -> Iterator[None]:
        paused = self._paused
        self._pause()
        with inner():
            yield
        if not paused:
            self._resume()

    def _gradients(
        self, inner: Gradients, rows: RowClient, step: int, lookups: Sequence[Lookup], scale: float
    ) -> tuple[Request, Mapping[str, Rows], int]:
        self._resume()
        with self._watch.within("collect"):
            found = inner(rows, step, lookups, scale)
        self._step.dropped_rows = found[2]
        return found

    @contextlib.contextmanager
    def _pushing(self, inner: Around) -> Iterator[None]:
        with self._watch.within("push"), inner():
            yield
        step = self._step
        self._step = _OpenStep(step.count + 1)
        result = StepResult(None, True, step.dropped_rows, 0, step.ids, step.unique_ids)
        self._telemetry.step_done(0, result)
        self._report.loop_step_done(self._rows.pushes.next_step)

    def _batches(self, batches: Iterable[B]) -> Iterator[B]:
        """Yields the batches, and times the wait for each."""
        waiting = iter(batches)
        while True:
            self._resume()
            try:
                with self._watch.within("data"):
                    batch = next(waiting)
            except StopIteration:
                return
            yield batch

    def _pause(self) -> None:
        if not self._paused:
            self._between.enter_context(self._watch.excluded())
            self._paused = True

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._between.close()
            self._watch.enter("other")


@dataclass(slots=True)
class _OpenStep:
    """The step under way. `count`: steps before it."""

    count: int = 0
    has_rows: bool = False
    ids: int = 0
    unique_ids: int = 0
    dropped_rows: int = 0


class _CountedDemands:
    """Demands whose ids and time a meter counts, except those of `read`."""

    def __init__(self, demands: Asks, meter: LoopMeter) -> None:
        self._demands, self._meter = demands, meter

    def of(
        self, call: str, owner: object, ids: IdsByTable | Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Lookup]]:
        """As `Demands.of`."""
        return self._counted(call, ids, lambda: self._demands.of(call, owner, ids))

    def of_bags(
        self, call: str, owner: object, bags: Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Pooled]]:
        """As `Demands.of_bags`."""
        return self._counted(call, bags, lambda: self._demands.of_bags(call, owner, bags))

    def _counted(
        self, call: str, ids: Mapping[str, Any], ask: Callable[[], tuple[Request, Callable[[Pull, JaggedRows], L]]]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], L]]:
        if call == "read":
            return ask()
        meter = self._meter
        with meter.looking_up():
            request, made = ask()
        meter.requested(request, (each.values if isinstance(each, Bag) else each for each in ids.values()))

        def timed(pull: Pull, rows: JaggedRows) -> L:
            meter.in_step()
            with meter.looking_up():
                return made(pull, rows)

        return request, timed


def loop_record(now: Record, last: Record) -> Record:
    """The telemetry record of a loop's trainer. Without samples, where the loop reports none."""
    record = worker_record(now, last)
    if not now["samples"]:
        del record["samples"], record["samples_per_s"]
    return record


def checked_report(loss: Any, samples: Any, scores: Any) -> tuple[float | None, int, dict[str, float]]:
    """What a loop reports, as numbers. Raises UserError."""
    number = None if loss is None else _number("loss", loss)
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
        raise UserError(f"report: samples is {samples!r}; allowed: a whole number, 0 or more")
    if scores is not None and not isinstance(scores, Mapping):
        raise UserError(f"report: eval is a {type(scores).__name__}; allowed: a dict of metric name to number")
    for name in scores or ():
        if not isinstance(name, str) or name in NOT_METRICS:
            raise UserError(f"report: a metric is named {name!r}; allowed: any name except {', '.join(NOT_METRICS)}")
    return number, samples or 0, {name: _number(name, score) for name, score in (scores or {}).items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"report: {name} is {str(value)[:60]!r}; allowed: a number, or a tensor with one") from error
