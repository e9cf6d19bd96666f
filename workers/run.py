"""TrainingRun: the parts of a worker that live as long as its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardkeep.base.config.schedule import ScheduleConfig
from shardkeep.base.errors import CheckpointError, ConfigError
from shardkeep.base.logs.log import EventLog
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.checkpoint.checkpointer import Checkpointer, CheckpointPlan
from shardkeep.workers.checkpoint.rank_state import load_rank_state
from shardkeep.workers.checkpoint.tower_state import adopt_tower, load_tower
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.collectives.operations import all_gather
from shardkeep.workers.config import EvalConfig, TrainConfig
from shardkeep.workers.data.samples import Data, Dataset, doubtful_weights
from shardkeep.workers.data.sampling import Blocks, StepOrigin, StepSlices
from shardkeep.workers.dense.state import broadcast
from shardkeep.workers.dense.tower import Tower, share
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.evaluation.evaluate import Evaluates, Evaluations, Evaluator
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.evaluation.progressive import ProgressiveValidation
from shardkeep.workers.generation import Generation, Link
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.metrics.quality import MetricSettings
from shardkeep.workers.models.layers.axes import Match, changes
from shardkeep.workers.pipeline import Pipeline
from shardkeep.workers.reporting.report import Report
from shardkeep.workers.reporting.summary import Meters, SummarySources
from shardkeep.workers.rewind import LastStep, Rewind
from shardkeep.workers.step import Step
from shardkeep.workers.trainer import Trainer

if TYPE_CHECKING:
    from shardkeep.workers.retrieval.items import ItemSide

COMPILE_ALLOWANCE_S = 600.0
"""Seconds more that a pull or push may take while a peer compiles its tower. Sums between workers need none: nobody
compiles during one."""

MOST_NAMES = 4
"""The most names of tensors in a warning."""

_log = EventLog("run")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The samples, and the parts of the job's config that a generation reads."""

    data: Data
    train: TrainConfig
    evaluate: EvalConfig
    window: int
    workers: int
    seed: int
    blocks: bool = False
    """Whether the order of `shuffled` samples is one of blocks of rows."""
    schedules: Mapping[str, ScheduleConfig] = field(default_factory=dict)
    """Of all learning rates, by their keys."""
    inherited: Callable[[Checkpoint], Mapping[str, Match | None] | None] = lambda _: None
    """Where the dense model of another run has the values of this one, as `adopt_tower` takes it."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a generation continues a lost one: at `step`. The ranks `lacking` take the tower of rank `source`."""

    step: int
    source: int
    lacking: tuple[int, ...]
    resumed: bool
    """Whether the job began from a checkpoint: then the ranks agree from which step samples are counted."""


