"""How many of the rows that workers read they have read before, and how many of those another worker changed since.

What a cache of rows could save at best: rows that are read for the first time have to come, and if nothing stale is to
be read, those that changed, too.
"""
# E = reads of a table: (id, step, worker), each once; R = distinct ids

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Ids


@dataclass(frozen=True)
class Rereads:
    """Shares of all rows read."""

    again: float
    """Read by the same worker in an earlier step."""
    changed: float
    """Of these, those that another worker has pushed a gradient for since: at the step of that read, or later."""


def rereads(reads: Iterable[tuple[int, int, Mapping[str, Ids]]]) -> Rereads:
    """Shares of the rows in `reads`: (step, worker, unique ids by table). Steps are 0, 1, ...; what is read is pushed
    in its step."""
    by_table: dict[str, list[tuple[int, int, Ids]]] = {}
    for step, worker, ids in reads:
        for table, ids_U in ids.items():
            by_table.setdefault(table, []).append((step, worker, ids_U))
    total = again = changed = 0
    for parts in by_table.values():
        ids_E = np.concatenate([ids_U for _, _, ids_U in parts])
        counts = [ids_U.size for _, _, ids_U in parts]
        steps_E = np.repeat([step for step, _, _ in parts], counts)
        workers_E = np.repeat([worker for _, worker, _ in parts], counts)
        found = _of_table(ids_E, steps_E, workers_E)
        total, again, changed = total + ids_E.size, again + found[0], changed + found[1]
    return Rereads(again / total, changed / total) if total else Rereads(0.0, 0.0)


def _of_table(ids_E: Ids, steps_E: Ids, workers_E: Ids) -> tuple[int, int]:
    """How many reads were not the worker's first of that id, and before how many of these another worker changed it."""
    if not ids_E.size:
        return 0, 0
    ranks_E = np.unique(ids_E, return_inverse=True)[1].reshape(-1).astype(np.int64)
    num_steps, num_workers = int(steps_E.max()) + 1, int(workers_E.max()) + 1
    times_E = ranks_E * num_steps + steps_E  # ascending by id, then step
    order_E = np.lexsort((steps_E, ranks_E * num_workers + workers_E))  # by id, then worker, then step
    owners_E = (ranks_E * num_workers + workers_E)[order_E]
    later_P = order_E[1:][owners_E[1:] == owners_E[:-1]]  # pairs of a worker's successive reads of an id
    sooner_P = order_E[:-1][owners_E[1:] == owners_E[:-1]]
    sorted_E = np.sort(times_E)
    begin_P, end_P = (np.searchsorted(sorted_E, times_E[at_P]) for at_P in (sooner_P, later_P))
    return later_P.size, int(np.count_nonzero(end_P - begin_P > 1))  # one is the worker's own
