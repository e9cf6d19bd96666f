"""TensorBoard: a job's progress and evaluations as event files. Tried with tensorboard 2.21."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.files import local
from shardkeep.base.logs.log import EventLog
from shardkeep.run.summary import Summary
from shardkeep.view.callback import Callback, EvaluationEvent, ProgressEvent, StartEvent

try:
    from torch.utils.tensorboard.writer import SummaryWriter
except ImportError as error:
    raise MissingPackage("shardkeep.callbacks.tensorboard needs tensorboard: pip install tensorboard") from error

_log = EventLog("callbacks")
FOLDER = "tensorboard"
"""Of the event files, in the run folder."""


class TensorBoardCallback(Callback):
    """Writes the scalars of a job at their steps, and its config as text.

        train("job.yaml", callbacks=[TensorBoardCallback()])

    Tags: `train/loss`, `train/samples_per_s`, `train/bytes_per_sample`, `eval/METRIC`, `test/METRIC`, `config`. After
    a resume into the same folder, TensorBoard hides the points of steps that are trained again. On a full disk the job
    continues without them.

    Args:
        folder: For the event files; None = `tensorboard` in the run folder.
        flush_s: Seconds until a point is on disk, at most.
    """

    def __init__(self, folder: str | Path | None = None, *, flush_s: int = 10) -> None:
        self._folder, self._flush_s = folder, flush_s
        self._writer: SummaryWriter | None = None

    def on_start(self, event: StartEvent, /) -> None:
        folder = event.run_dir / FOLDER if self._folder is None else Path(local(self._folder))
        purge_step = event.step + 1 if event.step else None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=self._flush_s)
        except OSError as error:
            raise UserError(f"TensorBoardCallback: {folder} cannot be written ({error.strerror or error})") from error
        text = f"```yaml\n{event.config.to_yaml()}\n```"
        self._write(lambda writer: writer.add_text("config", text, event.step))

    def on_progress(self, event: ProgressEvent, /) -> None:
        self._add("train", {"loss": event.loss, "samples_per_s": event.samples_per_s}, event.step)

    def on_evaluation(self, event: EvaluationEvent, /) -> None:
        self._add("eval", event.metrics, event.step)
        self._add("train", {"bytes_per_sample": event.bytes_per_sample}, event.step)

    def on_end(self, summary: Summary, /) -> None:
        if summary.test is not None:
            metrics = summary.test.model_dump(exclude={"step", "samples", "calibration_buckets"})
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self._add("test", numbers, summary.test.step)
        self._write(lambda writer: writer.close())
        self._writer = None

    def _add(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Writes one point for each value that is known."""

        def add(writer: SummaryWriter) -> None:
            for name, value in values.items():
                if math.isfinite(value):
                    writer.add_scalar(f"{group}/{name}", value, step)

        self._write(add)

    def _write(self, write: Callable[[SummaryWriter], None]) -> None:
        """Gives up the event files, not the job, where they cannot be written."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            folder, self._writer = self._writer.log_dir, None
            _log.warning(f"{folder}: not written ({error.strerror or error}); the job continues without")
