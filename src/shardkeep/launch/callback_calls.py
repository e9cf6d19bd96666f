"""CallbackCalls: calls the user's callbacks for the records of one job, in the thread that called `train`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardkeep.base.errors import JobStopped
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.records import events
from shardkeep.records.record import Record
from shardkeep.records.training import Evaluation, Progress
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.folder import RunFolder
from shardkeep.view.callback import Callback, CheckpointEvent, EvaluationEvent, ProgressEvent, StartEvent

NOTICE = "stopping after a callback; press Ctrl-C again to end it at once"


class CallbackCalls:
    """The callbacks of one call of `train`, in their order.

    Args:
        say: Shows one line.
    """

    def __init__(self, callbacks: Sequence[Callback], interrupts: Interrupts, say: Callable[[str], None]) -> None:
        self._callbacks, self._interrupts, self._say = callbacks, interrupts, say
        self._started: list[Callback] = []
        self._failed: list[Callback] = []
        self._error: BaseException | None = None
        """The first error of a callback. It stops the job, and `ending` raises it."""
        self._cut_off = False
        """Whether a Ctrl-C has interrupted a callback: none is called until the end."""
        self._samples_before = 0
        self._checkpoints: Checkpoints | None = None
        self._last: dict[type, int] = {}
        """The last step that was reported, by class of event: a recovery repeats steps."""

    def start(self, event: StartEvent) -> None:
        """Calls `on_start`, unless the job starts another time (`shardkeep scale`). Raises JobStopped if one raises."""
        if self._checkpoints is not None:
            return
        self._checkpoints, self._samples_before = checkpoints_of(event.config, event.run_dir), event.samples
        try:
            for callback in self._callbacks:
                self._call(callback, "on_start", event)
                if self._error is not None or self._cut_off:
                    raise KeyboardInterrupt
                self._started.append(callback)
        except KeyboardInterrupt:
            raise JobStopped(f"stopped before the first step: {self._interrupts.reason or 'Ctrl-C'}") from None

    def record(self, record: Record) -> None:
        """Calls the method of one record of metrics.jsonl, if there is one for it and its step is new."""
        event = None if self._cut_off or record.index != 0 else self._event(record)
        if event is None or event[1].step <= self._last.get(type(event[1]), -1):
            return
        method, payload = event
        self._last[type(payload)] = payload.step
        for callback in self._started:
            if callback not in self._failed:
                self._call(callback, method, payload)

    @contextlib.contextmanager
    def ending(self, folder: RunFolder) -> Iterator[None]:
        """Calls `on_end` after the job, if it has started. Raises the first error of a callback once the job has
        stopped or is completed. An error of the job itself comes before it."""
        try:
            yield
        except BaseException as error:
            cause = self._error
            self._end(folder, error)
            if cause is not None and isinstance(error, JobStopped):
                raise cause from None
            raise
        self._end(folder, None)
        if self._error is not None:
            raise self._error

    def _end(self, folder: RunFolder, error: BaseException | None) -> None:
        if not self._started:
            return
        from shardkeep.launch.trained_run import TrainedRun

        known = folder.summary() or {"status": "failed", "message": str(error)}
        summary = TrainedRun.model_validate({**known, "run_dir": str(folder.path)})
        self._interrupts.tolerated = 0  # the job is over: Ctrl-C ends only callbacks
        for callback in self._started:
            self._call(callback, "on_end", summary)

    def _event(self, record: Record) -> tuple[str, ProgressEvent | EvaluationEvent | CheckpointEvent] | None:
        """The method that a record belongs to, and its argument."""
        if isinstance(record, Progress):
            return "on_progress", ProgressEvent.of(record)
        if isinstance(record, Evaluation):
            return "on_evaluation", EvaluationEvent.of(record, samples_before=self._samples_before)
        if isinstance(record, events.CheckpointEvent) and record.bytes is not None:
            return "on_checkpoint", CheckpointEvent.of(record, self._path(record.step or 0))
        return None

    def _path(self, step: int) -> Path:
        assert self._checkpoints is not None
        return self._checkpoints.folder_of(step)

    def _call(self, callback: Callback, method: str, argument: Any) -> None:
        """Calls one method. Keeps the first error and stops the job; raises only a KeyboardInterrupt that ends the job
        at once."""
        try:
            with self._interrupts.breakable(NOTICE):
                getattr(callback, method)(argument)
        except KeyboardInterrupt as error:
            if self._interrupts.exhausted:
                raise
            self._cut_off = True
            if not self._interrupts.count:  # the callback raised it itself
                self._fail(callback, method, error)
        except BaseException as error:
            self._fail(callback, method, error)

    def _fail(self, callback: Callback, method: str, error: BaseException) -> None:
        self._failed.append(callback)
        self._error = self._error or error
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        reason = f"{type(callback).__name__}.{method} raised {what}"
        self._say(f"{reason}{'' if method == 'on_end' else '; the job stops'}")
        self._interrupts.request(reason)
