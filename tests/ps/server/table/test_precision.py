"""Rows of fewer than 32 bits a value: every optimizer and precision against float32 rows that numpy rounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table import layout, layout_kernels
from shardkeep.ps.server.table.initializers.initial import Initial, table_key
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.stored_rows import StoredRows
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.one_table import OneTable, exported, records_of, stored_rows
from tests.support.rounding import LARGEST, random_bits, rounded
from tests.support.tables import of_one_table

SEED, HALF = 3, np.uint32(1 << 31)
ROWS = ("fp16", "bf16", "int8")
WITHOUT_BF16_STATE = ("sgd", "rowwise_adagrad", "ftrl")
PRECISIONS = [p for p in itertools.product(("fp32", *ROWS), ("fp32", "bf16")) if p != ("fp32", "fp32")]
DIMS = (1, 7, 64)


def spec_of(
    dtype: str = "fp32", state_dtype: str = "fp32", *, dim: int = 7, optimizer: Any = "adam", **more: Any
) -> TableSpec:
    return TableSpec(name="t", dim=dim, optimizer=optimizer, dtype=dtype, state_dtype=state_dtype, **more)


def table_of(spec: TableSpec) -> OneTable:
    return OneTable(spec, seed=SEED)


def applied(tables: Tables, ids: np.ndarray, grads: np.ndarray, step: int) -> None:
    tables.apply([of_one_table(ids, grads)], step=step)


def float_table(spec: TableSpec) -> Tables:
    """An empty table of the same name whose rows are float32."""
    return Tables([spec.model_copy(update={"dtype": "fp32", "state_dtype": "fp32"})], seed=SEED)


def expected_after(spec: TableSpec, before: Tables, ids: np.ndarray, grads: np.ndarray, step: int) -> tuple[Any, Any]:
    """Weights and slots of `ids` after an update: the update in float32, then each value rounded in numpy."""
    reference = float_table(spec)
    reference[0].load(*exported(before[0]))
    applied(reference, ids, grads, step)
    ids_N, rows_ND, slots_NS = exported(reference[0])
    mine = np.isin(ids_N, ids)
    rows_ND, slots_NS = rows_ND[mine], slots_NS[mine]
    key = int(table_key(SEED, spec.name))
    random = random_bits(key, ids_N[mine], step, 0, spec.dim + slots_NS.shape[1])
    return rounded(rows_ND, spec.dtype, random[:, : spec.dim]), rounded(
        slots_NS, spec.state_dtype, random[:, spec.dim :]
    )


def pairwise() -> Iterator[tuple[str, str, str, int]]:
    """Every optimizer with half of the precisions, and every precision with every dim."""
    for number, name in enumerate(sorted(OPTIMIZERS)):
        fitting = [p for p in PRECISIONS if p[1] == "fp32" or name not in WITHOUT_BF16_STATE]
        for turn, (rows, state) in enumerate(fitting):
            if (number + turn) % 2 == 0:
                yield name, rows, state, DIMS[(number + turn // 2) % 3]


@every(("optimizer", "rows", "state", "dim"), pairwise())
def test_every_optimizer_updates_float32_values_and_rounds_them_once(
    optimizer: str, rows: str, state: str, dim: int
) -> None:
    spec, rng = spec_of(rows, state, dim=dim, optimizer=optimizer), np.random.default_rng(5)
    tables = Tables([spec], seed=SEED)
    for step in range(3):
        ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 5) if step % 2 else rng.integers(0, 90, 70))
        grads = rng.normal(size=(ids.size, dim)).astype(np.float32)
        expected_UD, expected_US = expected_after(spec, tables, ids, grads, step)
        applied(tables, ids, grads, step)
        ids_N, rows_ND, slots_NS = exported(tables[0])
        mine = np.isin(ids_N, ids)
        np.testing.assert_array_equal(rows_ND[mine], expected_UD)
        np.testing.assert_array_equal(slots_NS[mine], expected_US)


@every("rows", ROWS)
def test_the_mean_over_many_ids_is_the_exact_value(rows: str) -> None:
    count, dim = 40_000, 5
    values = np.array([1.0, 0.3337, -0.12345, 1e-3, -3e-5], np.float32)
    table = Tables([spec_of(rows, dim=dim, optimizer={"name": "sgd", "lr": 1.0}, init={"name": "zeros"})], seed=SEED)
    ids = np.arange(count)
    applied(table, ids, np.broadcast_to(-values, (count, dim)).copy(), 0)
    rows_ND = exported(table[0])[1].astype(np.float64)
    for d in range(dim):
        found = np.unique(rows_ND[:, d])
        assert found.size <= 2, "a value has two neighbours"
        width = found[-1] - found[0]
        assert abs(rows_ND[:, d].mean() - values[d]) <= 5 * 0.5 * width / np.sqrt(count) + 1e-7 * abs(values[d])
    assert sum(np.unique(rows_ND[:, d]).size == 2 for d in range(dim)) >= 3


def test_the_mean_of_a_small_state_over_many_ids_is_the_exact_value() -> None:
    """A bf16 sum of squares does not stop to rise when its addends are below half a place."""
    table = Tables(
        [spec_of(state_dtype="bf16", dim=4, optimizer={"name": "adagrad", "initial_accumulator": 64.0})], seed=SEED
    )
    ids, grads = np.arange(2000), np.full((2000, 4), 0.1, np.float32)
    for step in range(50):
        applied(table, ids, grads, step)
    slots = exported(table[0])[2]
    assert (slots == 64.0).any() and abs(slots.mean() - 64.5) < 0.02


def test_equal_keys_round_alike_and_others_do_not() -> None:
    def trained(step: int = 0, name: str = "t", seed: int = SEED, first: int = 0) -> np.ndarray:
        spec = TableSpec(name=name, dim=8, optimizer={"name": "sgd"}, init={"name": "zeros"}, dtype="bf16")
        tables = Tables([spec], seed=seed)
        applied(tables, np.arange(first, first + 100), np.full((100, 8), 0.3, np.float32), step)
        return exported(tables[0])[1]

    first = trained()
    assert np.array_equal(first, trained())
    for other in (trained(step=1), trained(name="u"), trained(seed=4), trained(first=1)):
        assert not np.array_equal(first, other)
    assert np.array_equal(first[1:], trained(first=1)[:-1])
    assert not (first == first[:, :1]).all(), "columns have numbers of their own"


@every("rows", ROWS)
def test_the_order_of_updates_within_a_push_and_its_size_change_no_bit(rows: str) -> None:
    """Rows are decoded some at a time."""
    rng, ids = np.random.default_rng(0), np.arange(1000)
    grads = rng.normal(size=(1000, 6)).astype(np.float32)
    one, two = (Tables([spec_of(rows, "bf16", dim=6)], seed=SEED) for _ in range(2))
    applied(one, ids, grads, 4)
    for part in (slice(700, 1000), slice(0, 3), slice(3, 700)):
        applied(two, ids[part], grads[part], 4)
    assert one.digests() == two.digests()


@every("rows", ["fp16", "bf16"])
def test_values_beyond_the_range_become_the_largest_number(rows: str) -> None:
    table = Tables([spec_of(rows, dim=3, optimizer={"name": "sgd", "lr": 1e6}, init={"name": "zeros"})], seed=SEED)
    applied(table, np.arange(500), np.full((500, 3), [-3e38, 3e38, 1e-9], np.float32), 0)
    rows_ND = exported(table[0])[1]
    assert np.isfinite(rows_ND).all()
    assert (rows_ND[:, 0] == np.float32(LARGEST[rows])).all() and (rows_ND[:, 1] == -np.float32(LARGEST[rows])).all()


def test_the_smallest_fp16_values_stay_and_int8_rows_of_zeros_and_of_the_largest_are_finite() -> None:
    table = table_of(spec_of("fp16", dim=4))
    values = np.array([[2.0**-24, -(2.0**-20), 2.0**-14, 5.5e-6]], np.float32)
    table.load(np.array([1]), values)
    assert np.array_equal(table.pull(np.array([1])), values.astype(np.float16).astype(np.float32))

    table = table_of(spec_of("int8", dim=4))
    values = np.array([[0.0] * 4, [3.4e38, -3.4e38, 1e38, 0.0], [1e-40] * 4, [127.0, -127.0, 1.0, 0.0]], np.float32)
    table.load(np.arange(4), values)
    stored = stored_rows(table)
    assert stored.scales_N.tolist()[0] == 0.0 and stored.scales_N.tolist()[2:] == [0.0, 1.0]
    rows = table.pull(np.arange(4))
    assert np.isfinite(rows).all() and not rows[[0, 2]].any()
    assert np.array_equal(rows[3], values[3]) and np.allclose(rows[1], values[1], rtol=1e-2)


@every(("rows", "state"), PRECISIONS)
def test_a_pull_of_an_absent_id_is_its_float32_initial_value(rows: str, state: str) -> None:
    spec, ids = spec_of(rows, state), np.arange(-50, 50)
    table = table_of(spec)
    assert np.array_equal(table.pull(ids), Initial(spec.init, seed=SEED, name="t").rows(ids, 7))
    assert table.num_rows == 0


@every(("rows", "state"), PRECISIONS)
@every("dim", [1, 2, 7, 16], ids=lambda dim: f"dim {dim}")
def test_loaded_rows_are_rounded_to_the_nearest_value_and_then_stay(rows: str, state: str, dim: int) -> None:
    spec, ids = spec_of(rows, state, dim=dim), np.arange(200)
    table, rng = table_of(spec), np.random.default_rng(1)
    values, slots = rng.normal(size=(200, dim)), rng.normal(size=(200, 2 * dim)) ** 2
    values, slots = values.astype(np.float32), slots.astype(np.float32)
    table.load(ids, values, slots)
    table.load(ids, values, slots)
    _, rows_ND, slots_NS = exported(table)
    np.testing.assert_array_equal(rows_ND, rounded(values, rows, np.full(values.shape, HALF)))
    np.testing.assert_array_equal(slots_NS, rounded(slots, state, np.full(slots.shape, HALF)))
    np.testing.assert_array_equal(table.pull(ids), rows_ND)
    again = table_of(spec)
    again.load_stored(stored_rows(table))
    assert again.digest() == table.digest()
    if rows != "int8":
        again.load(ids, rows_ND, slots_NS)
        assert again.digest() == table.digest()


@every("rows", ["fp32", *ROWS])
def test_filled_rows_begin_with_new_optimizer_slots_and_keep_those_they_have(rows: str) -> None:
    spec = spec_of(rows, "bf16", dim=5, optimizer={"name": "adagrad", "initial_accumulator": 0.5})
    table, ones = table_of(spec), np.ones((4, 5), np.float32)
    table.load(np.array([2, 9]), ones[:2], 2 * ones[:2])
    table.load(np.array([2, 3, 4, 9]), 3 * ones)
    _, rows_ND, slots_NS = exported(table)
    assert (rows_ND == 3).all() and slots_NS[:, 0].tolist() == [2.0, 0.5, 0.5, 2.0]


@every(("rows", "state"), PRECISIONS)
@every("dim", [1, 5, 64], ids=lambda dim: f"dim {dim}")
def test_stored_rows_become_words_and_arrays_and_back(rows: str, state: str, dim: int) -> None:
    spec, ids = spec_of(rows, state, dim=dim), np.arange(30)
    tables = Tables([spec], seed=SEED)
    applied(tables, ids, np.random.default_rng(0).normal(size=(30, dim)).astype(np.float32), 0)
    stored, own = stored_rows(tables[0]), RowLayout.of(spec)
    back = StoredRows.of_words(stored.ids_N, *stored.words(own), own)
    for name, array in stored.arrays().items():
        assert np.array_equal(array, back.arrays()[name]) and array.dtype == back.arrays()[name].dtype
    assert stored.of(own) and not stored.of(RowLayout.of(spec_of(dim=dim)))


@every(("rows", "state"), PRECISIONS)
@every("dim", [1, 5], ids=lambda dim: f"dim {dim}")
def test_the_padding_of_a_record_stays_zero(rows: str, state: str, dim: int) -> None:
    tables = Tables([spec_of(rows, state, dim=dim, optimizer="partial_rowwise_adam")], seed=SEED)
    for step in range(3):
        applied(tables, np.arange(50), np.ones((50, dim), np.float32), step)
    table = tables[0]
    as_words = table_of(tables[0].spec)
    as_words.load_stored(stored_rows(table))
    assert as_words.digest() == table.digest(), "words that come from arrays have zeros in their padding"
    assert not records_of(table.records, 50)[:, table.layout.used :].any()


def test_kernels_find_values_where_the_layout_has_them() -> None:
    assert layout.FIRST_WEIGHT == layout_kernels.FIRST_WEIGHT
    for name, number in layout.PRECISIONS.items():
        assert getattr(layout_kernels, name.upper()) == number
        for count in range(70):
            assert layout.words_of(name, count) == layout_kernels.words_of(number, count)


SIZES = {("fp32", "fp32"): 268, ("fp16", "fp32"): 140, ("bf16", "fp32"): 140, ("int8", "fp32"): 80}


@every("rows", ["fp32", *ROWS])
def test_a_row_takes_the_bytes_that_its_precision_says(rows: str) -> None:
    found = RowLayout.of(spec_of(rows, dim=64, optimizer="rowwise_adagrad"))
    assert found.row_bytes == SIZES[rows, "fp32"]
    both = RowLayout.of(spec_of(rows, "bf16", dim=64, optimizer="adam"))
    assert both.row_bytes - RowLayout.of(spec_of(rows, "fp32", dim=64, optimizer="adam")).row_bytes == -4 * 64


@every("optimizer", WITHOUT_BF16_STATE)
def test_bf16_state_of_an_optimizer_that_gains_nothing_by_it_is_refused_by_name(optimizer: str) -> None:
    with pytest.raises(
        ValidationError, match=rf"state_dtype: bf16 with optimizer\.name: {optimizer}, which .*; allowed: fp32"
    ):
        spec_of(state_dtype="bf16", optimizer=optimizer)


def test_the_state_of_ftrl_is_its_row() -> None:
    """Why its state is not bf16: the row follows from the slots alone. Its weights before have no effect."""
    spec = spec_of(optimizer={"name": "ftrl", "lr": 1.0})
    tables = [Tables([spec], seed=SEED) for _ in range(2)]
    slots = np.full((1, 14), 3.0, np.float32)
    for table, weight in zip(tables, (0.25, 0.5), strict=True):
        table[0].load(np.array([1]), np.full((1, 7), weight, np.float32), slots)
        applied(table, np.array([1]), np.zeros((1, 7), np.float32), 0)
    assert np.array_equal(*(exported(table[0])[1] for table in tables))