@dataclass(slots=True)
class TrainingRun:
    """A worker over the generations of its job. A job that goes back to a checkpoint needs another one."""

    job: TrainingJob
    client: RowClient
    embeddings: Embeddings
    tower: Tower
    meters: Meters
    report: Report
    origin: StepOrigin | None
    """Where steps and samples are counted from; None = this process does not know it yet."""
    plan: CheckpointPlan | None = None
    rewind: Rewind | LastStep | None = None
    best: EvaluationHistory = field(default_factory=lambda: EvaluationHistory(None))
    scores: BinnedScores | None = None
    """Of progressive validation; None = there is none."""
    item_side: ItemSide | None = None
    """Of a retrieval model; None of any other."""

    def _load(self, checkpoint: Checkpoint) -> None:
        """Loads the tower, the evaluations, and this rank's residuals. Raises CheckpointError."""
        if checkpoint.facts.get("from"):
            self._adopt(checkpoint)
            return
        self.best.load(checkpoint.facts.get("evaluations", ()))
        load_tower(self.tower, checkpoint)
        rank, workers = self.client.rank, self.job.workers
        load_rank_state(self.client, self.tower, checkpoint, rank=rank, world_size=workers, scores=self.scores)

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """Begins with the dense model of another run (`src/shardkeep/run/origin/warm_start.py`), if it has one."""
        if not checkpoint.below("tower"):
            return
        matches = self.job.inherited(checkpoint)
        new = adopt_tower(self.tower, checkpoint, matches)
        if new and not self.client.rank:
            listed = ", ".join(new[:MOST_NAMES]) + (f" and {len(new) - MOST_NAMES} more" if new[MOST_NAMES:] else "")
            self.report.warning("model", f"{listed}: not in that run in this shape, so new")
        for text in changes(self.tower.model, matches or {}):
            self.report.warning("model", text)

    def enter(
        self, link: Link, after: Continuation | None = None, *, checkpoint: Checkpoint | None = None
    ) -> Generation:
        """Makes a generation; every rank calls it; blocks. The link is closed if this fails.

        Args:
            after: How it continues a lost generation; None = the job starts, or starts again from a checkpoint.
            checkpoint: What it starts from; None = the model as it was built, or as it is.
        """
        try:
            return self._enter(link, after, checkpoint)
        except BaseException:
            link.close()
            raise

    def _enter(self, link: Link, after: Continuation | None, checkpoint: Checkpoint | None) -> Generation:
        meter = LedgerMeter(self.meters.traffic)
        collective = MeteredCollective(link.collective, meter)
        if after is not None and after.resumed:
            self.origin = _shared_origin(collective, self.origin)
        if after is None:
            broadcast(self.tower.model, collective)
        self.tower.join(collective)
        if checkpoint is not None:
            self._load(checkpoint)
        if after is not None:
            self._continue(collective, after)
        self.client.regroup(MeteredTransport(link.transport, meter, self.client.reader), link.number, self.tower.step)
        if self.rewind is not None:
            self.rewind.keep(self.tower, self.scores)
        slices = step_slices(self.job, self.origin)
        self.meters.steps.enter(slices.samples_before(self.tower.step))
        trainer = self._trainer(collective, slices)
        if after is None and not collective.rank:
            self._warn(trainer.total_steps)
        sources = SummarySources(self.client, self.tower, collective, self.meters)
        return Generation(link, trainer, sources, self.tower.step, after is not None)

    def _continue(self, collective: Collective, after: Continuation) -> None:
        """Brings the tower to the step where the generation begins. Blocks."""
        assert self.rewind is not None  # a job without restarts loses no generation
        if collective.rank not in after.lacking:  # also at this very step: an aborted one may have left its traces
            self.rewind.take_back(self.tower, after.step, self.scores)
        elif self.scores is not None:
            self.scores.load([])  # of this rank; the others' are there
        self.best.share(collective)
        self.best.forget_after(after.step)
        self.rewind.forget_after(after.step)  # before any rank can leave `share`
        share(self.tower, after.source, after.lacking)

    def _warn(self, steps: int) -> None:
        """`steps`: of the job."""
        start = self.tower.step
        for key, schedule in self.job.schedules.items():
            if (end := max(start, schedule.end(steps))) < steps - (steps - start) // 10:
                self.report.warning("rate", f"{key}: the learning rate is 0 from step {end:,} to the end, {steps:,}")
        for text in (*self.job.data.notes, *doubtful_weights(self.job.data.train)):
            _log.info("data", note=text)
            self.report.warning("data", text)

    def _trainer(self, collective: Collective, slices: StepSlices) -> Trainer:
        pipeline = Pipeline(
            dataset=self.job.data.train,
            slices=slices,
            client=self.client,
            embeddings=self.embeddings,
            clock=self.tower.watch,
            window=self.job.window,
            item_side=self.item_side,
            slow_start_s=COMPILE_ALLOWANCE_S if self.tower.compilation.due else 0.0,
        )
        step = Step(
            pipeline=pipeline,
            tower=self.tower,
            micro_batch=self.job.train.batch_size,
            rewind=self.rewind,
            progressive=self._progressive(collective),
        )
        return Trainer(
            step=step,
            evaluations=self._evaluations(collective, slices),
            checkpoints=self._checkpointer(collective),
            collective=collective,
            counters=self.meters.steps,
            report=self.report,
            train=self.job.train,
            best=self.best,
        )

    def _progressive(self, collective: Collective) -> ProgressiveValidation | None:
        if self.scores is None:
            return None
        scorer = BlockScorer(self.embeddings, self.tower, self.job.train.batch_size)
        every = self.job.evaluate.every_steps
        steps = 0 if every == "epoch" else every
        return ProgressiveValidation(scores=self.scores, scorer=scorer, every_steps=steps, collective=collective)

    def _evaluations(self, collective: Collective, slices: StepSlices) -> Evaluations | None:
        data, config = self.job.data, self.job.evaluate
        if data.eval is None:
            for key in self.best.watched:
                raise ConfigError(f"{key}: needs data.eval or data.split")
            return None
        return Evaluations(
            evaluator=self._evaluator(data.eval, collective),
            every_steps=0 if config.every_steps == "epoch" else config.every_steps,
            slices=slices,
            counters=self.meters.steps,
            report=self.report,
            ledger=self.meters.traffic.ledger,
            best=self.best,
            whole=self.tower.whole,
        )

    def _evaluator(self, dataset: Dataset, collective: Collective) -> Evaluates:
        data, config, train = self.job.data, self.job.evaluate, self.job.train
        size = config.batch_size or 4 * train.batch_size
        users, side = BlockScorer(self.embeddings, self.tower, size), self.item_side
        if side is not None:
            # here: other jobs load no kernels of ranks
            from shardkeep.workers.evaluation.retrieval import ItemModel, Ranking, RankSettings, RetrievalEvaluator

            return RetrievalEvaluator(
                dataset=dataset,
                client=self.client,
                users=users,
                items=BlockScorer(side.embeddings, ItemModel(self.tower), size),
                collective=collective,
                max_samples=config.max_samples,
                ranking=Ranking(side.sides, side.catalogue, RankSettings.by(config, train.loss)),
            )
        return Evaluator(
            dataset=dataset,
            client=self.client,
            scorer=users,
            collective=collective,
            max_samples=config.max_samples,
            asked=MetricSettings.by(config, train.loss, data.means_of_numbers(train.loss), data.train.schema.tasks),
        )

    def _checkpointer(self, collective: Collective) -> Checkpointer | None:
        plan, counters, best = self.plan, self.meters.steps, self.best
        if plan is None:
            return None
        return Checkpointer(
            plan=plan,
            client=self.client,
            tower=self.tower,
            collective=collective,
            facts=lambda: plan.facts(counters.samples) | best.facts(),
            scores=self.scores,
        )


def step_slices(job: TrainingJob, origin: StepOrigin | None = None) -> StepSlices:
    """Returns which samples each rank draws in each step. `origin`: None = the job's first step."""
    return StepSlices(
        len(job.data.train),
        batch_size=job.train.batch_size,
        world_size=job.workers,
        accumulate=job.train.accumulate,
        epochs=job.train.epochs,
        seed=job.seed,
        shuffle=job.train.order == "shuffled" and (Blocks() if job.blocks else True),
        origin=origin or StepOrigin(),
    )


def _shared_origin(collective: Collective, origin: StepOrigin | None) -> StepOrigin:
    """Returns the origin of the first rank that knows one: the checkpoints may be gone. Every rank calls it. Raises
    CheckpointError when none knows."""
    own = torch.tensor([-1, -1] if origin is None else [origin.step, origin.samples])
    known: list[Any] = [row for row in all_gather(collective, own, purpose="agreements").tolist() if row[0] >= 0]
    if not known:
        raise CheckpointError("the checkpoints of this job are missing, and no worker is left that knows how to count")
    return StepOrigin(*known[0])
