"""Demands: what a call of a loop asks for, checked and deduplicated, and what makes a lookup of its rows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from shardkeep.base.errors import UserError
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings.bags import Bag, BagPlanner, Pooled
from shardkeep.workers.embeddings.lookup import Lookup, Wanted, read_ids

IdsByTable = Mapping[str, "torch.Tensor | np.ndarray[Any, Any]"]


class Demands:
    """Turns ids and bags into requests. `call`: the method whose name errors have."""

    def __init__(self, rows: RowClient) -> None:
        self._rows = rows
        self._bags = BagPlanner(rows.tables)
        self._frozen = frozenset(name for name, spec in rows.tables.items() if spec.freeze)

    def of(
        self, call: str, owner: object, ids: IdsByTable | Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Lookup]]:
        """The request of ids or bags, and what makes a lookup of its pull and rows."""
        if isinstance(ids, Mapping) and any(isinstance(each, Bag) for each in ids.values()):
            return self.of_bags(call, owner, cast(Mapping[str, Bag], ids))
        wanted, request = self.of_ids(call, cast(IdsByTable, ids))
        return request, lambda pull, rows: Lookup(owner, pull, wanted, rows, self._frozen)

    def of_bags(
        self, call: str, owner: object, bags: Mapping[str, Bag]
    ) -> tuple[Request, Callable[[Pull, JaggedRows], Pooled]]:
        """The request of bags."""
        if not isinstance(bags, Mapping):
            raise UserError(f"{call}: is given a {type(bags).__name__}; allowed: a dict of feature name to Bag")
        for name, bag in bags.items():
            self._check_table(call, bag.table if isinstance(bag, Bag) and bag.table is not None else name)
        planned = self._bags.plan(bags)
        request = self._rows.request(planned.plan.unique)
        return request, lambda pull, rows: Pooled(owner, pull, planned, rows)

    def of_ids(self, call: str, ids: IdsByTable) -> tuple[dict[str, Wanted], Request]:
        """The request of ids by table."""
        if not isinstance(ids, Mapping):
            raise UserError(f"{call}: is given a {type(ids).__name__}; allowed: a dict of table name to ids")
        for table in ids:
            self._check_table(call, table)
        wanted = {table: read_ids(table, values) for table, values in ids.items()}
        return wanted, self._rows.request({table: w.unique_U for table, w in wanted.items()})

    def _check_table(self, call: str, table: object) -> None:
        if table not in self._rows.tables:
            known = list(self._rows.tables)
            near = difflib.get_close_matches(str(table), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the tables are {', '.join(known)}"
            raise UserError(f"{call}: unknown table {table}; {hint}")
