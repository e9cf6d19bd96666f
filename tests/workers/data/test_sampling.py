"""The shuffle and its cut into steps and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.workers.data.sampling import StepOrigin, StepSlices
from tests.support.cases import every
from tests.support.examples import examples

SHAPES = {
    "num_samples": st.integers(1, 700),
    "batch_size": st.integers(1, 40),
    "world_size": st.integers(1, 7),
    "accumulate": st.integers(1, 3),
    "seed": st.integers(0, 2**63 - 1),
    "shuffle": st.booleans(),
}


@given(**SHAPES)
@examples(60)
def test_ranks_share_a_step_as_evenly_as_possible(num_samples: int, **shape: int) -> None:
    slices = StepSlices(num_samples, **shape)  # type: ignore[arg-type]
    for step in range(slices.num_steps):
        counts = [len(slices.rows(step, rank)) for rank in range(shape["world_size"])]
        assert sum(counts) == slices.samples(step)
        assert max(counts) - min(counts) <= 1
        assert counts == [slices.rank_samples(step, rank) for rank in range(shape["world_size"])]


@every("world_size", [1, 2, 3, 4, 6])
def test_any_number_of_workers_sees_the_same_samples_in_a_step(world_size: int) -> None:
    alone = StepSlices(1000, batch_size=48, epochs=2, seed=3)
    split = StepSlices(1000, batch_size=48 // world_size, world_size=world_size, epochs=2, seed=3)
    assert split.num_steps == alone.num_steps == 42
    for step in range(alone.num_steps):
        joined = np.concatenate([split.rows(step, rank) for rank in range(world_size)])
        assert joined.tolist() == alone.rows(step, 0).tolist()


def test_seeds_and_epochs_give_other_orders_in_which_neighbours_are_not_those_of_the_data() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(StepSlices(500, batch_size=500, epochs=2, seed=seed).rows(epoch, 0))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != list(range(500))
    rows = StepSlices(100_003, batch_size=100_003, seed=9).rows(0, 0).astype(np.float64)
    place = np.arange(len(rows))
    assert abs(np.corrcoef(place, rows)[0, 1]) < 0.02
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    thirds = np.histogram(rows[:30_000], bins=10)[0]
    assert thirds.min() > 2700 and thirds.max() < 3300


def test_without_shuffle_rows_come_in_order_and_short_steps_are_counted() -> None:
    slices = StepSlices(10, batch_size=2, world_size=2, shuffle=False)
    assert [slices.rows(step, rank).tolist() for step in range(3) for rank in (0, 1)] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8], [9],
    ]  # fmt: skip
    slices = StepSlices(5, batch_size=2, world_size=2)
    assert slices.samples(1) == 1
    assert [len(slices.rows(1, rank)) for rank in (0, 1)] == [1, 0]
    slices = StepSlices(10, batch_size=4, epochs=3)
    assert [slices.samples_before(step) for step in range(8)] == [0, 4, 8, 10, 14, 18, 20, 24]


@every(("step", "rank"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_step_or_rank_outside_the_job_is_refused(step: int, rank: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        StepSlices(12, batch_size=2, world_size=2).rows(step, rank)


@given(**SHAPES, workers_then=st.integers(1, 7), epochs=st.integers(1, 3), share=st.floats(0.0, 1.0))
@examples(150)
def test_a_job_that_goes_on_with_any_number_of_workers_visits_what_is_left_exactly_once(
    num_samples: int, workers_then: int, epochs: int, share: float, **shape: int
) -> None:
    before = StepSlices(num_samples, epochs=epochs, **shape)  # type: ignore[arg-type]
    at = int(share * before.num_steps)
    origin = StepOrigin(at, before.samples_before(at))
    then = StepSlices(num_samples, epochs=epochs, origin=origin, **shape | {"world_size": workers_then})  # type: ignore[arg-type]
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for slices, steps in ((before, range(at)), (then, range(at, then.num_steps))):
        for step in steps:
            parts = [slices.rows(step, rank).tolist() for rank in range(slices.world_size)]
            seen[slices.epoch(step)] += [row for part in parts for row in part]
    assert all(sorted(rows) == list(range(num_samples)) for rows in seen.values())
    assert then.samples_before(then.num_steps) == epochs * num_samples
    ends = [before.ends_epoch(step) for step in range(at)]
    assert sum(ends) + sum(then.ends_epoch(step) for step in range(at, then.num_steps)) == epochs


def test_a_job_that_goes_on_with_as_many_workers_takes_the_same_steps() -> None:
    shape = {"batch_size": 5, "world_size": 2, "epochs": 3, "seed": 4}
    whole = StepSlices(103, **shape)
    for at in (1, 10, 11, 12, 30, 33):
        rest = StepSlices(103, **shape, origin=StepOrigin(at, whole.samples_before(at)))
        assert rest.num_steps == whole.num_steps == 33
        for step in range(at, 33):
            assert rest.epoch(step) == whole.epoch(step)
            for rank in range(2):
                assert rest.rows(step, rank).tolist() == whole.rows(step, rank).tolist()
        with pytest.raises(IndexError, match=rf"step {at - 1} is outside \[{at}, 33\)"):
            rest.rows(at - 1, 0)
