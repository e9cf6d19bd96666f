"""Many tables in one call equal each table on its own: pulls, sums of pushes, updates, slots found before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, strategies as st

from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Gradients
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.server.table.optimizers.sgd import SgdConfig
from shardkeep.ps.server.table.policies.config import AdmitConfig
from shardkeep.ps.server.tables import Tables, sum_of
from tests.support.examples import examples
from tests.support.one_table import OneTable, exported
from tests.support.tables import SPECS, ByTable, gradients, of_one_table, sections


def random_push(rng: np.random.Generator, num_ids: int = 40, specs: Sequence[TableSpec] = SPECS) -> ByTable:
    found = {}
    for t in [t for t in range(len(specs)) if rng.random() < 0.7]:
        ids = np.unique(rng.integers(-num_ids, num_ids, rng.integers(0, 30)))
        found[t] = (ids, rng.normal(size=(ids.size, specs[t].dim)).astype(np.float32))
    return found


def by_hand(pushes: list[ByTable]) -> ByTable:
    """The sum in the order of the pushes, row by row; -0.0 + x has the bits of x."""
    total: ByTable = {}
    for t in sorted({t for push in pushes for t in push}):
        parts = [push[t] for push in pushes if t in push]
        ids = np.unique(np.concatenate([ids for ids, _ in parts]))
        rows = np.full((ids.size, parts[0][1].shape[1]), -0.0, np.float32)
        for own, grads in parts:
            rows[np.searchsorted(ids, own)] += grads
        total[t] = ids, rows
    return total


@examples(80)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 7, 64]), st.sampled_from([1, 2**57]))
def test_a_sum_has_the_bits_of_pushes_added_one_after_the_other_and_counts_them(
    seed: int, num_pushes: int, spread: int
) -> None:
    rng, pushes = np.random.default_rng(seed), list[ByTable]()
    specs = [TableSpec(name=f"{width} wide", dim=width) for width in (4, 17, 1, 16, 3)]
    for _ in range(num_pushes):
        push = random_push(rng, specs=specs)
        for _, grads in push.values():
            grads[rng.random(grads.shape) < 0.3] = -0.0
        pushes.append({t: (ids * spread, grads) for t, (ids, grads) in push.items()})
    widths_T = np.array([spec.dim for spec in specs])
    total, expected = sum_of(widths_T, [gradients(push) for push in pushes], counted=True), by_hand(pushes)
    assert total.sections.same(gradients(expected).sections)
    assert total.values.tobytes() == gradients(expected).values.tobytes()
    ones = [{t: (ids, np.ones((ids.size, 1))) for t, (ids, _) in push.items()} for push in pushes]
    assert (total.pushes_V == gradients(by_hand(ones)).values).all()
    assert sum_of(widths_T, [gradients(push) for push in pushes]).pushes_V.size == 0


OTHERS = [TableSpec(name=name, dim=5, optimizer={"name": name}) for name in sorted(OPTIMIZERS)]


@examples(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_pushes_of_many_tables_equal_table_by_table(seed: int, num_pushes: int) -> None:
    """A sum of parts is one update with the joined gradient, with every optimizer."""
    rng, specs = np.random.default_rng(seed), [*SPECS, *OTHERS]
    tables, alone = Tables(specs, seed=5), [OneTable(spec, seed=5) for spec in specs]
    for step in range(3):
        pushes = [random_push(rng, specs=specs) for _ in range(num_pushes)]
        tables.apply([gradients(push) for push in pushes], step=step)
        for t, (ids, grads) in by_hand(pushes).items():
            alone[t].apply(ids, grads, step=step)
        wanted = {t: np.arange(-50, 50) for t in range(len(specs)) if rng.random() < 0.8}
        values = np.empty(sum(100 * specs[t].dim for t in wanted), np.float32)
        tables.pull(sections(wanted), values)
        expected = [alone[t].pull(ids).reshape(-1) for t, ids in sorted(wanted.items())]
        assert (values == np.concatenate(expected or [np.empty(0)])).all()
    assert tables.digests() == {table.spec.name: table.digest() for table in alone}


def test_the_order_of_parts_decides_the_bits_of_a_sum_and_no_parts_change_nothing() -> None:
    one = np.array([4], dtype=np.int64)
    parts = [of_one_table(one, np.full((1, 4), v, np.float32)) for v in (1.0, 1e8, -1e8)]
    forward, backward = Tables(SPECS, seed=1), Tables(SPECS, seed=1)
    forward.apply(parts, step=0)
    backward.apply(parts[::-1], step=0)
    assert forward.digests() != backward.digests()

    tables = Tables(SPECS, seed=1)
    tables.apply([], step=0)
    tables.apply([gradients({}), gradients({0: (np.empty(0, np.int64), np.empty((0, 4)))})], step=0)
    assert [table.num_rows for table in tables] == [0] * len(SPECS)


def test_rows_that_are_not_finite_are_left_alone_with_their_second_moments_and_counted() -> None:
    tables, clean = Tables(SPECS, seed=1), Tables(SPECS, seed=1)
    ids = np.arange(4)
    grads = {t: np.ones((4, SPECS[t].dim), np.float32) for t in (0, 2, 4)}
    grads[0][1, 3], grads[4][0, 0], grads[4][3, 15] = np.nan, np.inf, -np.inf
    tables.apply([gradients({t: (ids, grad) for t, grad in grads.items()})], step=0)
    kept = {0: [0, 2, 3], 2: [0, 1, 2, 3], 4: [1, 2]}
    clean.apply([gradients({t: (ids[kept[t]], grads[t][kept[t]]) for t in grads})], step=0)
    assert tables.digests() == clean.digests()
    assert [table.skipped_rows for table in tables] == [1, 0, 0, 0, 2, 0]

    tables = Tables(SPECS, seed=5, moments=["a"])
    grads = np.array([[1, 1, 1, 1, 0.5], [np.nan, 1, 1, 1, 7.0], [2, 2, 2, 2, 0.25]], np.float32)
    tables.apply([gradients({0: (np.array([3, 5, 9]), grads)})], step=0)
    ids, _, slots = exported(tables[0])
    assert ids.tolist() == [3, 9]
    np.testing.assert_allclose(slots[:, 0], [0.5, 0.25])


@examples(40)
@given(st.integers(0, 2**32 - 1))
def test_slots_of_an_earlier_pull_give_the_same_bits_also_when_another_push_came_between(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with_slots, without = Tables(SPECS, seed=2), Tables(SPECS, seed=2)
    for step in range(4):
        mine, between = random_push(rng, 200), random_push(rng, 200)
        push = gradients(mine)
        pulled = with_slots.pull(push.sections, np.empty(push.values.size, np.float32))
        for tables in (with_slots, without):
            tables.apply([gradients(between)], step=step)
        with_slots.apply([Gradients(push.sections, push.values, pulled)], step=step)
        without.apply([push], step=step)
    assert with_slots.digests() == without.digests()


def test_tables_grow_while_others_read_them() -> None:
    tables = Tables(SPECS, seed=3)
    ids = np.arange(30_000)
    wanted = sections(dict.fromkeys(range(len(SPECS)), ids[::7]))
    stop, wrong = threading.Event(), []

    def read() -> None:
        values = np.empty(sum(spec.dim for spec in SPECS) * wanted.starts_S1[1], np.float32)
        while not stop.is_set():
            slots = tables.pull(wanted, values).slots_V
            if not np.isfinite(values).all() or slots.max() >= ids.size:
                wrong.append(slots.max())

    reader = threading.Thread(target=read)
    reader.start()
    for part in np.array_split(ids, 40):
        parts = {t: (part, np.ones((part.size, spec.dim), np.float32)) for t, spec in enumerate(SPECS)}
        tables.apply([gradients(parts)], step=0)
    stop.set()
    reader.join(90)
    assert not wrong and not reader.is_alive()
    assert [table.num_rows for table in tables] == [ids.size] * len(SPECS)


def slots_after(table: int, pushes: list[tuple[np.ndarray, float | None]]) -> tuple[np.ndarray, np.ndarray]:
    """Weights and slots of one row after one step with a push for each (gradient, mean square behind it, if any)."""
    tables = Tables(SPECS, seed=5, moments=[SPECS[table].name for _, square in pushes[:1] if square is not None])
    found = [np.append(grad, [] if square is None else [square])[None] for grad, square in pushes]
    tables.apply([gradients({table: (np.array([7]), each.astype(np.float32))}) for each in found], step=0)
    _, rows, slots = exported(tables[table])
    return rows[0], slots[0]


def test_a_second_moment_beside_the_gradient_takes_the_place_of_its_own_square_and_those_of_pushes_add_up() -> None:
    grad, other, wide = np.array([3.0, -1.0, 0.5, 2.0]), np.ones(4), np.linspace(-1, 1, 16)
    _, rowwise = slots_after(0, [(grad, 0.25)])
    np.testing.assert_allclose(rowwise, [0.25])
    _, adam = slots_after(1, [(grad, 0.25)])
    np.testing.assert_allclose(adam[:4], 0.1 * grad, rtol=1e-5)
    np.testing.assert_allclose(adam[4:], 0.001 * grad**2 * 0.25 / np.mean(grad**2), rtol=1e-4)
    _, adagrad = slots_after(4, [(wide, 0.125)])
    np.testing.assert_allclose(adagrad, wide**2 * 0.125 / np.mean(wide**2), rtol=1e-5)
    _, cancelled = slots_after(4, [(np.zeros(16), 0.125)])
    np.testing.assert_allclose(cancelled, 0.125)
    _, both = slots_after(0, [(grad, 0.25), (other, 0.5)])
    np.testing.assert_allclose(both, [0.75])
    plain, told = slots_after(0, [(grad, None)]), slots_after(0, [(grad, float(np.mean(grad**2)))])
    np.testing.assert_allclose(plain[0], told[0], rtol=1e-6)


# ---- admission while several threads push the same new ids ----


THREADS, PUSHES, NEW_IDS, ROUNDS = 4, 5, 8, 20
MIN_COUNT = 3


def test_pushes_at_once_admit_each_id_once_and_lose_no_gradient_after_it() -> None:
    law, admit = InitConfig(name="zeros"), AdmitConfig(min_count=MIN_COUNT)
    specs = [TableSpec(name=n, dim=2, optimizer=SgdConfig(lr=1.0), init=law, admit=admit) for n in ("a", "b", "c")]
    specs.append(TableSpec(name="admits all", dim=2, optimizer=SgdConfig(lr=1.0), init=law))
    tables, together = Tables(specs, seed=3), threading.Barrier(THREADS)

    def push(ids: np.ndarray) -> None:
        parts = {t: (ids, np.ones((ids.size, 2), np.float32)) for t in range(len(specs))}
        together.wait(90)
        for _ in range(PUSHES):
            tables.apply([gradients(parts)], step=0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as the interpreter lets them
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for first in range(0, ROUNDS * NEW_IDS, NEW_IDS):
                for done in [threads.submit(push, np.arange(first, first + NEW_IDS)) for _ in range(THREADS)]:
                    done.result(90)
    finally:
        sys.setswitchinterval(before)
    ids, pushes = np.arange(ROUNDS * NEW_IDS), THREADS * PUSHES
    for table, candidates in zip(list(tables)[:3], list(tables)[len(specs) :], strict=True):
        assert table.num_rows == table.counts()["admitted_rows"] == ids.size and candidates.num_rows == 0
        assert table.counts()["refused_rows"] == (MIN_COUNT - 1) * ids.size
    pulled = np.empty(len(specs) * ids.size * 2, np.float32)
    tables.pull(gradients(dict.fromkeys(range(len(specs)), (ids, pulled))).sections, pulled)
    assert (pulled.reshape(4, -1) == -np.array([[pushes - MIN_COUNT + 1]] * 3 + [[pushes]])).all()
