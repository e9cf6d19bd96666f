"""Towers in shards: FSDP beside DDP in two processes, their states, their blocks; what cannot be split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep.base.errors import UserError
from shardkeep.estimate.tower import sharded_bytes
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.dense.shards import BLOCK_VALUES, Shards, blocks_of
from tests.support.cases import every
from tests.support.processes import in_processes
from tests.support.ranks import run_ranks
from tests.support.sharded import CASES, SPLITS, WORLD, in_a_process, wide_model
from tests.support.towers import RANKING, seeded_model, tower_of, train, values_of

pytestmark = pytest.mark.waits_for_processes
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def processes() -> Iterator[list[dict[Any, Any]]]:
    """What each of two processes found, in rank order."""
    with in_processes(in_a_process, WORLD, limit_s=250) as found:
        yield found


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_a_tower_in_shards_trains_as_one_with_ddp(processes: Any, case: str) -> None:
    for found in processes:
        ddp, ddp_rows, fsdp, fsdp_rows = found[case]
        assert_close(fsdp, ddp)
        assert_close(fsdp_rows, ddp_rows)
    assert np.array_equal(processes[0][case][2], processes[1][case][2])


def test_every_stock_model_has_blocks_that_can_be_gathered_alone(processes: Any) -> None:
    for found in processes:
        assert found["models"].keys() == set(RANKING)
        for name, (plain, summed) in found["models"].items():
            np.testing.assert_allclose(summed, plain, rtol=1e-3, atol=1e-5 * np.abs(plain).max(), err_msg=name)


def test_an_overflow_on_one_rank_skips_the_step_on_all(processes: Any) -> None:
    applied, scales = processes[0]["overflow"]
    assert applied == [True, False, False, True] and scales[0] > scales[1] > scales[2] == scales[3]
    assert processes[1]["overflow"] == processes[0]["overflow"]


def test_a_checkpoint_is_whole_and_loads_as_shards_with_ddp_and_alone(processes: Any) -> None:
    for found in processes:
        states = found["states"]
        for other in ("ddp", "fsdp", "alone"):
            np.testing.assert_array_equal(states[other], states["values"], err_msg=other)
        for other in states["after"][1:]:
            assert_close(other, states["after"][0])


def test_a_disk_that_refuses_a_checkpoint_keeps_no_rank_waiting(processes: Any) -> None:
    assert [found["states"]["refused"] for found in processes] == [True, False]


def test_a_tower_in_shards_begins_with_the_model_of_another_run(processes: Any) -> None:
    for found in processes:
        assert found["states"]["new"] == []
        np.testing.assert_array_equal(found["states"]["adopted"], found["states"]["values"])


def test_whole_parameters_are_freed_once_they_are_split(processes: Any) -> None:
    assert [found["states"]["freed"] for found in processes] == [True, True]


def test_ranks_predict_different_numbers_of_batches(processes: Any) -> None:
    sharded, plain, *_, first = processes[0]["scores"]
    np.testing.assert_array_equal(sharded, plain)
    np.testing.assert_array_equal(processes[1]["scores"][-1], first)


def test_a_tower_outlives_a_group_that_is_lost_in_the_middle_of_a_step(processes: Any) -> None:
    for found in processes:
        np.testing.assert_array_equal(found["generations"]["disturbed"], found["generations"]["straight"])


def test_all_bytes_of_shards_are_counted_as_estimated(processes: Any) -> None:
    for found in processes:
        assert found["sent"]["values"] == pytest.approx(sharded_bytes(wide_model(), WORLD, 1), rel=0.01)


def test_one_rank_trains_in_a_group_of_its_own(processes: Any) -> None:
    ddp, fsdp = processes[0]["one"]
    assert_close(fsdp, ddp)


# Blocks.


class Listed(nn.Module):
    """A list of modules with parameters of their own, a list in a list, and a layer that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(300, 2), nn.Linear(2, 2)])
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(300, 300)])])
        self.first, self.tied = nn.Linear(300, 300), nn.Linear(300, 300)
        self.tied.weight = self.first.weight


def test_blocks_are_linear_layers_and_entries_of_lists_that_are_large_and_share_nothing() -> None:
    model = Listed()
    assert set(blocks_of(model)) == {model.attention[0], model.nested[0][0]}
    every_one = blocks_of(model, least=1)
    assert set(every_one) == {model.attention[0], model.attention[1], model.nested[0][0]}
    wide = wide_model()
    assert [sum(p.numel() for p in block.parameters()) for block in blocks_of(wide)] == [300 * 260 + 260]
    assert BLOCK_VALUES < 300 * 260


@every("model", [nn.Sequential(nn.Linear(3, 1)), nn.Linear(3, 1)], ids=["a layer", "itself"])
def test_a_model_without_a_row_for_each_worker_is_refused(model: nn.Module) -> None:
    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(UserError, match=r"tower.parallel: fsdp: no parameter has a row for each of 2 workers"):
        Shards(model, Two())  # type: ignore[arg-type]


def test_without_a_process_group_a_tower_stays_whole() -> None:
    def work(collective: ThreadCollective) -> torch.Tensor:
        tower = tower_of(model=seeded_model(), collective=collective, config={"parallel": "fsdp"}, sync=False)
        train(tower, SPLITS)
        assert tower.shards is None
        return values_of(tower)

    first, second = run_ranks(ThreadCollective.group(2), work)
    alone = tower_of(collective=Solo(), config={"parallel": "fsdp"})
    train(alone, [(0, 24)])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, values_of(alone), rtol=1e-5, atol=1e-6)
