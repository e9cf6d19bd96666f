"""StepMeter: counts the steps of a loop of the user's own, and makes the loop's records. It knows no ids and no rows.

`LoopSteps` reports the parts of a step to it, each request for rows, their arrival, and the push. A loop without
telemetry has a `NoMeter`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardkeep.base.errors import UserError
from shardkeep.compression.ledger import Ledger
from shardkeep.config import JobConfig
from shardkeep.loop.demands import IdsOrBags
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.control.telemetry import TelemetryRecords
from shardkeep.workers.embeddings.bags import Bag, KeyedBags
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.figures import Record, WorkerFigures, worker_record
from shardkeep.workers.reporting.report import ProgressSink, Report
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import Part, Stopwatch

NOT_METRICS = ("step", "samples", "train_samples", "kind", "role", "index", "time", "seq")
"""Keys of a record of an evaluation that have another meaning."""
B = TypeVar("B")
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class NoMeter:
    """A `StepMeter` that counts nothing; see there."""

    samples = 0

    def begin(self, samples: int) -> None:
        pass

    def part(self, _part: Part) -> AbstractContextManager[None]:
        return _NOTHING

    def asked(self, ids: IdsOrBags, request: Request) -> None:
        pass

    def rows_there(self) -> None:
        pass

    def pushed(self, dropped_rows: int) -> None:
        pass

    def reading(self) -> AbstractContextManager[None]:
        return _NOTHING

    def apart(self) -> AbstractContextManager[None]:
        return _NOTHING

    def batches(self, batches: Iterable[B]) -> Iterable[B]:
        return batches

    def report(self, step: int, loss: float | None, samples: int, metrics: Mapping[str, float]) -> None:
        pass

    def end(self) -> Record:
        return {}


class StepMeter:
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
        progress: ProgressSink,
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
        self._counters = StepCounters(self._watch)
        self.begin(samples)
        self.figures = WorkerFigures(
            rows,
            self._counters,
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
            progress, rows, self._counters, every_s=config.train.report_every_s, records=[self._records]
        )

    @property
    def samples(self) -> int:
        """Samples of all steps so far, over all trainers; 0 = the loop reports none."""
        return self._counters.samples

    def begin(self, samples: int) -> None:
        """The first step follows those of so many samples."""
        self._counters.enter(samples)

    def part(self, part: Part) -> AbstractContextManager[None]:
        """Counts the inside as this part of the step."""
        self._resume()
        return self._watch.within(part)

    def asked(self, ids: IdsOrBags, request: Request) -> None:
        """Counts the ids of a request for rows of a step."""
        each_feature = [ids] if isinstance(ids, KeyedBags) else ids.values()
        given = (each.values if isinstance(each, Bag | KeyedBags) else each for each in each_feature)
        self._step.ids += sum(each.numel() if hasattr(each, "numel") else each.size for each in given)
        self._step.unique_ids += request.ids.ids_V.size

    def rows_there(self) -> None:
        """Rows of the running step have arrived: reads from now on are a part of it."""
        self._step.has_rows = True

    def pushed(self, dropped_rows: int) -> None:
        """Ends the running step, and begins the next one."""
        step = self._step
        self._step = _OpenStep(step.count + 1)
        self._counters.step_done(0, StepResult(None, True, dropped_rows, 0, step.ids, step.unique_ids))
        self._report.loop_steps(self._rows.pushes.next_step)

    def reading(self) -> AbstractContextManager[None]:
        """Is around a read. Between two steps it belongs to none."""
        if self._step.has_rows:
            return self._watch.within("pull_wait")
        self._pause()
        return _NOTHING

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Is around what belongs to no step, such as a checkpoint."""
        paused = self._paused
        self._pause()
        yield
        if not paused:
            self._resume()

    def batches(self, batches: Iterable[B]) -> Iterator[B]:
        """Yields the batches, and times the wait for each."""
        waiting = iter(batches)
        while True:
            try:
                with self.part("data"):
                    batch = next(waiting)
            except StopIteration:
                return
            yield batch

    def report(self, step: int, loss: float | None, samples: int, metrics: Mapping[str, float]) -> None:
        """Counts what the loop says of a step: its loss, and the samples of this trainer. Reports an evaluation's
        metrics after `step` steps, of trainer 0."""
        self._counters.reported(loss=loss, samples=samples * self._trainers)
        if metrics and not self._rows.rank:
            trained = {"train_samples": self.samples} if self.samples else {}
            self._report.evaluation(step, dict(metrics), trained)

    def end(self) -> Record:
        """Sends the last records: no step follows. Returns what the job's summary says of the steps."""
        self._resume()
        self._report.loop_steps(self._rows.pushes.next_step, ended=True)
        if not self._step.count:
            return {}
        speed = {"samples": self.samples, "samples_per_s": round(self._counters.samples_per_s(), 3)}
        last = self._report.last_evaluation
        scores = {} if last is None else {"eval": last}
        figures = self.figures.figures()
        sent = {"bytes": {**figures["bytes"], "fp32": figures["fp32_bytes"]}}
        return (speed if self.samples else {}) | {"step_ms": self._counters.step_ms()} | scores | sent

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


Meter = StepMeter | NoMeter


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
