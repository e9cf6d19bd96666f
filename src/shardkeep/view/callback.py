"""What a callback of `train` receives: the protocol, and one event for each record of metrics.jsonl that it may see.

Calls nothing: `src/shardkeep/launch/callback_calls.py` does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig
from shardkeep.records import events
from shardkeep.records.training import Evaluation, Progress

if TYPE_CHECKING:
    from shardkeep.run.summary import Summary


@dataclass(frozen=True, slots=True)
class StartEvent:
    """The run folder exists. Training begins next."""

    config: JobConfig
    """The job, with every default."""
    run_dir: Path
    """The run folder, absolute."""
    step: int
    """Steps that were done before: 0, or the step of the checkpoint that the job resumes from."""
    samples: int
    """Samples of those steps."""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Training since the event before. There is one about every `train.report_every_s` seconds."""

    step: int
    """Steps that are done."""
    total_steps: int
    """Steps of the job. Early stopping may end it before."""
    epoch: int
    """Epoch of the last step, from 0."""
    samples: int
    """Samples of all steps that are done, over all workers."""
    loss: float
    """Mean training loss of worker 0 since the event before; nan = unknown."""
    samples_per_s: float
    """Samples per second of all workers since the event before."""
    step_ms: Mapping[str, float]
    """Mean milliseconds of a step of worker 0, `total` and by part."""
    dropped_rows: int
    """Row gradients of worker 0 that were not finite and not sent, in all."""
    skipped_steps: int
    """Steps without an update of the dense model, in all."""

    @classmethod
    def of(cls, record: Progress) -> ProgressEvent:
        """Returns the event of a record of progress."""
        return cls(
            step=record.step or 0,
            total_steps=record.total_steps or 0,
            epoch=record.epoch or 0,
            samples=record.samples or 0,
            loss=math.nan if record.loss is None else record.loss,
            samples_per_s=math.nan if record.samples_per_s is None else record.samples_per_s,
            step_ms=record.step_ms,
            dropped_rows=record.dropped_rows or 0,
            skipped_steps=record.skipped_steps or 0,
        )


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """An evaluation on the job's evaluation data."""

    step: int
    """Steps that were done before it."""
    metrics: Mapping[str, float]
    """Every metric that is a number, by name; with several labels METRIC/LABEL. An undefined metric is absent."""
    samples: int
    """Samples that were scored."""
    trained_samples: int
    """Samples that this start of the job has trained."""
    trained_bytes: Mapping[str, int]
    """Bytes of those samples over all workers: `push`, `pull`, `tower`. A worker that dies takes its count along."""
    note: str | None
    """Why a metric is undefined."""

    @property
    def bytes_per_sample(self) -> float:
        """Bytes on the wire for each trained sample of this start; nan = unknown."""
        return sum(self.trained_bytes.values()) / self.trained_samples if self.trained_samples > 0 else math.nan

    @classmethod
    def of(cls, record: Evaluation, *, samples_before: int) -> EvaluationEvent:
        """Returns the event of a record of an evaluation. `samples_before`: samples of earlier starts of the job."""
        note = record.others.get("note")
        return cls(
            step=record.step or 0,
            metrics=record.metrics | ({} if record.weights is None else {"weights": record.weights}),
            samples=record.samples or 0,
            trained_samples=max(0, (record.train_samples or 0) - samples_before),
            trained_bytes={name: size for name, size in record.train_bytes.items() if name != "total"},
            note=None if note is None else str(note),
        )


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A checkpoint that is complete. Pruning may delete it later (`checkpoint.keep`)."""

    step: int
    """Steps that it holds."""
    path: Path
    """Its folder, absolute."""
    size_bytes: int
    """Bytes of its files; of an increment, of the rows that changed."""
    seconds: float
    """Seconds from its step boundary until it was complete."""
    held_s: float
    """Seconds that training stood still for it."""

    @classmethod
    def of(cls, record: events.CheckpointEvent, path: Path) -> CheckpointEvent:
        """Returns the event of a record of a complete checkpoint."""
        return cls(
            step=record.step or 0,
            path=path,
            size_bytes=record.bytes or 0,
            seconds=math.nan if record.seconds is None else record.seconds,
            held_s=math.nan if record.held_s is None else record.held_s,
        )


class Callback(Protocol):
    """Follows a job: `train(config, callbacks=[...])`.

    Subclass it and write the methods that you need; the others do nothing. An object with all five methods works, too.
    A method whose name begins with `on_` and that is none of the five is refused.
    The methods run in the process and the thread that called `train`, never in a worker or server.

    An exception in a method stops the job like Ctrl-C, with a checkpoint where `checkpoint.every_steps` is set. The
    callback receives nothing more except `on_end`, and `train` raises the exception.
    """

    def on_start(self, event: StartEvent, /) -> None:
        """Called once, before the first step. If it raises, no step is trained, and the callback gets no `on_end`."""

    def on_progress(self, event: ProgressEvent, /) -> None:
        """Called with steps that grow: steps that a recovery repeats are not reported again."""

    def on_evaluation(self, event: EvaluationEvent, /) -> None:
        """Called once for each evaluated step."""

    def on_checkpoint(self, event: CheckpointEvent, /) -> None:
        """Called once for each step with a complete checkpoint."""

    def on_end(self, summary: Summary, /) -> None:
        """Called once, however the job ended: `summary.status` and `summary.message` tell. The run folder is free."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Returns the callbacks. Raises UserError if they are no sequence of callbacks, or one has a misspelt method."""
    allowed = "allowed: a list of objects of subclasses of shardkeep.Callback"
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UserError(f"callbacks: {type(callbacks).__name__} is no list; {allowed}")
    for callback in callbacks:
        if isinstance(callback, type):
            raise UserError(f"callbacks: {callback.__name__} is a class; write {callback.__name__}()")
        _refuse_unknown_methods(type(callback))
        missing = [name for name in METHODS if not callable(getattr(callback, name, None))]
        if missing:
            raise UserError(f"callbacks: {type(callback).__name__} has no method {missing[0]}; {allowed}")
    return tuple(callbacks)


def _refuse_unknown_methods(kind: type) -> None:
    """Raises UserError for a method `on_...` that nobody calls: it is misspelt."""
    names = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name, None))]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], METHODS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"callbacks: {kind.__name__}.{unknown[0]} is never called; {hint}allowed: {', '.join(METHODS)}")
