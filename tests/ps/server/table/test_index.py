"""RowIndex against a dict, and what it takes: memory, and moves a call."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.errors import JobError
from shardkeep.ps.placement import bucket_of, keys_of, server_of
from shardkeep.ps.server.pages import SMALL
from shardkeep.ps.server.table import index as index_module, index_kernels
from shardkeep.ps.server.table.index import EVERY_HASH, MAX_ROWS, MOVE_AT_LEAST, MOVES_PER_ROW
from shardkeep.ps.server.table.index_kernels import FIRST
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.one_table import OneIndex, ids_in

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
MASK = 2**64 - 1


def id_with_mix(mixed: int) -> int:
    """The id whose 64 mixed bits are these: the inverse of `mix`."""
    x = mixed
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = x
        for _ in range(64 // shift):
            unshifted = x ^ (unshifted >> shift)
        x = unshifted * pow(factor, -1, 2**64) & MASK
    return x - 2**64 if x >= 2**63 else x


def colliding(hash_: int, count: int) -> list[int]:
    """Ids with the same 32 bits of hash: one chain, which every tag matches."""
    return [id_with_mix(hash_ << 32 | low) for low in range(count)]


LAST_CHAIN = colliding(2**32 - 1, 800)  # starts at the last entry and resumes at the first
FIRST_CHAIN = colliding(0, 60)
ids_strategy = st.one_of(
    st.sampled_from(EXTREMES),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 300),
    st.integers(0, 300).map(lambda i: i << 40),
    st.sampled_from(LAST_CHAIN[:200]),
    st.sampled_from(FIRST_CHAIN),
    st.sampled_from(colliding(2**31, 60)),
)
# Runs of ids make the index grow: a set of hypothesis alone stays far below the first growth.
run_strategy = st.tuples(st.integers(-5, 40), st.integers(0, 3000)).map(
    lambda run: set(range(run[0] * 1000, run[0] * 1000 + run[1]))
)
Call = tuple[str, set[int]]
"""What is done with ids: they are added, found or removed."""


def calls(ids: st.SearchStrategy[set[int]], **more: int) -> st.SearchStrategy[list[Call]]:
    return st.lists(st.tuples(st.sampled_from(["add", "find", "remove"]), ids), **more)


def sorted_ids(ids: set[int]) -> np.ndarray:
    return np.array(sorted(ids), dtype=np.int64)


def spread(begin: int, end: int) -> np.ndarray:
    """Distinct ids, in no order that the hash knows."""
    return np.arange(begin, end, dtype=np.int64) * np.int64(0x9E3779B97F4A7C15 - 2**64)


def check(made: list[Call]) -> None:
    """Against a dict of slots, which says which row moves where when one is removed."""
    index, slot_of, id_at = OneIndex(4), dict[int, int](), list[int]()
    for call, ids in made:
        ids_U = sorted_ids(ids)
        if call == "add":
            slots = index.find_or_add(ids_U).tolist()
            for id_ in ids_U.tolist():
                if id_ not in slot_of:
                    slot_of[id_] = len(id_at)
                    id_at.append(id_)
            assert slots == [slot_of[i] for i in ids_U.tolist()]
        elif call == "remove":
            for id_ in sorted(ids & slot_of.keys(), key=lambda i: -slot_of[i]):
                slot, last = slot_of.pop(id_), id_at.pop()
                index.remove(slot)
                if last != id_:
                    slot_of[last], id_at[slot] = slot, last
        assert index.find(ids_U).tolist() == [slot_of.get(i, -1) for i in ids_U.tolist()]
        assert len(index) == len(id_at)
        assert ids_in(index.records, len(index)).tolist() == id_at
        if not index.moving:
            assert np.count_nonzero(index.entries[FIRST:]) == len(id_at)  # each id once
    everything = sorted_ids(set(slot_of))
    assert index.find(everything).tolist() == [slot_of[i] for i in everything.tolist()]
    assert sorted(index.slots_between(0, EVERY_HASH).tolist()) == list(range(len(id_at)))


@examples(40)
@given(calls(st.sets(ids_strategy, max_size=400) | run_strategy, max_size=14), st.booleans())
def test_an_index_answers_as_a_dict_does(made: list[Call], large: bool) -> None:
    check([("add", set(range(2000 if large else 0))), *made])


@examples(40)
@given(calls(st.sets(ids_strategy, max_size=60), min_size=20, max_size=60), st.integers(300, 360))
def test_an_index_answers_as_a_dict_does_at_every_stage_of_a_move(made: list[Call], before: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MOVE_AT_LEAST", 4)
        patch.setattr(index_module, "MOVES_PER_ROW", 4)  # 3 would not do: 0.7 + 1/3 of an outgrown array is all of it
        check([("add", set(range(10**6, 10**6 + before))), *made])


@examples(40)
@given(
    calls(st.sets(ids_strategy, max_size=200), max_size=20),
    st.integers(1200, 4000),
    st.integers(0, 400),
    st.integers(1, 3000),
)
def test_an_index_answers_as_a_dict_does_while_it_shrinks_and_grows_again(
    made: list[Call], before: int, left: int, again: int
) -> None:
    first = 10**6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MOVE_AT_LEAST", 4)
        patch.setattr(index_module, "SHRINK_FROM_BYTES", 3 * SMALL)
        check(
            [
                ("add", set(range(first, first + before))),
                ("add", set(LAST_CHAIN[:50])),  # at the end of the array and, behind the turn, at its beginning
                ("remove", set(range(first + left, first + before))),
                *made,
                ("add", set(range(2 * first, 2 * first + again))),
                ("remove", set(range(2 * first, 2 * first + again // 2))),
            ]
        )


@every(("before", "meanwhile"), [(100, 100), (450, 350)])
def test_a_chain_that_goes_on_at_the_first_entry_survives_a_move(
    monkeypatch: pytest.MonkeyPatch, before: int, meanwhile: int
) -> None:
    """Even where it grows, while the index moves, into pages that would be given back."""
    monkeypatch.setattr(index_module, "MOVE_AT_LEAST", 40)
    monkeypatch.setattr(index_module, "MOVES_PER_ROW", 1)
    index, chain = OneIndex(), np.array(LAST_CHAIN[: before + meanwhile], dtype=np.int64)
    assert {int(index_kernels.hash_of(index.entries, int(id_))) for id_ in chain} == {2**32 - 1}
    index.make_room(4000)
    while index.moving:
        index.make_room(0)
    index.find_or_add(chain[:before])
    count = given_back = 0
    while not index.moving:
        index.find_or_add(spread(count, count + 1))
        count += 1
    index.find_or_add(chain[before:])
    while index.moving:
        index.find_or_add(spread(count, count + 1))
        count, given_back = count + 1, max(given_back, index.given_back)
        assert (index.find(chain) >= 0).all()
    assert given_back > 0
    assert (ids_in(index.records, len(index))[index.find(chain)] == chain).all()
    assert (index.find(spread(0, count)) >= 0).all()
    assert np.count_nonzero(index.entries[FIRST:]) == len(index) == count + chain.size


def test_the_ids_of_one_server_spread_over_the_whole_index() -> None:
    """Entries are in the order of placement keys: the keys of one server take all hashes."""
    ids, entries = np.arange(100_000, dtype=np.int64), OneIndex(buckets=(3 * 256, 4 * 256)).entries
    mine = ids[server_of(ids, 16) == 3]
    home = np.array([int(index_kernels.hash_of(entries, int(i))) * 64 >> 32 for i in mine], dtype=np.int64)
    counts = np.bincount(home, minlength=64)
    assert np.abs(counts - mine.size / 64).max() < 6 * np.sqrt(mine.size / 64)


def test_there_is_room_for_as_many_rows_as_the_index_says_and_more_than_it_can_name_are_an_error() -> None:
    index, rooms = OneIndex(), set[int]()
    for start in range(0, 100_000, 500):
        index.find_or_add(spread(start, start + 500))
        room = int(index.descriptor["index"]["room"])
        if room > len(index):
            before = (index.entries.ctypes.data, index.old.ctypes.data, index.records.addresses.ctypes.data)
            index.make_room(room - len(index))
            assert before == (index.entries.ctypes.data, index.old.ctypes.data, index.records.addresses.ctypes.data)
        rooms.add(room)
    assert 0 in rooms and len(rooms) > 3

    index = OneIndex()
    index.descriptor["count"] = MAX_ROWS
    with pytest.raises(JobError, match="a table gets 3000000001 rows on one server; allowed: 3000000000"):
        index.make_room(1)


def test_growing_never_moves_more_than_a_share_of_the_entries() -> None:
    index = OneIndex()
    index.find_or_add(np.arange(20_000, dtype=np.int64))
    moves: list[int] = []
    for start in range(20_000, 100_000, 1000):
        before = index.moved
        index.find_or_add(np.arange(start, start + 1000, dtype=np.int64))
        moves.append(index.moved - before)
    assert max(moves) == MOVES_PER_ROW * 1000 > MOVE_AT_LEAST


@every(
    ("width", "weights_and_slots", "rows"),
    [(18, 64, 20_000), (20, 68, 20_000), (130, 512, 20_000), (18, 64, 500_000)],
)
def test_memory_per_row_is_bounded_at_every_step_and_covers_what_the_process_got(
    width: int, weights_and_slots: int, rows: int
) -> None:
    index, largest, costs, process = OneIndex(width), set[int](), list[float](), psutil.Process()
    before, beyond = process.memory_info().rss, 0
    for start in range(0, rows, rows // 200):
        index.find_or_add(spread(start, start + rows // 200))
        size_bytes = index.size_bytes + index.records.size_bytes(len(index))
        beyond = max(beyond, process.memory_info().rss - before - size_bytes)
        if len(index) >= 1000:
            costs.append(size_bytes / len(index) / (weights_and_slots + 16))
            largest.add(index.entries.size)
    assert np.mean(costs) <= 1.15
    assert max(costs) <= 1.35
    assert len(largest) >= 4  # it really grew
    assert beyond < 4 << 20  # of the interpreter and the ids


def test_an_index_shrinks_far_below_and_does_not_go_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SHRINK_FROM_BYTES", 1 << 17)
    index, count, sizes = OneIndex(), 40_000, list[int]()
    index.find_or_add(spread(0, count))
    largest = index.entries.size
    while len(index) > 200:
        index.remove(len(index) - 1)
        if not sizes or sizes[-1] != index.entries.size:
            assert not sizes or len(index) < 0.15 * sizes[-1]
            sizes.append(index.entries.size)
    assert sizes[0] == largest and sizes == sorted(sizes, reverse=True) and 3 <= len(sizes) <= 6
    assert index.entries.nbytes < 1 << 18
    assert (index.find(spread(0, 200)) == np.arange(200)).all()
    for _ in range(3):  # around the load at which it shrank last
        index.find_or_add(spread(200, 2500))
        while len(index) > 200:
            index.remove(len(index) - 1)
    assert index.entries.size == sizes[-1]


def test_an_index_that_shrinks_moves_no_more_a_call_than_one_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the new array fills up at once, which must not end the move early."""
    monkeypatch.setattr(index_module, "MOVE_AT_LEAST", 512)
    monkeypatch.setattr(index_module, "SHRINK_FROM_BYTES", 1 << 17)
    index, adds, count, shrinks, most = OneIndex(), 300, 60_000, 0, 0
    index.find_or_add(spread(0, count))
    while index.moving:
        index.make_room(0)
    while not index.moving:
        index.remove(len(index) - 1)
    while index.old.size > index.entries.size:
        shrinks, left, old = shrinks + 1, index.old.size - FIRST - index.moved, index.old.size
        index.find_or_add(spread(count, count + adds))
        count += adds
        most = max(most, left if index.old.size != old else left - (old - FIRST - index.moved))
    assert shrinks * MOVES_PER_ROW * adds > 64_000 and most <= MOVES_PER_ROW * adds
    assert (index.find(spread(60_000, count)) >= 0).all()


