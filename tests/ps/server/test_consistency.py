"""The gates alone: order of arrivals in, what is applied and admitted out."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import pytest

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.config import ConsistencyConfig
from shardkeep.ps.server.consistency import BoundedGate, ConsistencyGate, SyncGate, Work, open_gate
from tests.support.cases import every


def drain(gate: ConsistencyGate[Any]) -> list[Work[Any]]:
    done = []
    while (work := gate.take()) is not None:
        gate.done(work)
        done.append(work)
    return done


def sync(num_workers: int, start_step: int = 0) -> SyncGate[str]:
    return SyncGate(num_workers=num_workers, start_step=start_step)


def bounded(num_workers: int, bound: int | None, start_step: int = 0) -> BoundedGate[str]:
    return BoundedGate(num_workers=num_workers, start_step=start_step, bound=bound)


def test_every_mode_of_the_config_has_a_gate() -> None:
    for mode in get_args(ConsistencyConfig.model_fields["mode"].annotation):
        gate: ConsistencyGate[str] = open_gate(ConsistencyConfig(mode=mode), num_workers=1, start_step=0)
        assert gate.stages == (mode == "sync")
        assert gate.admits(0)


# ---- sync ----


@every("order", list(itertools.permutations(range(3))), ids=str)
def test_a_step_is_applied_in_rank_order_when_all_pulls_of_the_next_are_here(order: tuple[int, ...]) -> None:
    gate = sync(3, start_step=5)
    assert gate.admits(5) and not gate.admits(6)
    for rank in order:
        assert gate.push(rank, 5, f"push {rank}")
        assert drain(gate) == []
    for count, rank in enumerate(order, start=1):
        gate.arrive(rank, 6)
        works = drain(gate)
        assert len(works) == (count == 3)
    assert works == [Work(5, (0, 1, 2), ("push 0", "push 1", "push 2"))]
    assert gate.admits(6) and not gate.admits(7)


def test_in_sync_ranks_may_be_a_push_apart_pulls_and_pushes_repeat_and_work_is_handed_out_once() -> None:
    gate = sync(2)
    assert gate.push(0, 0, "a") and not gate.push(0, 0, "again")
    gate.arrive(0, 1)
    assert gate.take() is None
    gate.arrive(1, 0)
    gate.push(1, 0, "b")
    gate.arrive(1, 1)
    work = gate.take()
    assert work == Work(0, (0, 1), ("a", "b"))
    assert gate.take() is None and not gate.admits(1)
    gate.done(work)
    gate.arrive(0, 1)
    assert gate.admits(1) and not gate.push(0, 0, "late")


def test_what_breaks_the_order_of_sync_is_an_error_that_changes_nothing() -> None:
    gate = sync(2)
    for call, text in (
        (lambda: gate.arrive(0, 1), "worker 0 pulled step 1 without having pushed step 0"),
        (lambda: gate.push(1, 3, ""), "worker 1 pushed step 3 while step 0"),
        (lambda: gate.arrive(1, 2), "worker 1 pulled step 2 while step 0"),
    ):
        with pytest.raises(ProtocolError, match=text):
            call()
    for rank in (0, 1):
        gate.push(rank, 0, "")
        gate.arrive(rank, 1)
    with pytest.raises(ProtocolError, match="pulled step 0"):
        gate.arrive(0, 0)
    assert [work.step for work in drain(gate)] == [0]


# ---- bounded and async ----


@every("bound", [0, 1, 3])
def test_a_pull_waits_for_the_slowest_rank_up_to_the_bound(bound: int) -> None:
    gate = bounded(2, bound)
    for step in range(10):
        gate.push(0, step, "")
    gate.push(1, 0, "")
    drain(gate)
    assert gate.staleness(1) == 0
    assert gate.admits(1 + bound) and gate.staleness(1 + bound) == bound
    assert not gate.admits(2 + bound)


def test_pushes_count_when_they_are_applied_and_have_no_gap_and_async_admits_everything() -> None:
    gate = bounded(1, 0)
    gate.push(0, 0, "")
    work = gate.take()
    assert work is not None
    assert not gate.admits(1)
    gate.done(work)
    assert gate.admits(1)

    gate = bounded(1, 0, start_step=10)
    for step in (12, 11):
        assert gate.push(0, step, "")
    drain(gate)
    assert gate.staleness(13) == 3
    gate.push(0, 10, "")
    drain(gate)
    assert gate.staleness(13) == 0

    gate = bounded(3, None)
    assert gate.admits(100)
    assert gate.staleness(100) == 100


@every("seed", range(5))
def test_random_arrivals_are_each_applied_once_and_the_watermark_never_lies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pushes = [(rank, step) for rank in range(3) for step in range(20)] * 2
    gate, applied, came = bounded(3, 2), list[tuple[int, int]](), set[tuple[int, int]]()
    for at in rng.permutation(len(pushes)):
        assert gate.push(*pushes[at], "") == (pushes[at] not in came), "a duplicate is refused, waiting or applied"
        came.add(pushes[at])
        if at % 3:
            applied += [(work.ranks[0], work.step) for work in drain(gate)]
        below = min(next(s for s in range(21) if (rank, s) not in applied) for rank in range(3))
        assert gate.staleness(21) == 20 - (below - 1)
    applied += [(work.ranks[0], work.step) for work in drain(gate)]
    assert len(applied) == len(set(applied)) == 60
