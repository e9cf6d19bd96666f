"""The shuffle and its cut into steps and ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.workers.config import EvalConfig, TrainConfig
from shardkeep.workers.data.samples import Data, Dataset
from shardkeep.workers.data.sampling import Blocks, StepOrigin, StepSlices
from shardkeep.workers.run import TrainingJob, step_slices
from tests.support.cases import every
from tests.support.examples import examples

SHAPES = {
    "num_samples": st.integers(1, 700),
    "batch_size": st.integers(1, 40),
    "world_size": st.integers(1, 7),
    "accumulate": st.integers(1, 3),
    "seed": st.integers(0, 2**63 - 1),
    "shuffle": st.sampled_from([False, True, Blocks(4, 4), Blocks(8, 32), Blocks()]),
}


@given(**SHAPES)
@examples(60)
def test_ranks_share_the_samples_of_one_alone_as_evenly_as_possible(num_samples: int, **shape: int) -> None:
    slices = StepSlices(num_samples, **shape)  # type: ignore[arg-type]
    one = shape | {"world_size": 1, "batch_size": shape["batch_size"] * shape["world_size"]}
    alone = StepSlices(num_samples, **one)  # type: ignore[arg-type]
    assert slices.num_steps == alone.num_steps
    for step in range(slices.num_steps):
        rows = [slices.rows(step, rank) for rank in range(shape["world_size"])]
        assert np.concatenate(rows).tolist() == alone.rows(step, 0).tolist()
        counts = list(map(len, rows))
        assert sum(counts) == slices.samples(step)
        assert max(counts) - min(counts) <= 1
        assert counts == [slices.rank_samples(step, rank) for rank in range(shape["world_size"])]


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


@every(("num_samples", "blocks"), [
    (1, Blocks(4, 16)), (3, Blocks(4, 16)), (4, Blocks(4, 16)), (15, Blocks(4, 16)), (31, Blocks(4, 16)),
    (1003, Blocks(8, 64)), (1024, Blocks(8, 64)), (1000, Blocks(64, 64)), (700_003, Blocks()),
])  # fmt: skip
def test_blocks_hold_every_row_once_and_a_window_has_rows_of_its_blocks_alone(num_samples: int, blocks: Blocks) -> None:
    slices = StepSlices(num_samples, batch_size=num_samples, epochs=2, seed=5, shuffle=blocks)
    epochs = [slices.rows(epoch, 0) for epoch in range(2)]
    assert all(np.array_equal(np.sort(rows_N), np.arange(num_samples)) for rows_N in epochs)
    assert num_samples < 15 or not np.array_equal(*epochs)
    count = -(-num_samples // blocks.block)
    windows = -(-count * blocks.block // blocks.window)
    ends = [window * count // windows * blocks.block for window in range(windows)] + [num_samples]
    for rows_N in epochs:
        for first, end in itertools.pairwise(ends):
            own = np.sort(rows_N[first:end])
            runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
            assert len(own) <= blocks.window
            assert len(runs) <= -(-len(own) // blocks.block) + 1  # one block may go on with the first row
            assert end == num_samples or all(
                len(run) % blocks.block == 0 for run in runs if run[0] > 0 and run[-1] < num_samples - 1
            )


@every(("begin", "batch_size"), [(0, 50), (0, 1), (7, 33), (9, 400)])
def test_rows_are_named_ahead_once_before_a_step_reads_them(begin: int, batch_size: int) -> None:
    blocks = Blocks(8, 64)
    slices = StepSlices(1003, batch_size=batch_size, epochs=3, seed=5, shuffle=blocks)
    named: Counter[int] = Counter()
    for step in range(begin, slices.num_steps):
        for start, stop in slices.ahead(step, begins=step == begin):
            assert 0 <= start < stop <= 1003
            named.update(range(start, stop))
        rows = slices.rows(step, 0).tolist()
        assert min(named[row] for row in rows) > 0
        named.subtract(rows)
        assert named.total() <= 2 * blocks.window + 2 * blocks.block + slices.samples_before(begin)
    assert StepSlices(1003, batch_size=9).ahead(3, begins=True) == []


def test_blocks_are_mixed_within_a_window_and_are_other_ones_in_each_epoch() -> None:
    block, size = blocks = Blocks(16, 1024)
    slices = StepSlices(102_400, batch_size=102_400, epochs=2, seed=9, shuffle=blocks)
    rows, later = (slices.rows(epoch, 0) for epoch in range(2))
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(np.arange(len(rows)), rows)[0, 1]) < 0.05
    assert np.bincount(rows[: size // 4] // 12_800, minlength=8).min() > 0
    assert not np.array_equal(rows[:size] % block, rows[size : 2 * size] % block)
    assert len(np.intersect1d(rows[:size], later[:size])) < size // 4
    starts = [np.sort(epoch[:size])[::block] % block for epoch in (rows, later)]
    assert len(set(starts[0])) == len(set(starts[1])) == 1 and starts[0][0] != starts[1][0]


@every(("order", "blocks", "shape"), [
    ("shuffled", False, {}), ("shuffled", True, {"shuffle": Blocks()}), ("stored", False, {"shuffle": False}),
])  # fmt: skip
def test_a_job_takes_its_samples_in_the_order_of_its_config(order: str, blocks: bool, shape: dict[str, Any]) -> None:
    train = TrainConfig.model_validate({"order": order, "batch_size": 300})
    job = TrainingJob(Data(cast(Dataset, range(1000))), train, EvalConfig(), 2, 1, seed=3, blocks=blocks)
    expected = StepSlices(1000, batch_size=300, seed=3, **shape).rows(1, 0)
    assert step_slices(job).rows(1, 0).tolist() == expected.tolist()


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
            alike = slices is before or workers_then != before.world_size
            assert alike or parts == [before.rows(step, rank).tolist() for rank in range(workers_then)]
    assert all(sorted(rows) == list(range(num_samples)) for rows in seen.values())
    assert then.samples_before(then.num_steps) == epochs * num_samples
    with pytest.raises(IndexError, match=rf"step {at - 1} is outside \[{at}, {then.num_steps}\)"):
        then.rows(at - 1, 0)
    ends = [before.ends_epoch(step) for step in range(at)]
    assert sum(ends) + sum(then.ends_epoch(step) for step in range(at, then.num_steps)) == epochs
