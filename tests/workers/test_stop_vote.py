"""Stopping together: no rank waits for the others' answers, and all stop at the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardkeep.workers import stop_vote
from shardkeep.workers.collective import Solo, ThreadCollective, run_ranks
from shardkeep.workers.stop_vote import PACED_AFTER_STEPS, StopVote

STEPS = 60


def stopped_at(
    collective: Solo | ThreadCollective, asked_at: int | None, start: int = 0, clock: Callable[[], float] = lambda: 0.0
) -> int:
    """The step that a rank stops before when it is asked to at `asked_at`; STEPS = it trained to the end."""
    vote = StopVote(collective, start, clock)
    for step in range(start, STEPS):
        if vote.all_stop(step, asked_at is not None and step >= asked_at):
            return step
    vote.end()
    return STEPS


@pytest.mark.parametrize(("asked_at", "stops_at"), [(0, 1), (5, 6), (PACED_AFTER_STEPS - 1, PACED_AFTER_STEPS)])
def test_all_stop_a_step_after_one_was_asked(asked_at: int, stops_at: int) -> None:
    group = ThreadCollective.group(3)
    assert run_ranks(group, lambda c: stopped_at(c, asked_at if c.rank == 1 else None)) == [stops_at] * 3


def test_after_the_first_steps_ranks_ask_each_other_now_and_then() -> None:
    times = iter([0.0, PACED_AFTER_STEPS * stop_vote.PACE_S / 8])  # eight steps in the time between two questions
    clocks = {0: lambda: next(times), 1: lambda: 1000.0}  # rank 0's counts
    group = ThreadCollective.group(2)

    def work(collective: ThreadCollective) -> int:
        return stopped_at(collective, 33 if collective.rank else None, 8, clocks[collective.rank])

    assert run_ranks(group, work) == [41, 41]  # asked at 40, the next multiple of 8


def test_who_is_asked_at_the_last_step_still_ends_in_order() -> None:
    group = ThreadCollective.group(2)

    def work(collective: ThreadCollective) -> list[list[int]]:
        assert stopped_at(collective, STEPS - 1) == STEPS
        return collective.all_gather(torch.tensor([collective.rank])).tolist()

    assert run_ranks(group, work) == [[[0], [1]]] * 2


def test_one_worker_stops_at_once() -> None:
    assert stopped_at(Solo(), 7) == 7
    assert stopped_at(Solo(), None) == STEPS
