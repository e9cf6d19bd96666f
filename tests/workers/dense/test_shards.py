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
from tests.support.ranks import run_ranks
from tests.support.scenarios import Found, played
from tests.support.sharded import CASES, SCENARIOS, SPLITS, WORLD, every_model, wide_model
from tests.support.towers import RANKING, seeded_model, tower_of, train, values_of

pytestmark = pytest.mark.waits_for_processes
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def processes() -> Iterator[Found]:
    with played(SCENARIOS, WORLD, limit_s=250) as found:
        yield found


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * np.abs(expected).max())


@every("case", CASES)
def test_a_tower_in_shards_trains_as_one_with_ddp(processes: Found, case: str) -> None:
    for ddp, ddp_rows, fsdp, fsdp_rows in processes[case]:
        assert_close(fsdp, ddp)
        assert_close(fsdp_rows, ddp_rows)
    assert np.array_equal(processes[case][0][2], processes[case][1][2])


@pytest.mark.slow
def test_every_stock_model_has_blocks_that_can_be_gathered_alone() -> None:
    with played({"models": every_model}, WORLD, limit_s=250) as found:
        for models in found["models"]:
            assert models.keys() == set(RANKING)
            for name, (plain, summed) in models.items():
                np.testing.assert_allclose(summed, plain, rtol=1e-3, atol=1e-5 * np.abs(plain).max(), err_msg=name)


def test_an_overflow_on_one_rank_skips_the_step_on_all(processes: Found) -> None:
    first, second = processes["overflow"]
    applied, scales = first
    assert applied == [True, False, False, True] and scales[0] > scales[1] > scales[2] == scales[3]
    assert second == first


def test_a_checkpoint_is_whole_and_loads_as_shards_with_ddp_and_alone(processes: Found) -> None:
    for states in processes["states"]:
        for other in ("ddp", "fsdp", "alone"):
            np.testing.assert_array_equal(states[other], states["values"], err_msg=other)
        for other in states["after"][1:]:
            assert_close(other, states["after"][0])
        assert states["new"] == [], "another run begins with its model"
        np.testing.assert_array_equal(states["adopted"], states["values"])
        assert states["freed"], "whole parameters go once they are split"
    assert [states["refused"] for states in processes["states"]] == [True, False], "a full disk keeps no rank waiting"


def test_ranks_predict_different_numbers_of_batches(processes: Found) -> None:
    (sharded, plain, *_, first), (*_, last) = processes["scores"]
    np.testing.assert_array_equal(sharded, plain)
    np.testing.assert_array_equal(last, first)


def test_a_tower_outlives_a_group_that_is_lost_in_the_middle_of_a_step(processes: Found) -> None:
    for found in processes["generations"]:
        np.testing.assert_array_equal(found["disturbed"], found["straight"])


def test_all_bytes_of_shards_are_counted_as_estimated(processes: Found) -> None:
    for found in processes["sent"]:
        assert found["values"] == pytest.approx(sharded_bytes(wide_model(), WORLD, 1), rel=0.01)


def test_one_rank_trains_in_a_group_of_its_own(processes: Found) -> None:
    ddp, fsdp = processes["one"][0]
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


def test_a_model_without_a_row_for_each_worker_is_refused() -> None:
    class Two:
        def size(self) -> int:
            return 2

    for model in (nn.Sequential(nn.Linear(3, 1)), nn.Linear(3, 1)):
        with pytest.raises(UserError, match=r"tower.parallel: fsdp: no parameter has a row for each of 2 workers"):
            Shards(model, Two())


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
