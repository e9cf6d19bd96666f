"""Trainer: the loop of one worker in one generation. Its parts are built elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from shardkeep.base.errors import Diverged, JobStopped, ShardkeepError
from shardkeep.workers.best import Best
from shardkeep.workers.checkpoint.checkpointer import Checkpointer
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.stop_vote import StopVote
from shardkeep.workers.config import TrainConfig
from shardkeep.workers.evaluate import Evaluations
from shardkeep.workers.pipeline import Pipeline
from shardkeep.workers.progressive import ProgressiveValidation
from shardkeep.workers.report import Report
from shardkeep.workers.step import Step, StepResult
from shardkeep.workers.telemetry import Telemetry


class Trainer:
    """Trains steps to the end of the job; evaluates and takes checkpoints between them."""

    def __init__(
        self,
        *,
        step: Step,
        pipeline: Pipeline,
        evaluations: Evaluations | None,
        checkpoints: Checkpointer | None,
        collective: Collective,
        telemetry: Telemetry,
        report: Report,
        train: TrainConfig,
        best: Best,
        progressive: ProgressiveValidation | None = None,
    ) -> None:
        self.step = step
        self.pipeline = pipeline
        self.total_steps = min(pipeline.slices.num_steps, train.max_steps or pipeline.slices.num_steps)
        self.checkpoints = checkpoints
        self.progressive = progressive
        self._evaluations = evaluations
        self._collective = collective
        self._telemetry = telemetry
        self._report = report
        self._max_bad_steps = train.max_bad_steps
        self._bad_steps = 0
        self._best = best

    def run(
        self,
        start_step: int,
        should_stop: Callable[[int], bool],
        stopping: Callable[[int], None] = lambda _step: None,
        *,
        follows: bool = False,
    ) -> int:
        """Runs to the last step, or to the evaluation that early stopping ends at; returns the number of steps done.

        Before each step it asks `should_stop(step)`. Once one rank's returns True, all ranks stop soon, save a
        checkpoint if there are any, and call `stopping`. Raises JobStopped, Diverged, and what pulls and pushes raise.

        Args:
            follows: An earlier generation was lost: the evaluation and the checkpoint after its last step may be
                missing.
        """
        vote, watch = StopVote(self._collective, start_step), self._telemetry.watch
        self._open(start_step, follows)
        with contextlib.ExitStack() as ends:
            ends.callback(watch.end)
            ends.enter_context(self.pipeline.running(start_step, self.total_steps))
            if self.checkpoints is not None:
                ends.callback(self.checkpoints.leave)
            step = start_step
            while step < self.total_steps and not self._best.ends:
                watch.begin(step)
                if vote.all_stop(step, should_stop(step)):
                    self._stop(step, stopping, trained=step > start_step)
                self._train_step(step)
                step += 1
            vote.end()
            self._telemetry.cpu.stop(step)
            return step

    def _open(self, start_step: int, follows: bool) -> None:
        self._telemetry.cpu.drop()
        saved = False
        if self.checkpoints is not None and not follows:
            self.checkpoints.open(start_step)
        elif self.checkpoints is not None:
            saved = self.checkpoints.reopen(start_step)
        if follows and start_step:
            self._evaluate_after(start_step - 1)
            if not saved:
                self._save_after(start_step - 1)
        elif start_step and (start_step >= self.total_steps or self._best.ends) and self._evaluations is not None:
            self._evaluations.after(start_step - 1, last=True)  # no step is left, and the summary needs its metrics

    def _train_step(self, step: int) -> None:
        following = self.pipeline.next()
        self._telemetry.watch.enter("other")
        self._report.phase(step, "training")
        result = self.step.run(*following, last=step == self.total_steps - 1, lr_factor=self._best.lr_factor)
        self._check(step, result)
        if self._telemetry.steady and not self._telemetry.cpu.running:
            self._telemetry.cpu.start(step + 1)
        self._evaluate_after(step)
        self._save_after(step)

    def _stop(self, step: int, stopping: Callable[[int], None], *, trained: bool) -> NoReturn:
        """Saves a checkpoint if this start `trained` a step, and raises JobStopped."""
        if trained and self.checkpoints is not None:
            self._save(self.checkpoints, step, finish=True)
            self._report.checkpoints(self.checkpoints.records())
        with contextlib.suppress(ShardkeepError):  # the loss of a rank does not matter any more
            stopping(step)
        raise JobStopped(f"stopped at step {step}")

    def _check(self, step: int, result: StepResult) -> None:
        """Counts, reports, and ends a job that has diverged."""
        slices = self.pipeline.slices
        self._telemetry.step_done(slices.samples(step), result)
        self._report.choices(self.step.choices)
        self._bad_steps = self._bad_steps + 1 if result.dropped_rows or not result.applied else 0
        if self._bad_steps >= self._max_bad_steps:
            raise Diverged(
                f"the gradients of {self._bad_steps} steps in a row were not finite (last: step {step}, "
                f"{result.dropped_rows} rows); lower the learning rates or set train.clip_norm"
            )
        self._report.step_done(step, slices, total_steps=self.total_steps)

    def _evaluate_after(self, step: int) -> None:
        last = step == self.total_steps - 1
        if self._evaluations is not None:
            self._evaluations.after(step, last=last)
        if self.progressive is not None:
            metrics = self.progressive.after(step, last=last)
            if metrics is not None:
                self._report.progressive(step + 1, metrics)

    def _save_after(self, step: int) -> None:
        done = step + 1
        if self.checkpoints is None:
            return
        finish = done == self.total_steps or self._best.ends
        if self.checkpoints.due(done, total_steps=self.total_steps) or finish or self._best.step == done:
            self._save(self.checkpoints, done, finish=finish)
        self._report.checkpoints(self.checkpoints.records())

    def _save(self, checkpoints: Checkpointer, step: int, *, finish: bool) -> None:
        self._report.phase(step, "saving")
        with self._telemetry.watch.excluded():
            checkpoints.begin(step)
            if finish:
                checkpoints.finish()

    def wait_for_writer(self) -> None:
        """After the generation: waits for a checkpoint that may still become complete."""
        if self.checkpoints is not None:
            self.checkpoints.wait_for_writer()
            self._report.checkpoints(self.checkpoints.records())
