"""Trainer: the loop of one worker. Wires a step, an evaluation, checkpoints and a reporter, all built elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np

from shardkeep.base.errors import Diverged, JobStopped, ShardkeepError
from shardkeep.compression.ledger import Ledger
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.checkpoint.checkpointer import Checkpointer
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.stop_vote import StopVote
from shardkeep.workers.config import EvalConfig, TrainConfig
from shardkeep.workers.evaluate import Evaluation
from shardkeep.workers.pipeline import Pipeline
from shardkeep.workers.step import Step, StepResult
from shardkeep.workers.telemetry import Telemetry

TRAIN_DIRECTIONS = ("push", "pull", "tower")
"""In the ledger: what the steps of training send."""


class Progress(Protocol):
    """Where a worker's progress goes: the control plane, or a run folder in one process."""

    def report(self, kind: str, record: dict[str, Any]) -> None: ...
    def update(self, *, step: int, phase: str, unsent_rows: int | None = None) -> None: ...


class Trainer:
    """Trains from `start_step` to the end, evaluating on the way."""

    def __init__(
        self,
        *,
        step: Step,
        pipeline: Pipeline,
        evaluation: Evaluation | None,
        checkpoints: Checkpointer | None,
        client: RowClient,
        collective: Collective,
        train: TrainConfig,
        evaluate: EvalConfig,
        telemetry: Telemetry,
        ledger: Ledger,
        compile_allowance_s: float = 0.0,
        again: bool = False,
        before: Trainer | None = None,
    ) -> None:
        """`compile_allowance_s`: seconds more that a pull or push may take until all ranks have compiled; `again`:
        another generation was lost while it trained; `before`: this process's trainer then, None = it is new."""
        self.step = step
        self.pipeline = pipeline
        self._evaluation = evaluation
        self._checkpoints = checkpoints
        self._client = client
        self._collective = collective
        self._train = train
        self._eval = evaluate
        self._telemetry = telemetry
        self._ledger = ledger
        self._watch = telemetry.watch
        self._cpu = telemetry.cpu
        self._bad_steps = 0
        self._compile_allowance_s = compile_allowance_s
        self._again = again
        self._choices_told: bool = before is not None and before._choices_told
        self._slices = slices = pipeline.slices
        self.total_steps = min(slices.num_steps, train.max_steps or slices.num_steps)
        self.last_eval: dict[str, Any] | None = None if before is None else before.last_eval

    def run(
        self,
        progress: Progress,
        should_stop: Callable[[int], bool],
        start_step: int = 0,
        stopping: Callable[[int], None] = lambda _step: None,
    ) -> int:
        """Runs to the end; returns the number of steps done.

        Before each step it asks `should_stop(step)`. Once one rank's returns True, all ranks stop soon, save a
        checkpoint if there are any, and call `stopping`. Raises JobStopped, Diverged, and what pulls and pushes raise.
        """
        vote = StopVote(self._collective, start_step)
        self._open(start_step, progress)
        with contextlib.ExitStack() as ends:
            ends.callback(self._watch.end)
            ends.enter_context(self.pipeline.running(start_step, self.total_steps))
            if self._checkpoints is not None:
                ends.callback(self._checkpoints.leave)
            for step in range(start_step, self.total_steps):
                self._watch.begin(step)
                if vote.all_stop(step, should_stop(step)):
                    self._stop(step, progress, stopping, trained=step > start_step)
                self._train_step(step, progress)
            vote.end()
            self._cpu.stop(self.total_steps)
            return self.total_steps

    def _open(self, start_step: int, progress: Progress) -> None:
        """Opens the checkpoints. After a lost generation, repeats what may not have followed its last step."""
        self._cpu.drop()
        self._client.calls.extend_deadlines(self._compile_allowance_s)
        saved = False
        if self._checkpoints is not None and not self._again:
            self._checkpoints.open(start_step)
        elif self._checkpoints is not None:
            saved = self._checkpoints.reopen(start_step)
        if self._again and start_step:
            self._evaluate_after(start_step - 1, progress)
            if not saved:
                self._save_after(start_step - 1, progress)

    def _train_step(self, step: int, progress: Progress) -> None:
        following = self.pipeline.next()
        self._watch.enter("other")
        self._tell_phase(progress, step, "training")
        result = self.step.run(*following, last=step == self.total_steps - 1)
        self._check(step, result, progress)
        if self._telemetry.steady and not self._cpu.running:
            self._cpu.start(step + 1)
        self._evaluate_after(step, progress)
        self._save_after(step, progress)

    def _stop(self, step: int, progress: Progress, stopping: Callable[[int], None], *, trained: bool) -> NoReturn:
        """Saves a checkpoint if this start `trained` a step, and raises JobStopped."""
        if trained:
            self._save_before_stop(step, progress)
        with contextlib.suppress(ShardkeepError):  # the loss of a rank does not matter any more
            stopping(step)
        raise JobStopped(f"stopped at step {step}")

    def _tell_phase(self, progress: Progress, step: int, phase: str) -> None:
        progress.update(step=step, phase=phase, unsent_rows=self._client.memory.num_unsent)

    def _save_before_stop(self, step: int, progress: Progress) -> None:
        if self._checkpoints is None:
            return
        self._tell_phase(progress, step, "saving")
        with self._watch.excluded():
            self._checkpoints.begin(step)
            self._checkpoints.finish()
        self._tell_checkpoints(progress)

    def _check(self, step: int, result: StepResult, progress: Progress) -> None:
        """Counts, reports, and ends a job that has diverged."""
        self._client.calls.extend_deadlines(0.0)
        self._telemetry.step_done(self._slices.samples(step), result)
        self._tell_choices(progress)
        self._bad_steps = self._bad_steps + 1 if result.dropped_rows or not result.applied else 0
        if self._bad_steps >= self._train.max_bad_steps:
            raise Diverged(
                f"the gradients of {self._bad_steps} steps in a row were not finite (last: step {step}, "
                f"{result.dropped_rows} rows); lower the learning rates or set train.clip_norm"
            )
        due = self._telemetry.report_due(self._train.report_every_s) or step == self.total_steps - 1
        if due and self._client.rank == 0:
            epoch = self._slices.epoch(step)
            done = {"step": step + 1, "total_steps": self.total_steps, "epoch": epoch}
            staleness = {str(steps): times for steps, times in sorted(self._client.staleness_seen.items())}
            progress.report("progress", done | self._telemetry.snapshot() | {"staleness": staleness})

    def _tell_choices(self, progress: Progress) -> None:
        """Once: what the tower chose, as a line for the user."""
        if not self._choices_told and self._client.rank == 0:
            self._choices_told = True
            text = "; ".join(f"{what} {choice}" for what, choice in sorted(self.step.choices.items()))
            progress.report("phase", {"phase": "tower", "text": text})

    def _evaluate_after(self, step: int, progress: Progress) -> None:
        done, every = step + 1, self._eval.every_steps
        due = not done % every if every else self._slices.ends_epoch(step)
        if self._evaluation is None or not (due or done == self.total_steps):
            return
        self._tell_phase(progress, done, "evaluating")
        with self._watch.excluded(), self._cpu.excluded(done):
            self.last_eval = self._evaluation.run(done)
            trained = {"train_samples": self._telemetry.samples, "train_bytes": self._train_bytes()}
        if self._client.rank == 0:
            progress.report("eval", {"step": done} | self.last_eval | trained)

    def _train_bytes(self) -> dict[str, int]:
        """Bytes of training so far by direction, over all ranks, which all call this: without evaluation's reads, and
        without the control plane's, which belong to no step. What gathers them counts as agreements."""
        totals = self._ledger.totals()
        mine = np.array([sum(totals[direction].values()) for direction in TRAIN_DIRECTIONS], dtype=np.int64)
        sums = np.sum(self._collective.gather_arrays(mine, purpose="agreements"), axis=0).tolist()
        return dict(zip(TRAIN_DIRECTIONS, sums, strict=True)) | {"total": sum(sums)}

    def _save_after(self, step: int, progress: Progress) -> None:
        done = step + 1
        if self._checkpoints is None:
            return
        if self._checkpoints.due(done) or done == self.total_steps:
            self._tell_phase(progress, done, "saving")
            with self._watch.excluded():
                self._checkpoints.begin(done)
                if done == self.total_steps:
                    self._checkpoints.finish()
        self._tell_checkpoints(progress)

    def settle(self, progress: Progress) -> None:
        """After the generation was lost: waits for a checkpoint that may have been written to its end nevertheless."""
        if self._checkpoints is not None:
            self._checkpoints.settle()
            self._tell_checkpoints(progress)

    def _tell_checkpoints(self, progress: Progress) -> None:
        assert self._checkpoints is not None
        for record in self._checkpoints.records():
            progress.report("phase", {"phase": "checkpoint"} | record)
