"""Trained: the model of a checkpoint, loaded without the job's processes. Only reads the run."""

# N = ids, U = unique ids of a table, D = embedding dim, B = samples, T = labels

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardkeep.base.arrays import Floats, Ids, Ints
from shardkeep.base.errors import CheckpointError, ConfigError, UserError
from shardkeep.base.machine.memory import memory_errors
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint
from shardkeep.ps.jagged import JaggedRows, SectionIds
from shardkeep.ps.shard.snapshot.files import load_snapshots
from shardkeep.ps.shard.tables import Tables
from shardkeep.roles.assembly import build_tower, table_specs
from shardkeep.run.trained import Which, checkpoint_of, config_of
from shardkeep.workers.blocks import Blocks
from shardkeep.workers.checkpoint.tower_state import load_tower
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.metrics.quality import Asked


@dataclass(frozen=True)
class LookedUp:
    """A batch with its rows."""

    batch: Batch
    plan: Plan
    rows: JaggedRows


class Trained:
    """Rows and dense model of one checkpoint, on the CPU. Stateless between calls.

    Args:
        inputs: How raw columns become inputs; None = the job's source has no raw columns.
    """

    def __init__(self, config: JobConfig, checkpoint: Checkpoint, schema: Schema, inputs: Inputs | None) -> None:
        """Raises CheckpointError for files that are damaged, ConfigError for settings that do not fit the schema."""
        self.config = config
        self.step = checkpoint.step
        self.schema = schema
        self.inputs = inputs
        specs = table_specs(config, schema)
        with memory_errors("the tables of the model"):
            self.tables = Tables(specs, seed=config.seed)
            load_snapshots(self.tables, checkpoint, shard=0, num_shards=1)
        self.embeddings = Embeddings(schema, {spec.name: spec for spec in specs})
        self.tower: Tower = build_tower(config, schema, self.embeddings, torch.device("cpu"))
        load_tower(self.tower, checkpoint)
        self.tower.model.eval()
        self.blocks = Blocks(self.embeddings, self.tower, config.eval.batch_size or 4 * config.train.batch_size)
        self.asked = Asked.by(config.eval, config.train.loss)
        """The metrics of an evaluation."""
        self._table_index = {spec.name: t for t, spec in enumerate(specs)}

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
        sections = SectionIds(np.arange(len(self.tables)), ids.layout.starts_T1, ids.ids_V)
        pulled = self.tables.pull(sections, rows.flat)
        if unseen is not None:
            unseen.add(plan, pulled.slots_V)
        return LookedUp(batch, plan, rows)

    def logits_of(self, found: LookedUp) -> Floats:
        """Logits as of `logits`."""
        return self.blocks.logits(found.batch, found.plan, found.rows)

    def scores(self, logits_BT: Floats) -> Floats:
        """What a person reads, float32 of the same shape: 1 / (1 + exp(-logit)) in float64, rounded once; the value
        itself if the labels are numbers."""
        if self.asked.numbers:
            return logits_BT
        scores_BT: Floats = np.exp(-np.logaddexp(0.0, -logits_BT.astype(np.float64))).astype(np.float32)
        return scores_BT

    def rows(self, table: str, ids_N: Ids) -> Floats:
        """Rows float32 (N, D) of any ids; an id without a row has its initial value. Raises UserError."""
        if table not in self._table_index:
            raise UserError(f"table {table}: unknown; the model has {', '.join(self._table_index)}")
        t = self._table_index[table]
        ids_U, inverse_N = np.unique(ids_N, return_inverse=True)
        rows_UD = np.empty((ids_U.size, self.tables[t].spec.dim), np.float32)
        if ids_U.size:
            sections = SectionIds(np.array([t]), np.array([0, ids_U.size]), ids_U)
            self.tables.pull(sections, rows_UD.reshape(-1))
        found_ND: Floats = rows_UD[inverse_N]
        return found_ND


@dataclass
class Unseen:
    """Counts the values of features whose id has no row, by feature."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self._missing_F: Ints = np.zeros(len(self.names), np.int64)
        self._values_F: Ints = np.zeros(len(self.names), np.int64)

    def add(self, plan: Plan, slots_V: Ints) -> None:
        """Counts the values of a batch. `slots_V`: of the plan's unique ids; -1 = no row."""
        starts_T1, missing_V = plan.unique.layout.starts_T1, slots_V < 0
        for f, name in enumerate(plan.names):
            feature = plan.feature(name)
            first = starts_T1[plan.unique.layout.catalog.index[feature.table]]
            self._missing_F[f] += np.count_nonzero(missing_V[first + feature.inverse_N])
            self._values_F[f] += feature.inverse_N.size

    def counts(self) -> dict[str, tuple[int, int]]:
        """Values without a row, and all values, by feature."""
        pairs = zip(self._missing_F.tolist(), self._values_F.tolist(), strict=True)
        return dict(zip(self.names, pairs, strict=True))


def load_trained(run: Path, which: Which = "last") -> Trained:
    """The model of a run. Blocks while rows load. Raises UserError, ConfigError and CheckpointError."""
    config = config_of(run)
    checkpoint = checkpoint_of(config, run, which)
    inputs = inputs_of(checkpoint)
    if inputs is None:
        raise ConfigError(
            f"{checkpoint.folder}: does not say how raw columns become inputs (source: {config.data.source}); "
            "only evaluate without --data can use it"
        )
    return Trained(config, checkpoint, inputs.layout.schema, inputs)


def inputs_of(checkpoint: Checkpoint) -> Inputs | None:
    """How raw columns become inputs; None = not known: the source has none, or an earlier version wrote the checkpoint.
    Raises CheckpointError."""
    record = checkpoint.facts.get("inputs")
    try:
        return None if record is None else Inputs.of_json(record)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its inputs are damaged ({type(error).__name__}: {error})"
        ) from error
