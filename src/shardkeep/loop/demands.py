"""Demands: what a call of a loop asks for, checked and deduplicated, and what makes a lookup of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from shardkeep.base.errors import UserError, did_you_mean
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import PullHandle, RowClient
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings.bags import Bag, BagPlan, BagPlanner, KeyedBags, Pooled
from shardkeep.workers.embeddings.loop_lookup import Lookup, read_ids

IdsByTable = Mapping[str, "torch.Tensor | np.ndarray[Any, Any]"]
IdsOrBags = IdsByTable | Mapping[str, Bag] | KeyedBags
Made = Callable[[PullHandle, JaggedRows], Lookup]
"""Makes a lookup of a pull and its rows."""
Demand = tuple[Request, Made]


class Demands:
    """Turns ids and bags into requests."""

    def __init__(self, rows: RowClient) -> None:
        self._rows = rows
        self._bags = BagPlanner(rows.tables)
        self._frozen = frozenset(name for name, spec in rows.tables.items() if spec.freeze)

    def of(self, call: str, owner: object, ids: IdsOrBags) -> Demand:
        """The demand of a client's method. `call`: its name, which errors have; `pool` takes nothing but bags."""
        if isinstance(ids, KeyedBags):
            return self._pooled(owner, self._bags.plan_keyed(ids))
        pools = call == "pool" or (isinstance(ids, Mapping) and any(isinstance(each, Bag) for each in ids.values()))
        if not isinstance(ids, Mapping):
            allowed = "feature name to Bag" if pools else "table name to ids"
            raise UserError(f"{call}: is given a {type(ids).__name__}; allowed: a dict of {allowed}")
        for name, each in ids.items():
            self._check_table(call, each.table if isinstance(each, Bag) and each.table is not None else name)
        if pools:
            return self._pooled(owner, self._bags.plan(cast(Mapping[str, Bag], ids)))
        wanted = {table: read_ids(table, values) for table, values in ids.items()}
        request = self._rows.request({table: w.unique_U for table, w in wanted.items()})
        return request, lambda pull, rows: Lookup(owner, pull, wanted, rows, self._frozen)

    def _pooled(self, owner: object, planned: BagPlan) -> Demand:
        request = self._rows.request(planned.plan.unique)
        return request, lambda pull, rows: Pooled(owner, pull, planned, rows)

    def _check_table(self, call: str, table: object) -> None:
        if table not in self._rows.tables:
            known = list(self._rows.tables)
            hint = did_you_mean(str(table), known) or f"; the tables are {', '.join(known)}"
            raise UserError(f"{call}: unknown table {table}{hint}")
