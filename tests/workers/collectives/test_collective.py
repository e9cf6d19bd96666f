"""Collectives of threads: what each call gives, and failures that wake everybody."""

from __future__ import annotations

import threading

import pytest
import torch

from shardkeep.base.errors import DeadlineExceeded, MemberLost
from shardkeep.workers.collectives.collective import (
    Solo,
    ThreadCollective,
)
from shardkeep.workers.collectives.operations import (
    all_gather,
)
from tests.support.cases import every
from tests.support.collective_calls import EXPECTED, WORLD, every_call
from tests.support.ranks import run_ranks


def test_ranks_as_threads_get_what_each_call_promises():
    for _ in range(20):
        assert run_ranks(ThreadCollective.group(WORLD), every_call) == [EXPECTED] * WORLD


def test_one_worker_alone_gets_its_own_values():
    assert every_call(Solo())[2:5] == [[1.0, 0.0], [7], {"on": True, "why": "ä"}]
    assert all_gather(Solo(), torch.ones(2), purpose="agreements").shape == (1, 2)


def test_what_a_rank_gathered_is_its_own():
    def work(collective: ThreadCollective) -> list[float]:
        parts = all_gather(collective, torch.ones(2), purpose="agreements")
        parts *= collective.rank
        collective.barrier()
        return parts.view(-1).tolist()

    assert run_ranks(ThreadCollective.group(2), work) == [[0.0] * 4, [1.0] * 4]


def test_a_wait_that_runs_out_names_the_missing_rank():
    first, _ = ThreadCollective.group(2, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"worker 1 did not join the others within 0\.05 s"):
        first.barrier()


@every("how", ["abort", "close"])
def test_a_member_that_leaves_wakes_those_who_wait(how):
    first, second = ThreadCollective.group(2, timeout_s=60.0)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            first.barrier()
        except MemberLost as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    second.abort("out of memory") if how == "abort" else second.close()
    thread.join(90)
    assert not thread.is_alive() and ("out of memory" if how == "abort" else "worker 1 left") in str(failures[0])


def test_the_first_failure_of_a_rank_is_the_one_that_is_raised():
    def work(collective: ThreadCollective) -> None:
        if collective.rank == 1:
            raise ValueError("the cause")
        collective.barrier()

    with pytest.raises(ValueError, match="the cause"):
        run_ranks(ThreadCollective.group(3), work)
