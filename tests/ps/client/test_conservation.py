"""Nothing of a gradient is lost on its way out: sent + waiting + given up = the sum of all gradients, at every step,
for every number format with every way to choose what is sent."""

# V = ids of a step, K = sent rows, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.selection.registry import selector_of
from shardkeep.compression.values.registry import FORMATS
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from shardkeep.ps.wire.rows import RowReader
from tests.support.cases import every

CATALOG = Catalog([TableSpec(name="a", dim=8), TableSpec(name="b", dim=8), TableSpec(name="c", dim=3)])
GROUPS = {8: ("a", "b"), 3: ("c",)}  # the tables of one dim share a pool
STEPS = 5
CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "top rows": {"keep": 0.2},
    "top rows, moments": {"keep": 0.2, "second_moment": True},
    "rows, warm-up": {"keep": 0.05, "warmup_steps": 2},
    "values": {"select": "top_k", "keep": 0.1},
}
AMPLE = 5000
"""Rows of a pool that gives nothing up."""
Sums = dict[tuple[str, int], np.ndarray]


def pushes() -> Iterator[dict[str, Any]]:
    """Every format and scale. Every choice with both pools, without rounding errors and with them."""
    for name, entry in FORMATS.items():
        for scale in entry.config:
            yield {"values": name, "scale": scale, "pool_rows": AMPLE} | CHOICES["top rows"]
    for choice, name, pool_rows in product(CHOICES, ("fp32", "int4"), (AMPLE, 40)):
        yield {"values": name, "pool_rows": pool_rows} | CHOICES[choice]


@every("push", pushes())
def test_what_is_sent_waits_or_is_given_up_makes_up_the_sum_of_all_gradients(push: dict[str, Any]) -> None:
    compression = CompressionConfig(push=push)  # type: ignore[arg-type]
    memory = RowMemory(CATALOG, compression, selector_of(compression.push.select), history=2)
    compressor = Compressor(RowReader(CATALOG, compression), compression.push, memory)
    made: Sums = {}
    sent: Sums = {}
    waited = False
    for step in range(STEPS):
        last = step == STEPS - 1
        ids, grads = drawn(step)
        add(made, {(name, int(i)): grads[name][k] for name in ids for k, i in enumerate(ids[name])})
        packed = compressor.compress(step, ids, grads, last=last)
        rows = compressor.formats.decode(packed.encoded, np.diff(packed.ids.layout.starts_T1))
        arrived = JaggedRows(packed.ids.layout, rows)
        add(sent, {(name, int(i)): arrived[name][k] for name in packed.ids for k, i in enumerate(packed.ids[name])})
        owed = waiting(memory)
        waited |= bool(owed)
        missing = np.concatenate([made[key] - sent.get(key, 0) - owed.get(key, 0) for key in sorted(made)])
        given_up = memory.lost_squares
        assert (missing**2).sum() <= 1e-8 + 1.00001 * (step + 1) * given_up  # of one row at most once in a step
        assert given_up == 0 or push["pool_rows"] < AMPLE
        assert set(sent) <= set(made)
    assert waited == (push["values"] != "fp32" or "keep" in push)


def drawn(step: int) -> tuple[JaggedIds, JaggedRows]:
    """Ids that come back, of three tables, and gradients of very different sizes."""
    rng = np.random.default_rng(step)
    wanted = {
        "a": np.unique(rng.zipf(1.3, 60) % 300),
        "b": rng.permutation(50)[:9],
        "c": np.unique(rng.integers(0, 90, 20)),
    }
    ids = JaggedIds.of_arrays(CATALOG, {name: np.sort(part).astype(np.int64) for name, part in wanted.items()})
    sizes = {name: np.exp(rng.normal(size=(ids[name].size, 1)) * 2 - 3) for name in ids}
    dims = dict(zip(CATALOG.names, CATALOG.dims_T.tolist(), strict=True))
    grads = {name: rng.normal(size=(ids[name].size, dims[name])) * sizes[name] for name in ids}
    return ids, JaggedRows.of_arrays(ids, {name: part.astype(np.float32) for name, part in grads.items()})


def add(total: Sums, rows: dict[tuple[str, int], np.ndarray]) -> None:
    for key, row_D in rows.items():
        total[key] = total.get(key, np.zeros(row_D.size)) + row_D.astype(np.float64)


def waiting(memory: RowMemory) -> Sums:
    state, found = memory.state(), Sums()
    for dim, tables in GROUPS.items():
        for table, id_, rest_D in zip(*(state[f"{dim}/{key}"] for key in ("tables", "ids", "rests")), strict=True):
            found[tables[int(table)], int(id_)] = np.asarray(rest_D, dtype=np.float64)
    return found
