"""Trained: a model that is only read: its rows, its dense model, and how raw columns become its inputs."""

# N = ids, U = unique ids of a table, D = embedding dim, B = samples, T = labels, M = items, E = width of a vector

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from shardkeep.inference.finding import OUTPUTS, Finder, Items
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import JaggedRows, SectionIds
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.tables import Tables
from shardkeep.run.reader import RunReader
from shardkeep.run.trained import Which, config_of, with_checkpoint
from shardkeep.workers.blocks import BlockScorer, DenseModel
from shardkeep.workers.checkpoint.tower_state import load_model
from shardkeep.workers.config import Amp
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.evaluation.retrieval import ItemModel, Ranking, RankSettings
from shardkeep.workers.metrics.outputs import score_names, task_scores
from shardkeep.workers.metrics.quality import MetricSettings
from shardkeep.workers.model_config import RETRIEVAL
from shardkeep.workers.retrieval.ranking import ItemIndex


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
        items: Of a retrieval model.

    Attributes:
        sides: The columns of a retrieval model; None of any other.
        schema: The columns of samples that are scored. A retrieval model does not read those of items, so that they are
            in neither `schema` nor `inputs`.
        labelled_inputs: How raw columns become samples with all columns, to evaluate them.
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
        items: Items | None = None,
    ) -> None:
        outlive_forks()
        self.config = config
        self.step = step
        self.sides = None if config.items is None else sides_of_model(config.items, schema)
        self.schema = schema if self.sides is None else self.sides.users
        self.labelled_inputs = inputs
        self.inputs = inputs if self.sides is None or inputs is None else inputs.only(self.schema)
        self._rows, self._items = rows, items
        self.embeddings = Embeddings(self.schema, {spec.name: spec for spec in rows.specs})
        self.dense = dense(self.embeddings)
        self.blocks = BlockScorer(self.embeddings, self.dense, config.eval.batch_size or 4 * config.train.batch_size)
        self.asked = MetricSettings.by(config.eval, config.train.loss, label_means, schema.tasks)
        """The metrics of an evaluation."""

    @property
    def outputs(self) -> list[str]:
        """Names of the scores, or of what a retrieval model has for a sample."""
        return OUTPUTS if self.sides is not None else score_names(self.schema.labels, self.schema.tasks)

    @cached_property
    def finder(self) -> Finder:
        """Finds items. Blocks while the vectors of all items are computed, the first time. Raises UserError for a model
        that finds none."""
        if self.sides is None or self._items is None:
            raise UserError(f"model.name: {self.config.model.name} finds no items; allowed: a retrieval model")
        asked, catalogue = RankSettings.by(self.config.eval, self.config.train.loss), self._items.catalogue
        vectors_ME = self._items.vectors_ME
        index = ItemIndex(self.item_vectors(catalogue.items) if vectors_ME is None else vectors_ME)
        return Finder(Ranking(self.sides, catalogue, asked), index)

    def item_vectors(self, items: Batch) -> Floats:
        """Vectors float32 (M, E) of any number of samples of `sides.items`."""
        assert self.sides is not None
        embeddings = Embeddings(self.sides.items, {spec.name: spec for spec in self._rows.specs})
        scorer = BlockScorer(embeddings, ItemModel(self.dense), self.blocks.size)
        parts = []
        for start in range(0, len(items), scorer.size):
            found = self._pulled(embeddings, items.slice(start, min(start + scorer.size, len(items))))
            parts.append(scorer.logits(found.batch, found.plan, found.rows))
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    def ranks(self, batch: Batch, unseen: Unseen | None = None) -> Ints:
        """Of samples with all columns, as of `Finder.ranks`."""
        assert self.sides is not None
        return self.finder.ranks(self.logits(self.sides.users_of(batch), unseen), batch)

    def logits(self, batch: Batch, unseen: Unseen | None = None) -> Floats:
        """Logits float32 (B, T) of 1 to `blocks.size` samples, or vectors (B, E). An id without a row has its initial
        value.

        Args:
            unseen: Counts the ids without a row."""
        return self.logits_of(self.looked_up(batch, unseen))

    def looked_up(self, batch: Batch, unseen: Unseen | None = None) -> LookedUp:
        """The rows of a batch. Another thread may compute logits meanwhile."""
        found = self._pulled(self.embeddings, batch)
        if unseen is not None:
            unseen.add(found.plan, found.has_row_V)
        return found

    def _pulled(self, embeddings: Embeddings, batch: Batch) -> LookedUp:
        plan = embeddings.plan(batch)
        ids = plan.unique
        rows = JaggedRows(ids.layout, np.empty(ids.layout.num_values, np.float32))
        sections = SectionIds(np.arange(len(self._rows.specs)), ids.layout.starts_T1, ids.ids_V)
        return LookedUp(batch, plan, rows, self._rows.pull(sections, rows.flat) >= 0)

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
        tables = [spec.name for spec in self._rows.specs]
        if table not in tables:
            raise UserError(f"table {table}: unknown; the model has {', '.join(tables)}")
        t = tables.index(table)
        ids_U, inverse_N = np.unique(ids_N, return_inverse=True)
        rows_UD = np.empty((ids_U.size, self._rows.specs[t].dim), np.float32)
        if ids_U.size:
            sections = SectionIds(np.array([t]), np.array([0, ids_U.size]), ids_U)
            self._rows.pull(sections, rows_UD.reshape(-1))
        found_ND: Floats = rows_UD[inverse_N]
        return found_ND


def trained_of_checkpoint(
    config: JobConfig,
    checkpoint: Checkpoint,
    schema: Schema,
    inputs: Inputs | None,
    rows: RowSource | None = None,
    *,
    run: Path,
) -> Trained:
    """The model of a checkpoint. Blocks while rows load. Raises CheckpointError for files that are damaged, ConfigError
    for settings that do not fit the schema.

    Args:
        rows: Its rows; None = load them.
        run: Its run folder, which has the catalogue of a retrieval model."""
    if rows is None:
        rows = LoadedRows(table_specs(config, schema), checkpoint, seed=config.seed)

    def scorer(embeddings: Embeddings) -> Scorer:
        return build_scorer(config, schema, embeddings, lambda model: load_model(model, checkpoint))

    means = checkpoint.facts.get("label_means", ())
    return Trained(config, checkpoint.step, schema, inputs, rows, scorer, means, items_of_run(config, run))


def items_of_run(config: JobConfig, run: Path) -> Items | None:
    """The items of a retrieval model; None of any other. Raises CheckpointError where they cannot be read."""
    if config.model.name not in RETRIEVAL:
        return None
    path = RunReader(run).catalogue_path
    try:
        return Items(Catalogue.read(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: the items of the model cannot be read ({why})") from error


def computing_in(config: JobConfig, amp: Amp | None) -> JobConfig:
    """The config with another `tower.amp`; None = as it is."""
    tower = config.tower if amp is None else config.tower.model_copy(update={"amp": amp})
    return config.model_copy(update={"tower": tower})


def trained_of_run(run: Path, which: Which = "auto", amp: Amp | None = None) -> Trained:
    """The model of a run. Blocks while rows load. Raises UserError, ConfigError and CheckpointError.

    A job that runs may delete the checkpoint that is read. The newer one is read then."""
    config = computing_in(config_of(run), amp)

    def load(checkpoint: Checkpoint) -> Trained:
        inputs = needed_inputs(config, checkpoint)
        return trained_of_checkpoint(config, checkpoint, inputs.layout.schema, inputs, run=run)

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
    """How raw columns become inputs; None = not known: the source has none.
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
