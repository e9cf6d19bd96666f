"""Trainer: the loop of one worker in one generation. Its parts are built elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from shardkeep.base.errors import Diverged, JobStopped, ShardkeepError
from shardkeep.workers.checkpoint.checkpointer import Checkpointer
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.stop_vote import StopVote
from shardkeep.workers.config import TrainConfig
from shardkeep.workers.evaluation.evaluate import Evaluations
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.report import Report
from shardkeep.workers.step import Step, StepResult


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains steps to the end of the job; evaluates and takes checkpoints between them."""

    step: Step
    evaluations: Evaluations | None
    checkpoints: Checkpointer | None
    collective: Collective
    counters: StepCounters
    report: Report
    train: TrainConfig
    best: EvaluationHistory
    _bad_steps: int = field(default=0, init=False)

    @property
    def total_steps(self) -> int:
        """Steps of the job, those before this generation too."""
        num_steps = self.step.pipeline.slices.num_steps
        return min(num_steps, self.train.max_steps or num_steps)

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
        vote, watch = StopVote(self.collective, start_step), self.counters.watch
        self._open(start_step, follows)
        with contextlib.ExitStack() as ends:
            ends.callback(watch.end)
            ends.enter_context(self.step.pipeline.running(start_step, self.total_steps))
            if self.checkpoints is not None:
                ends.callback(self.checkpoints.leave)
            step = start_step
            while step < self.total_steps and not self.best.ends:
                watch.begin(step)
                if vote.all_stop(step, should_stop(step)):
                    self._save_and_stop(step, stopping, trained=step > start_step)
                self._train_step(step)
                step += 1
            vote.end()
            self.counters.cpu.stop(step)
            return step

    def _open(self, start_step: int, follows: bool) -> None:
        self.counters.cpu.drop()
        saved = False
        if self.checkpoints is not None and not follows:
            self.checkpoints.open(start_step)
        elif self.checkpoints is not None:
            saved = self.checkpoints.reopen(start_step)
        if follows and start_step:
            self._evaluate_after(start_step - 1)
            if not saved:
                self._save_after(start_step - 1)
        elif start_step and (start_step >= self.total_steps or self.best.ends) and self.evaluations is not None:
            self.evaluations.after(start_step - 1, last=True)  # no step is left, and the summary needs its metrics

    def _train_step(self, step: int) -> None:
        following = self.step.pipeline.next()
        self.counters.watch.enter("other")
        self.report.phase(step, "training")
        result = self.step.run(*following, last=step == self.total_steps - 1, lr_factor=self.best.lr_factor)
        self._check(step, result)
        if self.counters.steady and not self.counters.cpu.running:
            self.counters.cpu.start(step + 1)
        self._evaluate_after(step)
        self._save_after(step)

    def _save_and_stop(self, step: int, stopping: Callable[[int], None], *, trained: bool) -> NoReturn:
        """Saves a checkpoint if this start `trained` a step, and raises JobStopped."""
        if trained and self.checkpoints is not None:
            self._save(self.checkpoints, step, finish=True)
            self.report.checkpoints(self.checkpoints.records())
        with contextlib.suppress(ShardkeepError):  # the loss of a rank does not matter any more
            stopping(step)
        raise JobStopped(f"stopped at step {step}")

    def _check(self, step: int, result: StepResult) -> None:
        """Counts, reports, and ends a job that has diverged."""
        slices = self.step.pipeline.slices
        self.counters.step_done(slices.samples(step), result)
        self.report.choices(self.step.tower.chosen)
        self._bad_steps = self._bad_steps + 1 if result.dropped_rows or not result.applied else 0
        if self._bad_steps >= self.train.max_bad_steps:
            raise Diverged(
                f"the gradients of {self._bad_steps} steps in a row were not finite (last: step {step}, "
                f"{result.dropped_rows} rows); lower the learning rates or set train.clip_norm"
            )
        self.report.step_done(step, slices, total_steps=self.total_steps)

    def _evaluate_after(self, step: int) -> None:
        last = step == self.total_steps - 1
        if self.evaluations is not None:
            self.evaluations.after(step, last=last)
        if self.step.progressive is not None:
            metrics = self.step.progressive.after(step, last=last)
            if metrics is not None:
                self.report.progressive(step + 1, metrics)

    def _save_after(self, step: int) -> None:
        done = step + 1
        if self.checkpoints is None:
            return
        finish = done == self.total_steps or self.best.ends
        if self.checkpoints.due(done, total_steps=self.total_steps) or finish or self.best.step == done:
            self._save(self.checkpoints, done, finish=finish)
        self.report.checkpoints(self.checkpoints.records())

    def _save(self, checkpoints: Checkpointer, step: int, *, finish: bool) -> None:
        self.report.phase(step, "saving")
        with self.counters.watch.excluded():
            checkpoints.begin(step)
            if finish:
                checkpoints.finish(step)

    def wait_for_writer(self) -> None:
        """After the generation: waits for a checkpoint that may still become complete."""
        if self.checkpoints is not None:
            self.checkpoints.wait_for_writer()
            self.report.checkpoints(self.checkpoints.records())
