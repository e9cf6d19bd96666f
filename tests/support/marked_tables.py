"""Filled tables, their state, and code that runs between the parts of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.one_table import exported
from tests.support.tables import SPECS as ALL_LAWS, ByTable, gradients

SPECS = (*ALL_LAWS, TableSpec(name="empty", dim=5), TableSpec(name="one row", dim=2, optimizer={"name": "adam"}))  # type: ignore[arg-type]
EMPTY, ONE_ROW = len(SPECS) - 2, len(SPECS) - 1
IDS = 1500
State = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def random_push(rng: np.random.Generator, specs: Sequence[TableSpec] = SPECS, *, most: int = 400) -> ByTable:
    """Gradients for rows of all tables: Zipf, so that some come again and again; of twice as many ids as there are."""
    found = {}
    for t, spec in enumerate(specs):
        ids = np.unique(rng.zipf(1.2, most) % (2 * IDS)) if spec.name != "one row" else np.array([7])
        found[t] = (ids.astype(np.int64), rng.normal(size=(ids.size, spec.dim)).astype(np.float32))
    return found


def filled(specs: Sequence[TableSpec] = SPECS) -> Tables:
    """Tables with rows of the even ids; one is empty, one has a single row."""
    tables, rng = Tables(specs, seed=7), np.random.default_rng(0)
    for t, spec in enumerate(specs):
        if spec.name != "empty":
            ids = np.arange(0, 2 * IDS, 2, dtype=np.int64) if spec.name != "one row" else np.array([7])
            tables.apply([gradients({t: (ids, rng.normal(size=(ids.size, spec.dim)).astype(np.float32))})], step=0)
            tables[t].skipped_rows = t
    return tables


def pushed_to_all(shards: Sequence[Tables], ids: np.ndarray, step: int, *, without: int | None = None) -> None:
    """A push of the same ids to all tables, or all except one, each server its rows."""
    for s, tables in enumerate(shards):
        mine, rng = ids[server_of(ids, len(shards)) == s], np.random.default_rng(step)
        parts = {t: (mine, rng.normal(size=(mine.size, spec.dim)).astype(np.float32)) for t, spec in enumerate(SPECS)}
        parts.pop(without, None)  # type: ignore[arg-type]
        tables.apply([gradients(parts)], step=step)
        tables[0].skipped_rows += 1


def state(tables: Tables) -> State:
    return [exported(table) for table in tables]


def same(a: State, b: State) -> bool:
    return all(np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def checkpointed(
    shards: Sequence[Tables], checkpoints: Checkpoints, step: int, base: Checkpoint | None = None, **more: Any
) -> Checkpoint:
    partial = checkpoints.begin(step)
    marks = [tables.snapshot("" if base is None else base.id) for tables in shards]
    files = [file for s, mark in enumerate(marks) for file in write_snapshot(mark, partial, shard=s)]
    done = checkpoints.commit(step, files, {}, base=base, **more)
    for tables in shards:
        tables.changed.complete(done.id)
    return done


def loaded(specs: Sequence[TableSpec], checkpoint: Checkpoint, servers: int = 1, seed: int = 7) -> list[Tables]:
    """The tables of so many servers, with the rows of a checkpoint."""
    found = [Tables(specs, seed=seed) for _ in range(servers)]
    for shard, tables in enumerate(found):
        load_snapshots(tables, checkpoint, shard=shard, num_shards=servers)
    return found


class Between:
    """Represents `time` in a walk: calls something where the walk rests."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def sleep(self, seconds: float) -> None:
        self._call()
