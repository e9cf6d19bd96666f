"""Placement: every id on exactly one server, for ever the same one, and all servers alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds
from shardkeep.ps.placement import BUCKETS, bucket_of, server_of, split
from tests.support.examples import examples

INT64 = np.iinfo(np.int64)
ids_lists = hnp.arrays(np.int64, st.integers(0, 200), elements=st.integers(INT64.min, INT64.max), unique=True).map(
    np.sort
)
servers = st.integers(1, 40)


def jagged(ids_U: np.ndarray) -> JaggedIds:
    return JaggedIds.of_arrays(Catalog([TableSpec(name="t")]), {"t": ids_U})


@examples()
@given(ids_lists, servers)
def test_a_split_is_a_partition_of_whole_buckets_that_keeps_the_order(ids_U: np.ndarray, num_servers: int) -> None:
    """An id's bucket is the top of the mixed id; where it lives does not depend on its company."""
    parts = split(jagged(ids_U), num_servers)
    whole, buckets = np.arange(ids_U.size), bucket_of(ids_U)
    positions = [whole if num_servers == 1 else parts.positions(server) for server in range(num_servers)]
    assert [part.size for part in positions] == [parts.count(server) for server in range(num_servers)]
    assert (np.sort(np.concatenate(positions)) == whole).all()
    for server, part in enumerate(positions):
        assert (np.diff(part) > 0).all()
        assert (server_of(ids_U[part], num_servers) == server).all()
        assert (buckets[part] * num_servers // BUCKETS == server).all()
    assert buckets.tolist() == [mix(id_ % 2**64) >> 52 for id_ in ids_U.tolist()]


def test_the_rule_is_this_one_for_ever_and_one_server_splits_without_a_copy() -> None:
    ids_U = np.arange(10, dtype=np.int64)
    assert np.shares_memory(split(jagged(ids_U), 1).ids_of(0, ids_U), ids_U)

    # Checkpoints and running jobs rely on it: a change is a change of format.
    ids = np.array([0, 1, 2, -1, INT64.min, INT64.max, 123456789], dtype=np.int64)
    assert bucket_of(ids).tolist() == [0, 1385, 3517, 2893, 604, 1446, 3873]
    assert server_of(ids, 3).tolist() == [0, 1, 2, 2, 0, 1, 2]


@examples()
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([(4, 4, 4), (3, 1, 7), (2,)]), st.booleans())
def test_rows_taken_for_the_servers_and_put_back_are_the_same_rows(
    seed: int, num_servers: int, dims: tuple[int, ...], halves: bool
) -> None:
    rng = np.random.default_rng(seed)
    catalog = Catalog([TableSpec(name=f"t{t}", dim=dim) for t, dim in enumerate(dims)])
    by_table = {f"t{t}": np.unique(rng.integers(INT64.min, INT64.max, rng.integers(0, 40))) for t in range(len(dims))}
    ids = JaggedIds.of_arrays(catalog, by_table)
    values = rng.normal(size=ids.layout.num_values).astype(np.float32)
    parts = split(ids, num_servers)
    back = np.full_like(values, np.nan)
    for server in range(num_servers):
        widths_T = catalog.dims_T * (2 if halves else 4)
        encoded = values.astype(np.float16).view(np.uint8) if halves else values.view(np.uint8)
        taken = np.empty(int((parts.counts_ST[server] * widths_T).sum()), np.uint8)
        parts.take_rows(server, ids.layout, encoded, widths_T, taken)
        rows = taken.view(np.float16).astype(np.float32) if halves else taken.view(np.float32)
        parts.put_rows(server, ids.layout, rows, back)
    assert (back == (values.astype(np.float16).astype(np.float32) if halves else values)).all()
    assert parts.counts_ST.sum(0).tolist() == [by_table[name].size for name in catalog.names]


def mix(x: int) -> int:
    """splitmix64's finalizer in plain integers (Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
