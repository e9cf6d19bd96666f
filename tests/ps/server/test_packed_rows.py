"""Rows of fewer than 32 bits a value: every optimizer and precision against float32 rows that numpy rounds, and
such rows through everything that keeps them: servers, journals, snapshots, row streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file

from shardkeep.compression.values.rounding_kernels import row_keys
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.ps.server.table import layout, layout_kernels
from shardkeep.ps.server.table.initializers.initial import Initial, table_key
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.precision_kernels import stochastic
from shardkeep.ps.server.table.stored_rows import StoredRows
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import checkpointed, loaded
from tests.support.one_table import OneTable, exported, stored_rows
from tests.support.push_job import IDS, Job
from tests.support.tables import gradients, of_one_table

LARGEST = {"fp16": 65504.0, "bf16": float(np.array(0x7F7F0000, np.uint32).view(np.float32))}
_NOISE_BITS = {"fp16": 13, "bf16": 16}


def random_bits(key: int, ids_K: np.ndarray, step: int, first: int, count: int) -> np.ndarray:
    """The 32 random bits of columns [first, first + count), uint32 (K, count)."""
    keys_K = np.empty(ids_K.size, np.uint64)
    row_keys(np.uint64(key), np.uint64(0), step, ids_K, keys_K)
    low_K1, high_K1 = (keys_K & np.uint64(0xFFFFFFFF))[:, None], (keys_K >> np.uint64(32))[:, None]
    columns = np.arange(first, first + count, dtype=np.uint64)
    x = (low_K1 + columns * np.uint64(0x9E3779B9)).astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x735A2D97) + high_K1.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def rounded(values_KD: np.ndarray, precision: str, random_KD: np.ndarray) -> np.ndarray:
    """Values of a precision, as float32: of the two around a value the upper one (away from 0) where the part between
    them and the random number add up to 1."""
    if precision == "fp32":
        return values_KD.copy()
    if precision == "int8":
        return _integers(values_KD, random_KD)
    sizes = np.minimum(np.abs(values_KD.astype(np.float64)), LARGEST[precision])
    lower = _halves_below(sizes, precision)
    upper = _halves_above(lower, precision)
    bits = np.where(sizes < 2.0**-14, 21, 13) if precision == "fp16" else np.full(sizes.shape, _NOISE_BITS[precision])
    part = np.floor((sizes - lower) / (upper - lower) * 2.0**bits)
    noise = random_KD >> (32 - bits).astype(np.uint32)
    return np.copysign(np.where(part + noise >= 2.0**bits, upper, lower), values_KD).astype(np.float32)


def _integers(values_KD: np.ndarray, random_KD: np.ndarray) -> np.ndarray:
    most = np.abs(values_KD).max(axis=1, keepdims=True)
    scale = np.float32(most / np.float32(127.0))
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 2.0**-100, np.float32(127.0) / most, np.float32(0.0))
    level = np.clip(values_KD * inverse, -127.0, 127.0).astype(np.float64)
    fixed = np.trunc(level * 2.0**24) + (random_KD >> np.uint32(8))
    return (scale * np.floor(fixed / 2.0**24).astype(np.float32)).astype(np.float32)


def _halves_below(sizes: np.ndarray, precision: str) -> np.ndarray:
    """The largest value that is not above a size from 0 on."""
    if precision == "bf16":
        return (sizes.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    near = sizes.astype(np.float16)
    return np.where(near > sizes, np.nextafter(near, np.float16(0)), near).astype(np.float64)


def _halves_above(values: np.ndarray, precision: str) -> np.ndarray:
    """The value that follows a value of the precision; beyond the last, as if there were another one."""
    if precision == "bf16":
        return (
            (values.astype(np.float32).view(np.uint32).astype(np.int64) + 0x10000)
            .astype(np.uint32)
            .view(np.float32)
            .astype(np.float64)
        )
    exponent = np.maximum(np.floor(np.log2(np.maximum(values, 2.0**-30))), -14)
    return values + 2.0 ** (exponent - 10)


SEED, HALF = 3, np.uint32(1 << 31)
ROWS = ("fp16", "bf16", "int8")
WITHOUT_BF16_STATE = ("sgd", "rowwise_adagrad", "ftrl")
EVERY_PRECISION = [p for p in itertools.product(("fp32", *ROWS), ("fp32", "bf16")) if p != ("fp32", "fp32")]


def spec_of(
    dtype: str = "fp32", state_dtype: str = "fp32", *, dim: int = 7, optimizer: Any = "adam", **more: Any
) -> TableSpec:
    return TableSpec(name="t", dim=dim, optimizer=optimizer, dtype=dtype, state_dtype=state_dtype, **more)


def push(tables: Tables, ids: np.ndarray, grads: np.ndarray, step: int) -> None:
    tables.apply([of_one_table(ids, grads)], step=step)


def expected_after(spec: TableSpec, before: Tables, ids: np.ndarray, grads: np.ndarray, step: int) -> tuple[Any, Any]:
    """Weights and slots of `ids` after an update: the update in float32, then each value rounded in numpy."""
    reference = Tables([spec.model_copy(update={"dtype": "fp32", "state_dtype": "fp32"})], seed=SEED)
    reference[0].load(*exported(before[0]))
    push(reference, ids, grads, step)
    found = exported(reference[0])
    ids_N, rows_ND, slots_NS = (part[np.isin(found[0], ids)] for part in found)
    random = random_bits(int(table_key(SEED, spec.name)), ids_N, step, 0, spec.dim + slots_NS.shape[1])
    rows_ND = rounded(rows_ND, spec.dtype, random[:, : spec.dim])
    return rows_ND, rounded(slots_NS, spec.state_dtype, random[:, spec.dim :])


def pairwise() -> Iterator[tuple[str, str, str, int]]:
    """Every optimizer with half of the precisions, and every precision with every dim."""
    for number, name in enumerate(sorted(OPTIMIZERS)):
        fitting = [p for p in EVERY_PRECISION if p[1] == "fp32" or name not in WITHOUT_BF16_STATE]
        for turn, (rows, state) in enumerate(fitting):
            if (number + turn) % 2 == 0:
                yield name, rows, state, (1, 7, 64)[(number + turn // 2) % 3]


@every(("optimizer", "rows", "state", "dim"), pairwise())
def test_every_optimizer_updates_float32_values_and_rounds_them_once(
    optimizer: str, rows: str, state: str, dim: int
) -> None:
    spec, rng = spec_of(rows, state, dim=dim, optimizer=optimizer), np.random.default_rng(5)
    tables = Tables([spec], seed=SEED)
    for step in range(2):
        ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 5) if step % 2 else rng.integers(0, 90, 70))
        grads = rng.normal(size=(ids.size, dim)).astype(np.float32)
        expected_UD, expected_US = expected_after(spec, tables, ids, grads, step)
        push(tables, ids, grads, step)
        ids_N, rows_ND, slots_NS = exported(tables[0])
        mine = np.isin(ids_N, ids)
        np.testing.assert_array_equal(rows_ND[mine], expected_UD)
        np.testing.assert_array_equal(slots_NS[mine], expected_US)


@every("rows", ["bf16", "int8"])
def test_the_order_of_updates_within_a_push_and_its_size_change_no_bit(rows: str) -> None:
    """Rows are decoded some at a time."""
    rng, ids = np.random.default_rng(0), np.arange(1000)
    grads = rng.normal(size=(1000, 6)).astype(np.float32)
    one, two = (Tables([spec_of(rows, "bf16", dim=6)], seed=SEED) for _ in range(2))
    push(one, ids, grads, 4)
    for part in (slice(700, 1000), slice(0, 3), slice(3, 700)):
        push(two, ids[part], grads[part], 4)
    assert one.digests() == two.digests()


def test_values_at_the_ends_of_a_precision_stay_finite() -> None:
    """Beyond the range the largest number, the smallest fp16 values, int8 rows of zeros and of the largest numbers."""
    for rows in ("fp16", "bf16"):
        table = Tables([spec_of(rows, dim=3, optimizer={"name": "sgd", "lr": 1e6}, init={"name": "zeros"})], seed=SEED)
        push(table, np.arange(500), np.full((500, 3), [-3e38, 3e38, 1e-9], np.float32), 0)
        rows_ND, largest = exported(table[0])[1], np.float32(LARGEST[rows])
        assert np.isfinite(rows_ND).all()
        assert (rows_ND[:, 0] == largest).all() and (rows_ND[:, 1] == -largest).all()

    table = OneTable(spec_of("fp16", dim=4), seed=SEED)
    values = np.array([[2.0**-24, -(2.0**-20), 2.0**-14, 5.5e-6]], np.float32)
    table.load(np.array([1]), values)
    assert np.array_equal(table.pull(np.array([1])), values.astype(np.float16).astype(np.float32))

    table = OneTable(spec_of("int8", dim=4), seed=SEED)
    values = np.array([[0.0] * 4, [3.4e38, -3.4e38, 1e38, 0.0], [1e-40] * 4, [127.0, -127.0, 1.0, 0.0]], np.float32)
    table.load(np.arange(4), values)
    stored = stored_rows(table)
    assert stored.scales_N.tolist()[0] == 0.0 and stored.scales_N.tolist()[2:] == [0.0, 1.0]
    found = table.pull(np.arange(4))
    assert np.isfinite(found).all() and not found[[0, 2]].any()
    assert np.array_equal(found[3], values[3]) and np.allclose(found[1], values[1], rtol=1e-2)


@every(("precision", "dim"), zip(EVERY_PRECISION * 2, itertools.cycle([1, 2, 7, 16, 64])))
def test_loaded_rows_are_rounded_to_the_nearest_value_and_then_stay(precision: tuple[str, str], dim: int) -> None:
    (rows, state), spec, ids = precision, spec_of(*precision, dim=dim), np.arange(200)
    table, rng = OneTable(spec, seed=SEED), np.random.default_rng(1)
    assert np.array_equal(table.pull(ids), Initial(spec.init, seed=SEED, name="t").rows(ids, dim))  # float32 as yet
    assert table.num_rows == 0
    values, slots = rng.normal(size=(200, dim)), rng.normal(size=(200, 2 * dim)) ** 2
    values, slots = values.astype(np.float32), slots.astype(np.float32)
    table.load(ids, values, slots)
    table.load(ids, values, slots)
    _, rows_ND, slots_NS = exported(table)
    np.testing.assert_array_equal(rows_ND, rounded(values, rows, np.full(values.shape, HALF)))
    np.testing.assert_array_equal(slots_NS, rounded(slots, state, np.full(slots.shape, HALF)))
    np.testing.assert_array_equal(table.pull(ids), rows_ND)
    again = OneTable(spec, seed=SEED)
    again.load_stored(stored_rows(table))
    assert again.digest() == table.digest()
    if rows != "int8":
        again.load(ids, rows_ND, slots_NS)
        assert again.digest() == table.digest()


@every("rows", ["fp32", *ROWS])
def test_filled_rows_begin_with_new_optimizer_slots_and_keep_those_they_have(rows: str) -> None:
    spec = spec_of(rows, "bf16", dim=5, optimizer={"name": "adagrad", "initial_accumulator": 0.5})
    table, ones = OneTable(spec, seed=SEED), np.ones((4, 5), np.float32)
    table.load(np.array([2, 9]), ones[:2], 2 * ones[:2])
    table.load(np.array([2, 3, 4, 9]), 3 * ones)
    _, rows_ND, slots_NS = exported(table)
    assert (rows_ND == 3).all() and slots_NS[:, 0].tolist() == [2.0, 0.5, 0.5, 2.0]


@every(("precision", "dim"), zip(EVERY_PRECISION * 2, itertools.cycle([1, 5, 64])))
def test_stored_rows_become_words_and_arrays_and_back_and_padding_stays_zero(
    precision: tuple[str, str], dim: int
) -> None:
    spec, ids = spec_of(*precision, dim=dim, optimizer="partial_rowwise_adam"), np.arange(30)
    tables, again = Tables([spec], seed=SEED), OneTable(spec, seed=SEED)
    for step in range(2):
        push(tables, ids, np.random.default_rng(0).normal(size=(30, dim)).astype(np.float32), step)
    stored, own = stored_rows(tables[0]), RowLayout.of(spec)
    back = StoredRows.of_words(stored.ids_N, *stored.words(own), own)
    for name, array in stored.arrays().items():
        assert np.array_equal(array, back.arrays()[name]) and array.dtype == back.arrays()[name].dtype
    assert stored.of(own) and not stored.of(RowLayout.of(spec_of(dim=dim)))
    again.load_stored(stored)
    assert again.digest() == tables[0].digest(), "words that come from arrays have zeros in their padding"


def test_kernels_find_values_where_the_layout_has_them() -> None:
    assert layout.FIRST_WEIGHT == layout_kernels.FIRST_WEIGHT
    for name, number in layout.PRECISIONS.items():
        assert getattr(layout_kernels, name.upper()) == number
        for count in range(70):
            assert layout.words_of(name, count) == layout_kernels.words_of(number, count)


@every(("rows", "size"), [("fp32", 268), ("fp16", 140), ("bf16", 140), ("int8", 80)])
def test_a_row_takes_the_bytes_that_its_precision_says(rows: str, size: int) -> None:
    assert RowLayout.of(spec_of(rows, dim=64, optimizer="rowwise_adagrad")).row_bytes == size
    both = RowLayout.of(spec_of(rows, "bf16", dim=64, optimizer="adam"))
    assert both.row_bytes - RowLayout.of(spec_of(rows, "fp32", dim=64, optimizer="adam")).row_bytes == -4 * 64


@every("optimizer", WITHOUT_BF16_STATE)
def test_bf16_state_of_an_optimizer_that_gains_nothing_by_it_is_refused_by_name(optimizer: str) -> None:
    with pytest.raises(
        ValidationError, match=rf"state_dtype: bf16 with optimizer\.name: {optimizer}, which .*; allowed: fp32"
    ):
        spec_of(state_dtype="bf16", optimizer=optimizer)


# ---- through servers, journals and files ----

PRECISIONS = (("fp16", "fp32"), ("bf16", "bf16"), ("int8", "fp32"), ("int8", "bf16"), ("fp32", "bf16"))

DECAYING = {"name": "adam", "lr": 0.01, "weight_decay": 0.05, "weight_decay_on": "table"}


@every(("number", "precision"), enumerate(PRECISIONS))
def test_in_sync_no_bit_depends_on_servers_or_on_a_replay(
    tmp_path: Path, number: int, precision: tuple[str, str]
) -> None:
    """Of optimizers that update the rows that are touched, and all rows, in turn."""
    (rows, state_of), optimizer = precision, ({"name": "adam"}, DECAYING)[number % 2]

    def trained(**more: Any) -> Job:
        """All rows at first, then so few that some servers get none."""
        job = Job("sync", optimizer, workers=2, **more)
        for step in range(6):
            chosen = [np.random.default_rng([step, rank]).random(IDS.size) < (0.1 if step else 2.0) for rank in (0, 1)]
            job.push(step, ids={rank: IDS[mine] for rank, mine in enumerate(chosen)})
        return job.fenced(6)

    packed = {"dtype": rows, "state_dtype": state_of}
    killed, plain = trained(journals=tmp_path, **packed), trained()
    assert trained(servers=3, **packed).digests() == killed.digests() != plain.digests()
    assert killed.replayed().tables.digests() == killed.digests()
    assert np.allclose(killed.rows(), plain.rows(), atol=0.05)


def adam_tables(spec: TableSpec, count: int) -> Tables:
    tables = Tables([spec], seed=SEED)
    push(tables, np.arange(count), np.random.default_rng(0).normal(size=(count, spec.dim)).astype(np.float32), 0)
    return tables


@every(("rows", "state_of"), [("fp32", "fp32"), *PRECISIONS], ids=lambda value: str(value))
def test_files_hold_rows_in_their_own_precision(tmp_path: Path, rows: str, state_of: str) -> None:
    done = checkpointed([adam_tables(spec_of(rows, state_of, dim=5), 9)], Checkpoints(tmp_path), 1)
    arrays = load_file(next(done.folder.glob("server-0/*.safetensors")))
    kinds = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int8": np.int8}
    assert arrays["0.0.rows"].dtype == kinds[rows] and arrays["0.0.rows"].shape == (9, 5)
    assert arrays["0.0.slots"].dtype == kinds[state_of] and arrays["0.0.slots"].shape == (9, 10)
    assert len(arrays) == 3 + (rows == "int8"), "float32 rows are stored as before there was a precision"


@every(("then", "now"), list(itertools.permutations([("fp32", "fp32"), *PRECISIONS[1:3]], 2)))
def test_a_checkpoint_of_another_precision_is_rounded_to_the_nearest_value(
    tmp_path: Path, then: tuple[str, str], now: tuple[str, str]
) -> None:
    tables = adam_tables(spec_of(*then, dim=5), 40)
    (read,) = loaded([spec_of(*now, dim=5)], checkpointed([tables], Checkpoints(tmp_path), 1))
    _, rows_ND, slots_NS = exported(tables[0])
    _, found_ND, found_NS = exported(read[0])
    half = np.full((40, 10), 1 << 31, np.uint32)
    np.testing.assert_array_equal(found_ND, rounded(rows_ND, now[0], half[:, :5]))
    np.testing.assert_array_equal(found_NS, rounded(slots_NS, now[1], half))


@every(("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("int8", "bf16")])
def test_rows_of_a_chain_of_two_precisions_are_rounded_once(tmp_path: Path, before: str, after: str) -> None:
    """A job whose tables have another precision since a resume writes increments on the checkpoint from before."""
    new, checkpoints = [spec_of(after, dim=6)], Checkpoints(tmp_path)
    base = checkpointed([adam_tables(spec_of(before, dim=6), 500)], checkpoints, 1)
    (tables,) = loaded(new, base)
    tables.changed.follow(base.id)
    tables.apply([gradients({0: (np.arange(100, 200), np.ones((100, 6), np.float32))})], step=1)
    increment = checkpointed([tables], checkpoints, 2, base)
    (read,) = loaded(new, increment)
    assert read.digests() == tables.digests()
    (block,) = stream_rows(increment, "t", [(0, BUCKETS)])
    (first_block,) = stream_rows(base, "t", [(0, BUCKETS)])
    unchanged = (block.ids_N < 100) | (block.ids_N >= 200)
    assert np.array_equal(block.ids_N, first_block.ids_N)
    assert np.array_equal(block.rows_ND[unchanged], first_block.rows_ND[unchanged])


@every(("rows", "state_of"), PRECISIONS)
def test_rows_of_a_file_are_rounded_once_for_servers_and_readers(tmp_path: Path, rows: str, state_of: str) -> None:
    ids, values = np.arange(300), np.random.default_rng(0).normal(size=(300, 5)).astype(np.float32)
    values[0] = 1 + 2**-8  # half way between two values of bf16
    spec, checkpoints = spec_of(rows, state_of, dim=5), Checkpoints(tmp_path)
    given = StartRows(spec, 300, lambda: iter([(ids, values)]), "the test")
    start = checkpoints.commit(0, write_start_rows([given], checkpoints.begin(0), shard=0), {})
    (tables,) = loaded([spec], start)
    (block,) = stream_rows(start, "t", [(0, BUCKETS)])
    order = np.argsort(block.ids_N)
    assert np.array_equal(block.rows_ND[order], exported(tables[0])[1])
    assert rows != "bf16" or block.rows_ND[order][0].tolist() == [1 + 2**-7] * 5
    # of two equally near values numpy takes the even one
    assert np.allclose(block.rows_ND[order], values, rtol=2**-8, atol=0.02 if rows == "int8" else 0)


@every("value", [0.25, -0.25, 0.999, 126.5, -126.5, 2.0**-20, -(2.0**-20), 0.0, 1.0, -1.0, 127.0, -127.0])
def test_as_many_random_numbers_round_up_as_the_fraction_says(value: float) -> None:
    fraction = float(np.float32(value)) % 1
    least = round(2**24 * (1 - fraction)) << 8  # from this random number on it is rounded up; an integer never
    randoms = {0: 0, 2**32 - 1: 1, least: 1, least - 1: 0} if fraction else {0: 0, 2**31: 0, 2**32 - 1: 0}
    for random, up in randoms.items():
        assert stochastic(np.float32(value), np.uint32(random)) == math.floor(value) + up
