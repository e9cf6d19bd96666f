"""RowIndex against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.ps.placement import server_of
from shardkeep.ps.shard import index_kernels
from shardkeep.ps.shard.index import RowIndex
from shardkeep.ps.shard.records import Records

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
ids_strategy = st.one_of(
    st.sampled_from(EXTREMES),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 300),
    st.integers(0, 300).map(lambda i: i << 40),
)
calls_strategy = st.lists(st.tuples(st.booleans(), st.sets(ids_strategy, max_size=400)), max_size=12)


def sorted_ids(ids: set[int]) -> np.ndarray:
    return np.array(sorted(ids), dtype=np.int64)


@settings(deadline=None, max_examples=60)
@given(calls_strategy)
def test_the_index_answers_as_a_dict_does(calls: list[tuple[bool, set[int]]]) -> None:
    index, expected = RowIndex(), dict[int, int]()
    for adds, ids in calls:
        ids_U = sorted_ids(ids)
        if adds:
            for id_ in ids_U.tolist():
                expected.setdefault(id_, len(expected))
            assert index.find_or_add(ids_U).tolist() == [expected[i] for i in ids_U.tolist()]
        assert index.find(ids_U).tolist() == [expected.get(i, -1) for i in ids_U.tolist()]
        assert len(index) == len(expected)
    everything = sorted_ids(set(expected))
    assert index.find(everything).tolist() == [expected[i] for i in everything.tolist()]


@pytest.mark.parametrize("batch", [1, 7, 1000, 40_000], ids=lambda n: f"{n} at a time")
def test_every_id_stays_findable_while_the_index_grows(batch: int) -> None:
    rng = np.random.default_rng(batch)
    total = 3_000 if batch == 1 else 120_000
    ids = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, total)))
    index, slots = RowIndex(Records(4)), np.full(ids.size, -1)
    for start in range(0, ids.size, batch):
        slots[start : start + batch] = index.find_or_add(ids[start : start + batch])
        known = rng.integers(0, min(start + batch, ids.size), 50)
        assert (index.find(ids[known]) == slots[known]).all()
    assert (slots == np.arange(ids.size)).all()
    assert (index.find(ids) == slots).all()
    assert (index.records.ids(len(index)) == ids).all()
    assert (index.find(np.unique(rng.integers(-(2**63), 2**63 - 1, 1000))) == -1).all()


def test_the_ids_of_one_server_spread_over_the_whole_index() -> None:
    """Placement and index hash the same ids; were they the same hash, every server's index would cluster."""
    ids = np.arange(400_000, dtype=np.int64)
    mine = ids[server_of(ids, 16) == 3]
    home = np.array([index_kernels.mix((int(i) + 0x9E3779B97F4A7C15) % 2**64) % 64 for i in mine], dtype=np.int64)
    counts = np.bincount(home, minlength=64)
    assert np.abs(counts - mine.size / 64).max() < 6 * np.sqrt(mine.size / 64)


def test_finding_changes_nothing() -> None:
    index = RowIndex()
    index.find_or_add(np.arange(100, dtype=np.int64))
    before = index.size_bytes
    assert (index.find(np.arange(1000, 100_000, dtype=np.int64)) == -1).all()
    assert (len(index), index.size_bytes) == (100, before)


def test_growing_never_moves_more_than_a_share_of_the_entries() -> None:
    index = RowIndex()
    index.find_or_add(np.arange(200_000, dtype=np.int64))
    moves: list[int] = []
    for start in range(200_000, 1_000_000, 10_000):
        before = index._moved
        index.find_or_add(np.arange(start, start + 10_000, dtype=np.int64))
        moves.append(index._moved - before)
    assert max(moves) <= 4 * 10_000
    assert any(moves)


def test_records_keep_their_content_while_they_grow() -> None:
    records = Records(2)
    index = RowIndex(records)
    ids = np.arange(-5, 3_000_000, 7, dtype=np.int64)
    for part in np.array_split(ids, 30):
        index.find_or_add(part)
    assert (records.ids(len(index)) == ids).all()
    assert records.size_bytes <= 8 * ids.size + (8 << 20) + 1024
