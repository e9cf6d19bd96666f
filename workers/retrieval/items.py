"""Items: the second block of samples of a retrieval model's step. They share unique rows, pull and push with the users
of the step."""

# B = samples, C = candidates, V = unique ids of all tables, U = those of one table

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from shardkeep.base.arrays import Bools, Rows
from shardkeep.ps.jagged import JaggedRows
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.samples import empty_sample
from shardkeep.workers.data.sides import Sides
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.retrieval.candidates import Candidates
from shardkeep.workers.retrieval.negatives import MicroCandidates, Negatives

Leaves = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepItems:
    """The candidates of all micro-batches of one rank's step, one micro-batch after the other.

    Attributes:
        drawn: Of each micro-batch, and `parts`, where its candidates are among all.
        uniform_V: The unique rows that only uniform negatives have, in tables with `admit`; None = there are none.
    """

    batch: Batch
    plan: Plan
    drawn: list[MicroCandidates]
    parts: list[slice]
    uniform_V: Bools | None


@dataclass(frozen=True, slots=True)
class ItemSide:
    """The items of a retrieval job, beside the users that a worker trains.

    Attributes:
        embeddings: Of the columns of `Sides.items`, over the tables of the users'.
        absent: The initial values of each table with `admit`.
        exact: Whether pulled rows are exactly those of the servers.
    """

    sides: Sides
    catalogue: Catalogue
    embeddings: Embeddings
    negatives: Negatives
    absent: Mapping[str, Initial]
    exact: bool

    def plan(self, users: Embeddings, batch: Batch, step: int, rank: int) -> tuple[Batch, Plan, StepItems]:
        """Plans a rank's samples together with their candidates. Returns the side of the users and its plan, too."""
        drawn = self.negatives.draw(batch, step, rank)
        return self._planned(users, batch, self.catalogue.take(np.concatenate([each.rows_C for each in drawn])), drawn)

    def plan_empty(self, users: Embeddings, batch: Batch) -> tuple[Batch, Plan, StepItems]:
        """As `plan`, for a rank without samples: one candidate without ids, which nobody looks for."""
        none, zero = np.empty(0, np.int64), np.zeros(1, np.float32)
        num_queries = int(self.negatives.entries is None)
        drawn = MicroCandidates(none, 1, zero, np.full(num_queries, -1, np.int64), np.zeros(1, np.bool_))
        return self._planned(users, batch, empty_sample(self.sides.items), [drawn])

    def _planned(
        self, users: Embeddings, batch: Batch, items: Batch, drawn: list[MicroCandidates]
    ) -> tuple[Batch, Plan, StepItems]:
        own = self.sides.users_of(batch)
        plan, items_plan = Embeddings.plan_together([(users, own), (self.embeddings, items)])
        ends = np.cumsum([each.log_q_C.size for each in drawn]).tolist()
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        uniform_C = np.concatenate([each.uniform_C for each in drawn])
        uniform_V = self._uniform(plan, items_plan, uniform_C) if self.absent else None
        return own, plan, StepItems(items, items_plan, drawn, parts, uniform_V)

    def _uniform(self, users: Plan, items: Plan, uniform_C: Bools) -> Bools:
        layout = users.unique.layout
        admits_T = np.isin(layout.catalog.names, list(self.absent))
        uniform_V = np.repeat(admits_T, np.diff(layout.starts_T1))
        for plan, trained_B in ((users, np.ones(users.num_samples, np.bool_)), (items, ~uniform_C)):
            for name in plan.names:
                feature = plan.feature(name)
                lengths = 1 if feature.offsets_B1 is None else np.diff(feature.offsets_B1)
                at_N = feature.inverse_N[np.repeat(trained_B, lengths)]
                uniform_V[layout.starts_T1[layout.catalog.index[feature.table]] + at_N] = False
        return uniform_V

    def candidates(
        self, items: StepItems, number: int, rows: Mapping[str, Rows], device: torch.device
    ) -> tuple[Leaves, Candidates]:
        """The leaves and the candidates of the micro-batch `number`."""
        part, drawn = items.parts[number], items.drawn[number]
        leaves = self.embeddings.lookup(items.plan, rows, part=part, device=device)
        dense_CI = torch.from_numpy(items.batch.dense_BI[part]).to(device)
        log_q_C, target_Q = (torch.from_numpy(array).to(device) for array in (drawn.log_q_C, drawn.target_Q))
        inputs = self.embeddings.inputs(items.plan, leaves, part)
        return leaves, Candidates(dense_CI, inputs, log_q_C, drawn.shared, target_Q)

    def unsent(self, items: StepItems, rows: JaggedRows) -> dict[str, Bools]:
        """By table the rows (U,) that are read and not trained, {} = none: a uniform negative counts for no admission,
        so what has no row sends no gradient. A row is missing where it has its initial value."""
        if items.uniform_V is None or not items.uniform_V.any():
            return {}
        starts_T1, found = rows.layout.starts_T1, {}
        for table, initial in self.absent.items():
            t = rows.layout.catalog.index[table]
            unsent_U = items.uniform_V[starts_T1[t] : starts_T1[t + 1]].copy()
            if self.exact:
                rows_UD = rows[table][unsent_U]
                ids_U = items.plan.unique[table][unsent_U]
                unsent_U[unsent_U] = (rows_UD == initial.rows(ids_U, rows_UD.shape[1])).all(axis=1)
            found[table] = unsent_U
        return found
