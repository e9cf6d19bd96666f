"""Pushes of several tables, made by hand."""

from __future__ import annotations

import numpy as np

from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Gradients, SectionIds

SPECS = tuple(
    TableSpec(name=name, dim=dim, optimizer={"name": optimizer}, init={"name": law})
    for name, dim, optimizer, law in (
        ("a", 4, "rowwise_adagrad", "uniform"),
        ("b", 4, "adam", "normal"),
        ("c", 3, "sgd", "zeros"),
        ("d", 1, "ftrl", "uniform"),
        ("e", 16, "adagrad", "uniform"),
        ("f", 16, "rowwise_adagrad", "normal"),
    )
)
ByTable = dict[int, tuple[np.ndarray, np.ndarray]]


def sections(ids: dict[int, np.ndarray]) -> SectionIds:
    tables = sorted(ids)
    starts = np.cumsum([0] + [ids[t].size for t in tables])
    return SectionIds(
        np.array(tables, np.int64), starts, np.concatenate([ids[t] for t in tables] or [np.empty(0, int)])
    )


def gradients(parts: ByTable) -> Gradients:
    values = [parts[t][1].reshape(-1) for t in sorted(parts)]
    flat = np.concatenate(values or [np.empty(0, np.float32)]).astype(np.float32)
    return Gradients(sections({t: ids for t, (ids, _) in parts.items()}), flat)


def of_one_table(ids: np.ndarray, grads: np.ndarray) -> Gradients:
    return gradients({0: (ids, grads)})
