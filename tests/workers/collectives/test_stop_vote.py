"""Stopping together: no rank waits for the others' answers, and all stop at the same step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from shardkeep.workers.collectives import stop_vote
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.collectives.operations import all_gather
from shardkeep.workers.collectives.stop_vote import StopVote
from tests.support.cases import every
from tests.support.ranks import run_ranks

STEPS = 60


FIRST, LAST = stop_vote.PACED_AFTER_STEPS


def steps_of(seconds: float) -> Callable[[], float]:
    """The clock of ranks that look at it before the first step, and after as many as they have agreed on."""
    times = itertools.cycle([0.0, FIRST * seconds, LAST * seconds])
    return lambda: next(times)


def stopped_at(
    collective: Solo | ThreadCollective, asked_at: int | None, start: int = 0, clock: Callable[[], float] = lambda: 0.0
) -> int:
    """The step before which a rank stops after a request at `asked_at`; STEPS = it trained to the end."""
    vote = StopVote(collective, start, clock)
    for step in range(start, STEPS):
        if vote.all_stop(step, asked_at is not None and step >= asked_at):
            return step
    vote.end()
    return STEPS


@every(("asked_at", "stops_at"), [(0, 1), (5, 6), (FIRST - 1, FIRST), (LAST - 1, LAST), (LAST + 5, LAST + 6)])
def test_all_stop_a_step_after_one_was_asked(asked_at: int, stops_at: int) -> None:
    def work(collective: ThreadCollective) -> int:
        return stopped_at(collective, asked_at if collective.rank == 1 else None, 0, steps_of(0.3))

    assert run_ranks(ThreadCollective.group(3), work) == [stops_at] * 3


def test_where_steps_are_long_all_stop_at_once() -> None:
    def work(collective: ThreadCollective) -> list[int]:
        asked = [at if collective.rank == 1 else None for at in (0, FIRST, LAST + 5)]
        return [stopped_at(collective, at, 0, steps_of(30.0)) for at in asked]

    assert run_ranks(ThreadCollective.group(3), work) == [[1, FIRST, LAST + 5]] * 3


def test_after_the_first_steps_ranks_ask_each_other_now_and_then() -> None:
    clocks = {0: steps_of(stop_vote.PACE_S / 8), 1: steps_of(30.0)}  # rank 0's counts
    group = ThreadCollective.group(2)

    def work(collective: ThreadCollective) -> int:
        return stopped_at(collective, 33 if collective.rank else None, 8, clocks[collective.rank])

    assert run_ranks(group, work) == [41, 41]  # asked at 40, the next multiple of 8


def test_who_is_asked_at_the_last_step_still_ends_in_order() -> None:
    group = ThreadCollective.group(2)

    def work(collective: ThreadCollective) -> list[list[int]]:
        assert stopped_at(collective, STEPS - 1) == STEPS
        return all_gather(collective, torch.tensor([collective.rank]), purpose="agreements").tolist()

    assert run_ranks(group, work) == [[[0], [1]]] * 2


def test_one_worker_stops_at_once() -> None:
    assert stopped_at(Solo(), 7) == 7
    assert stopped_at(Solo(), None) == STEPS
