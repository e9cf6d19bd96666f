"""TensorBoard: a job's progress and evaluations as event files. Tried with tensorboard 2.21."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.run.callback import Callback, EvaluationEvent, ProgressEvent, StartEvent
from shardkeep.run.summary import Summary

try:
    from torch.utils.tensorboard.writer import SummaryWriter
except ImportError as error:
    raise UserError("shardkeep.callbacks.tensorboard: needs the package tensorboard, which is not installed") from error

FOLDER = "tensorboard"
"""Of the event files, in the run folder."""


class TensorBoardCallback(Callback):
    """Writes the scalars of a job at their steps, and its config as text.

        train("job.yaml", callbacks=[TensorBoardCallback()])

    Tags: `train/loss`, `train/samples_per_s`, `train/bytes_per_sample`, `eval/METRIC`, `test/METRIC`, `config`. After
    a resume into the same folder, TensorBoard hides the points of steps that are trained again.

    Args:
        folder: For the event files; None = `tensorboard` in the run folder.
        flush_s: Seconds until a point is on disk, at most.
    """

    def __init__(self, folder: str | Path | None = None, *, flush_s: int = 10) -> None:
        self._folder, self._flush_s = folder, flush_s
        self._writer: SummaryWriter | None = None

    def on_start(self, event: StartEvent, /) -> None:
        folder = event.run_dir / FOLDER if self._folder is None else Path(self._folder)
        purge_step = event.step + 1 if event.step else None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=self._flush_s)
        except OSError as error:
            raise UserError(f"TensorBoardCallback: {folder} cannot be written ({error.strerror or error})") from error
        self._writer.add_text("config", f"```yaml\n{event.config.to_yaml()}\n```", event.step)

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
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Writes one point for each value that is known."""
        assert self._writer is not None
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)