@every("buckets", [(0, 4096), (1365, 2731)])
def test_the_rows_of_a_bucket_are_neighbours(buckets: tuple[int, int]) -> None:
    ids = np.arange(50_000, dtype=np.int64)
    ids = ids[(bucket_of(ids) >= buckets[0]) & (bucket_of(ids) < buckets[1])]
    index = OneIndex(buckets=buckets)
    for part in np.array_split(ids, 750):  # some of the parts end while entries move
        index.find_or_add(part)
        if index.moving and len(index) % 7 == 0:
            first, end = buckets[0] + 100, buckets[0] + 117
            found = ids_in(index.records, len(index))[index.slots_between(*index.hashes(first, end))]
            known = ids[: len(index)]
            assert set(found.tolist()) == set(known[(bucket_of(known) >= first) & (bucket_of(known) < end)].tolist())


def test_rows_in_the_order_of_their_keys_find_room_in_time() -> None:
    """Else all of them would share the few entries of the first keys, and each search would pass them."""
    ids = np.arange(100_000, dtype=np.int64)
    ids, index, most = ids[np.argsort(keys_of(ids))], OneIndex(), 0
    for part in np.array_split(ids, 30):
        index.make_room_for(part)
        index.find_or_add(part)
        taken = index.entries[FIRST:] != 0
        runs = np.diff(np.flatnonzero(~np.concatenate([[False], taken, [False]])))
        most = max(most, int(runs.max()))
    assert most < 400
    assert index.entries.size < 3 * ids.size
