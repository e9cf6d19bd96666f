"""Table: initial values, sums, digests, export and load."""

from __future__ import annotations

import itertools
import math

import numpy as np
import xxhash
from hypothesis import given, strategies as st

from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import keys_of
from shardkeep.ps.server.table.initializers.config import INITIALIZERS, InitConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.stored_rows import StoredRows
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.one_table import OneTable, exported, stored_rows

IDS = np.array([-(2**63), -7, -1, 0, 3, 2**40, 2**63 - 1], dtype=np.int64)


def make_table(
    optimizer: str = "rowwise_adagrad", *, dim: int = 5, seed: int = 1, name: str = "t", init: str = "uniform"
) -> OneTable:
    return OneTable(
        TableSpec(name=name, dim=dim, optimizer={"name": optimizer}, init=InitConfig(name=init, scale=0.1)), seed=seed
    )


def gradients(count: int, dim: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


def many_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


# ---- initial values ----


def test_initial_values_depend_on_seed_name_id_and_column_alone_and_rows_start_from_them() -> None:
    rows = make_table().pull(IDS)
    assert (rows == make_table().pull(IDS)).all()
    assert (rows[2:4] == make_table("adam").pull(IDS[2:4])).all()
    assert not (rows == make_table(seed=2).pull(IDS)).any()
    assert not (rows == make_table(name="u").pull(IDS)).any()
    assert np.unique(rows).size == rows.size
    table = make_table("sgd")
    shown = table.pull(IDS)
    table.apply(IDS[:3], np.zeros((3, 5), np.float32), step=0)
    state = (table.num_rows, table.size_bytes, table.digest())
    assert (table.pull(IDS) == shown).all()
    assert (table.num_rows, table.size_bytes, table.digest()) == state and table.num_rows == 3
    column = make_table().pull(np.arange(40_000, dtype=np.int64))[:, 0]
    assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 0.025


def test_every_law_has_a_number_and_gives_values_by_its_parameters() -> None:
    assert set(INITIALIZERS) == set(InitConfig.model_fields["name"].annotation.__args__)
    assert (initial_rows({"name": "constant", "value": -0.3}, IDS) == np.float32(-0.3)).all()
    assert (initial_rows({"name": "zeros"}, IDS) == 0).all()
    short, long = {"scale": 0.1}, {"low": -0.1, "high": 0.1}
    assert (initial_rows(short, IDS) == initial_rows(long, IDS)).all()
    short, long = {"name": "normal", "scale": 0.1}, {"name": "normal", "mean": 0.0, "std": 0.1}
    assert (initial_rows(short, IDS) == initial_rows(long, IDS)).all()
    for low, high in ((2.0, 5.0), (-0.1, 0.1)):
        rows, width = initial_rows({"name": "uniform", "low": low, "high": high}, many_ids(40_000)), high - low
        assert low <= rows.min() < low + width / 3000 and high - width / 3000 < rows.max() <= high
        assert abs(rows.mean() - (low + high) / 2) < 5 * (width / np.sqrt(12)) / np.sqrt(rows.size)
        assert abs(rows.std() / (width / np.sqrt(12)) - 1) < 0.01
        assert np.abs(np.corrcoef(rows.T) - np.eye(5)).max() < 5 / np.sqrt(len(rows))
    rows = initial_rows({"name": "normal", "mean": -1.0, "std": 0.25}, many_ids(40_000)).astype(np.float64)
    scaled = (rows + 1.0) / 0.25
    assert abs(scaled.mean()) < 5 / np.sqrt(rows.size)
    assert abs(scaled.std() - 1) < 0.01
    assert abs((scaled**3).mean()) < 0.05 and abs((scaled**4).mean() - 3) < 0.1
    assert np.abs(np.corrcoef(scaled.T) - np.eye(5)).max() < 5 / np.sqrt(len(rows))
    for low in (100.0, -101.0, 0.1):  # bounds that float32 rounds
        rows = initial_rows({"name": "uniform", "low": low, "high": low + 1e-4}, many_ids(40_000))
        assert rows.min() >= np.float32(low) and rows.max() <= np.float32(low + 1e-4)


def initial_rows(init: dict[str, object], ids: np.ndarray) -> np.ndarray:
    return OneTable(TableSpec(name="t", dim=5, init=init), seed=1).pull(ids)


def splitmix(x: int) -> int:
    """The finalizer of Steele et al. 2014 (mix13)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def hashes(name: str, seed: int, id_: int, pairs: int) -> list[int]:
    golden = 0x9E3779B97F4A7C15
    key = splitmix(seed ^ xxhash.xxh3_64_intdigest(name.encode()))
    base = splitmix(key ^ splitmix((id_ + golden) % 2**64))
    return [splitmix((base + (pair + 1) * golden) % 2**64) for pair in range(pairs)]


def test_the_default_values_are_those_of_earlier_versions() -> None:
    """Scale times a multiple of 2**-23 in [-1, 1), in float32; normal after Box and Muller."""
    uniform, normal = initial_rows({}, IDS), initial_rows({"name": "normal", "scale": 0.1}, IDS)
    for i, id_ in enumerate(IDS.tolist()):
        expected: list[np.float32] = []
        angles: list[np.float32] = []
        for bits in hashes("t", 1, id_, 3):
            for part in (bits >> 40, bits >> 8 & 0xFFFFFF):
                expected.append((np.float32(part) * np.float32(2.0**-23) - np.float32(1.0)) * np.float32(0.05))
            radius = math.sqrt(-2.0 * math.log(((bits >> 32) + 1.0) / 2**32)) * float(np.float32(0.1))
            angle = 2.0 * math.pi * ((bits & 0xFFFFFFFF) / 2**32)
            angles += [np.float32(radius * math.cos(angle)), np.float32(radius * math.sin(angle))]
        assert uniform[i].tolist() == expected[:5]
        assert np.allclose(normal[i], angles[:5], rtol=1e-6, atol=0)


# ---- digest, export, load ----


def test_the_digest_sees_every_bit_of_weights_and_slots() -> None:
    table = make_table("adam", dim=3)
    table.apply(IDS, gradients(IDS.size, 3), step=0)
    ids, rows, slots = exported(table)
    seen = {table.digest()}
    for array in (rows, slots):
        for at in [(0, 0), (3, 1), (6, array.shape[1] - 1)]:
            changed = [rows.copy(), slots.copy()]
            target = changed[0] if array is rows else changed[1]
            target[at] = np.nextafter(target[at], np.float32(9))
            copy = make_table("adam", dim=3)
            copy.load(ids, *changed)
            seen.add(copy.digest())
    swapped = make_table("adam", dim=3)
    swapped.load(ids, rows[[1, 0, *range(2, 7)]], slots)
    seen.add(swapped.digest())
    fewer = make_table("adam", dim=3)
    fewer.load(ids[1:], rows[1:], slots[1:])
    seen.add(fewer.digest())
    assert len(seen) == 9


@every(("optimizer", "dim"), zip(sorted(OPTIMIZERS), itertools.cycle([1, 4, 5])))
def test_an_exported_table_loads_to_the_same_state_and_trains_on_alike(optimizer: str, dim: int) -> None:
    """And its digest does not depend on the order of rows or on how they are spread."""
    table, copy, backwards, *parts = (make_table(optimizer, dim=dim) for _ in range(6))
    copy.load(*exported(table))  # nothing as yet
    assert copy.num_rows == 0
    ids = many_ids(2000)
    grads = gradients(ids.size, dim)
    table.apply(ids, grads, step=0)
    found, rows, slots = exported(table)
    assert (found == ids).all()
    assert (rows == table.pull(ids)).all()
    for chunk in np.array_split(np.arange(ids.size), 7)[::-1]:
        backwards.apply(ids[chunk], grads[chunk], step=0)
    for i, part in enumerate(parts):
        part.apply(ids[ids % 3 == i], grads[ids % 3 == i], step=0)
    assert table.digest() == backwards.digest() == sum(part.digest() for part in parts) % 2**128
    shuffled = np.random.default_rng(0).permutation(ids.size)
    copy.load(found[shuffled], rows[shuffled], slots[shuffled])
    for one in (table, copy):
        one.apply(ids[::2], gradients(ids[::2].size, dim, 8), step=1)
    assert copy.digest() == table.digest()


@examples(15)
@given(
    st.sampled_from([0, 1, 2, 63, 64, 65, 357, 358, 511, 512, 513, 4095, 4096, 4097]),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_rows_that_are_loaded_at_once_into_reserved_room_are_those_loaded_a_few_at_a_time(
    count: int, twice: int, by_key: bool, seed: int
) -> None:
    """Of an id that comes twice the last row counts. Nothing grows, and other rows are found and added as before."""
    rng, one, many = np.random.default_rng(seed), make_table(), make_table()
    ids = rng.permutation(many_ids(count, seed))
    ids = np.concatenate([ids[np.argsort(keys_of(ids))] if by_key else ids, ids[:twice]])
    rows, slots = gradients(ids.size, seed=seed), gradients(ids.size, 1, seed)
    for part in np.array_split(np.arange(ids.size), 1 + ids.size // 50):
        one.load(ids[part], rows[part], slots[part])
    many.index.make_room(count, reserve=True)
    room, entries = many.records.capacity, many.index.num_entries
    many.load_stored(StoredRows(ids, rows, slots))
    assert (many.records.capacity, many.index.num_entries, many.num_rows) == (room, entries, count)
    assert many.digest() == one.digest() and one.num_rows == count
    more = np.unique(np.concatenate([ids[:100], many_ids(300, seed + 1)]))
    for table in (one, many):
        table.apply(more, np.ones((more.size, 5), np.float32), step=1)
    assert many.digest() == one.digest()
    again = make_table()
    again.load_stored(stored_rows(many))
    assert again.digest() == one.digest()
