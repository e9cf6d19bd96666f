"""Trained: a model that is only read: its rows, its dense model, and how raw columns become its inputs."""

# N = ids, U = unique ids of a table, D = embedding dim, B = samples, T = labels

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from shardkeep.assembly.model import build_scorer, table_specs
from shardkeep.base.arrays import Bools, Floats, Ids, Ints
from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.machine.forks import outlive_forks
from shardkeep.base.machine.memory import memory_errors
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows, SectionIds
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.tables import Tables
from shardkeep.run.trained import Which, config_of, with_checkpoint
from shardkeep.workers.blocks import BlockScorer, DenseModel
from shardkeep.workers.checkpoint.tower_state import load_model
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.metrics.outputs import score_names, task_scores
from shardkeep.workers.metrics.quality import MetricSettings


@dataclass(frozen=True)
class LookedUp:
    """A batch with its rows."""

    batch: Batch
    plan: Plan
    rows: JaggedRows
    has_row_V: Bools
    """Whether each of the plan's unique ids has a row."""


class RowSource(Protocol):
    """The rows of a model."""

    @property
    def specs(self) -> Sequence[TableSpec]:
        """The tables, in the order of their numbers."""
        ...

    def pull(self, sections: SectionIds, values: Floats) -> Ints:
        """Writes rows into `values`, flat, table after table; of an id without a row its initial value. Returns where
        the rows are, -1 = no row."""
        ...


class LoadedRows:
    """The rows of a checkpoint, in the memory of this process."""

    def __init__(self, specs: Sequence[TableSpec], checkpoint: Checkpoint, *, seed: int) -> None:
        """Raises CheckpointError for files that are damaged."""
        self.specs = list(specs)
        with memory_errors("the tables of the model"):
            self.tables = Tables(specs, seed=seed)
            load_snapshots(self.tables, checkpoint, shard=0, num_shards=1)

    def pull(self, sections: SectionIds, values: Floats) -> Ints:
        return self.tables.pull(sections, values).slots_V


class Module(DenseModel, Protocol):
    """A dense model with its torch module."""

    @property
    def model(self) -> nn.Module: ...


class Trained:
    """Rows and dense model of one step, on the CPU. Stateless between calls.

    Args:
        inputs: How raw columns become inputs; None = the job's source has no raw columns.
        dense: In eval mode.
        label_means: Of the training labels that are numbers; () = not known.
    """

    def __init__(
        self,
        config: JobConfig,
        step: int,
        schema: Schema,
        inputs: Inputs | None,
        rows: RowSource,
        dense: Callable[[Embeddings], Module],
        label_means: Sequence[float] = (),
    ) -> None:
        outlive_forks()
        self.config = config
        self.step = step
        self.schema = schema
        self.inputs = inputs
        self._rows = rows
        self.embeddings = Embeddings(schema, {spec.name: spec for spec in rows.specs})
        self.dense = dense(self.embeddings)
        self.blocks = BlockScorer(self.embeddings, self.dense, config.eval.batch_size or 4 * config.train.batch_size)
        self.asked = MetricSettings.by(config.eval, config.train.loss, label_means, schema.tasks)
        """The metrics of an evaluation."""
        self._table_index = {spec.name: t for t, spec in enumerate(rows.specs)}

    @property
    def outputs(self) -> list[str]:
        """Names of the scores."""
        return score_names(self.schema.labels, self.schema.tasks)

    def logits(self, batch: Batch, unseen: Unseen | None = None) -> Floats:
        """Logits float32 (B, T) of 1 to `blocks.size` samples. An id without a row has its initial value.

        Args:
            unseen: Counts the ids without a row."""
        return self.logits_of(self.looked_up(batch, unseen))

    def looked_up(self, batch: Batch, unseen: Unseen | None = None) -> LookedUp:
        """The rows of a batch. Another thread may compute logits meanwhile."""
        plan = self.embeddings.plan(batch)
        ids = plan.unique
        rows = JaggedRows(ids.layout, np.empty(ids.layout.num_values, np.float32))
        sections = SectionIds(np.arange(len(self._rows.specs)), ids.layout.starts_T1, ids.ids_V)
        has_row_V = self._rows.pull(sections, rows.flat) >= 0
        if unseen is not None:
            unseen.add(plan, has_row_V)
        return LookedUp(batch, plan, rows, has_row_V)

    def logits_of(self, found: LookedUp) -> Floats:
        """Logits as of `logits`."""
        return self.blocks.logits(found.batch, found.plan, found.rows)

    def scores(self, logits_BT: Floats) -> Floats:
        """What a person reads, float32 of the same shape: 1 / (1 + exp(-logit)) in float64, rounded once; the value
        itself if the labels are numbers. Of several labels as `task_scores`."""
        if self.schema.tasks:
            return task_scores(logits_BT, self.schema.tasks)
        if self.asked.numbers:
            return logits_BT
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            scores_BT: Floats = np.exp(-np.logaddexp(0.0, -logits_BT.astype(np.float64))).astype(np.float32)
        return scores_BT

    def rows(self, table: str, ids_N: Ids) -> Floats:
        """Rows float32 (N, D) of any ids; an id without a row has its initial value. Raises UserError."""
        if table not in self._table_index:
            raise UserError(f"table {table}: unknown; the model has {', '.join(self._table_index)}")
        t = self._table_index[table]
        ids_U, inverse_N = np.unique(ids_N, return_inverse=True)
        rows_UD = np.empty((ids_U.size, self._rows.specs[t].dim), np.float32)
        if ids_U.size:
            sections = SectionIds(np.array([t]), np.array([0, ids_U.size]), ids_U)
            self._rows.pull(sections, rows_UD.reshape(-1))
        found_ND: Floats = rows_UD[inverse_N]
        return found_ND


def trained_of_checkpoint(
    config: JobConfig, checkpoint: Checkpoint, schema: Schema, inputs: Inputs | None, rows: RowSource | None = None
) -> Trained:
    """The model of a checkpoint. Blocks while rows load. Raises CheckpointError for files that are damaged, ConfigError
    for settings that do not fit the schema.

    Args:
        rows: Its rows; None = load them."""
    if rows is None:
        rows = LoadedRows(table_specs(config, schema), checkpoint, seed=config.seed)

    def scorer(embeddings: Embeddings) -> Scorer:
        return build_scorer(config, schema, embeddings, lambda model: load_model(model, checkpoint))

    means = checkpoint.facts.get("label_means", ())
    return Trained(config, checkpoint.step, schema, inputs, rows, scorer, means)


def trained_of_run(run: Path, which: Which = "last") -> Trained:
    """The model of a run. Blocks while rows load. Raises UserError, ConfigError and CheckpointError.

    A job that runs may delete the checkpoint that is read. The newer one is read then."""
    config = config_of(run)

    def load(checkpoint: Checkpoint) -> Trained:
        inputs = needed_inputs(config, checkpoint)
        return trained_of_checkpoint(config, checkpoint, inputs.layout.schema, inputs)

    return with_checkpoint(run, which, load)[1]


def needed_inputs(config: JobConfig, checkpoint: Checkpoint) -> Inputs:
    """How raw columns become inputs. Raises ConfigError where that is not known."""
    inputs = inputs_of(checkpoint)
    if inputs is None:
        raise ConfigError(
            f"{checkpoint.folder}: does not say how raw columns become inputs (source: {config.data.source}); "
            "only evaluate without --data can use it"
        )
    return inputs


def inputs_of(checkpoint: Checkpoint) -> Inputs | None:
    """How raw columns become inputs; None = not known: the source has none, or an earlier version wrote the checkpoint.
    Raises CheckpointError, and ConfigError for a loop of the user's own."""
    if checkpoint.facts.get("loop"):
        raise ConfigError(
            f"{checkpoint.folder}: is of a loop of your own, and only that has the dense model; allowed: "
            "client.restore, `shardkeep tables`, and in the loop "
            "shardkeep.torchrec.save(model.module, FILE) for PyTorch"
        )
    record = checkpoint.facts.get("inputs")
    try:
        return None if record is None else Inputs.of_json(record)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: its inputs are damaged ({error})") from error
