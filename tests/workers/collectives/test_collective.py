"""Collectives of threads: what each call gives and how many bytes it counts, failures, stopping together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import DistStoreError, HashStore

from shardkeep.base.errors import DeadlineExceeded, MemberLost
from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives import stop_vote, wire_bytes as collective_bytes
from shardkeep.workers.collectives.collective import Collective, Purpose, Solo, ThreadCollective
from shardkeep.workers.collectives.metered import MeteredCollective
from shardkeep.workers.collectives.operations import (
    all_gather,
    all_reduce_sum,
    begin_all_gather,
    broadcast_object,
    exchange_packets,
    gather_arrays,
)
from shardkeep.workers.collectives.process_group import agreed_backend
from shardkeep.workers.collectives.stop_vote import StopVote
from tests.support.cases import every
from tests.support.collective_calls import EXPECTED, WORLD, every_call
from tests.support.local_job import in_threads
from tests.support.ranks import run_ranks


def test_ranks_as_threads_get_what_each_call_promises():
    assert run_ranks(ThreadCollective.group(WORLD), every_call) == [EXPECTED] * WORLD


def test_one_worker_alone_gets_its_own_values_and_stops_at_once():
    assert stopped_at(Solo(), 7) == 7
    assert stopped_at(Solo(), None) == STEPS
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


@every(
    ("usable", "agreed"),
    [
        (("gloo", "gloo"), "gloo"),
        (("nccl", "nccl", "nccl"), "nccl"),
        (("nccl", "gloo"), "gloo"),
        (("gloo", "nccl", "nccl"), "gloo"),
    ],
)
def test_all_ranks_take_nccl_only_if_every_rank_can(usable: tuple[str, ...], agreed: str) -> None:
    store, size = HashStore(), len(usable)

    def ask(rank: int) -> str:
        return agreed_backend(store, rank=rank, world_size=size, usable=usable[rank], timeout_s=5.0)

    assert in_threads([lambda r=rank: ask(r) for rank in range(size)]) == [agreed] * size
    with pytest.raises(DistStoreError):  # a rank that never comes ends the wait at the deadline
        agreed_backend(HashStore(), rank=0, world_size=2, usable="nccl", timeout_s=0.05)


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


@every(
    ("step_s", "start", "asked_at", "stops_at"),
    [
        (0.3, 0, 0, 1),
        (0.3, 0, 5, 6),
        (0.3, 0, FIRST - 1, FIRST),
        (0.3, 0, LAST - 1, LAST),
        (0.3, 0, LAST + 5, LAST + 6),
        (30.0, 0, 0, 1),  # long steps: at once, after the first ones
        (30.0, 0, FIRST, FIRST),
        (30.0, 0, LAST + 5, LAST + 5),
        (stop_vote.PACE_S / 8, 8, 33, 41),  # short ones: asked at 40, the next multiple of 8
    ],
)
def test_all_stop_a_step_after_one_was_asked_by_the_pace_of_rank_0(
    step_s: float, start: int, asked_at: int, stops_at: int
) -> None:
    def work(collective: ThreadCollective) -> int:
        clock = steps_of(30.0 if collective.rank else step_s)
        return stopped_at(collective, asked_at if collective.rank == 1 else None, start, clock)

    assert run_ranks(ThreadCollective.group(3), work) == [stops_at] * 3


def test_who_is_asked_at_the_last_step_still_ends_in_order() -> None:
    group = ThreadCollective.group(2)

    def work(collective: ThreadCollective) -> list[list[int]]:
        assert stopped_at(collective, STEPS - 1) == STEPS
        return all_gather(collective, torch.tensor([collective.rank]), purpose="agreements").tolist()

    assert run_ranks(group, work) == [[[0], [1]]] * 2


# Bytes; test_processes.py compares them with the kernel's counters


PACKET = torch.zeros(50, dtype=torch.uint8)


def send_all(collective: Collective, purpose: Purpose) -> None:
    all_gather(collective, torch.ones(100), purpose=purpose)
    begin_all_gather(collective, torch.ones(100), purpose=purpose)()
    exchange_packets(collective, Exchange(PACKET, {"indices": 10}), purpose=purpose)
    collective.begin_exchange(Exchange(PACKET.repeat(collective.world_size, 1)), purpose=purpose)()
    all_reduce_sum(collective, torch.ones(100), purpose=purpose)
    collective.begin_all_reduce_sum(torch.ones(100), purpose=purpose)()
    collective.broadcast(torch.ones(100), purpose=purpose)
    broadcast_object(collective, {"on": True}, purpose=purpose)
    gather_arrays(collective, np.ones(100 * collective.rank, np.float32), purpose=purpose)
    collective.barrier(purpose=purpose)


def booked(purpose: Purpose, world_size: int = 3) -> list[dict[str, Any]]:
    """Each rank's totals after every call."""

    def work(collective: ThreadCollective) -> dict[str, Any]:
        traffic = WorkerTraffic()
        send_all(MeteredCollective(collective, LedgerMeter(traffic)), purpose)
        return traffic.ledger.totals()

    return run_ranks(ThreadCollective.group(world_size), work)


def test_one_worker_sends_nothing() -> None:
    traffic = WorkerTraffic()
    collective = MeteredCollective(Solo(), LedgerMeter(traffic))
    all_gather(collective, torch.ones(100), purpose="gradients")
    broadcast_object(collective, {"on": True}, purpose="agreements")
    gather_arrays(collective, np.ones(100), purpose="metrics")
    collective.barrier(purpose="agreements")
    assert traffic.ledger.totals()["tower"] == {} and not traffic.ledger.totals()["total"]


@every(
    ("world", "num_bytes", "payload", "headers"),  # headers as read from the kernel, of a mean rank
    [
        (2, 4, 4, 144),
        (2, 8, 8, 288),
        (2, 20, 20, 432),
        (2, 4000, 4000, 576),
        (2, 12_000_000, 12_000_000, 1728),
        (4, 400_000, 600_000, 1728),
        (4, 12_000_000, 18_000_000, 2592),
        (4, 80_000_000, 120_000_000, 17_280),
    ],
)
def test_an_all_reduce_is_a_ring_in_pieces(world: int, num_bytes: int, payload: int, headers: int) -> None:
    assert collective_bytes.all_reduce(world, num_bytes) == {"values": payload, "framing": headers}


def test_parts_of_a_packet_are_told_apart_and_an_empty_buffer_is_not_sent() -> None:
    parts = collective_bytes.all_gather(3, 1000, indices=150, scales=50)
    assert parts == {"indices": 300, "scales": 100, "values": 1600, "framing": 288}
    assert collective_bytes.all_gather(3, 0) == {}


@every(
    ("purpose", "direction", "parts"),
    [
        ("gradients", "tower", {"values", "indices", "framing"}),
        ("buffers", "tower", {"values", "indices", "framing"}),
        ("metrics", "read", {"metrics"}),
        ("agreements", "control", None),
    ],
)
def test_every_call_is_booked_by_its_purpose(purpose: Purpose, direction: str, parts: set[str] | None) -> None:
    for rank, totals in enumerate(booked(purpose)):
        # A vector of 100: 400 B to each of 2 others. The last rank has the longest array, 800 B.
        calls = [2 * 400, 2 * 400, 2 * 50, 2 * 50, 2 * 2 * 400 / 3, 2 * 2 * 400 / 3, 2 * 8, 2 * 800]
        calls += [2 * 400, 2 * 8, 2 * 12] if rank == 0 else []  # who a broadcast starts at
        payload = sum(int(call) for call in calls)
        counted = totals[direction] if parts is None else sum(totals[direction].values())
        assert counted == totals["total"] == totals["between_workers"]
        assert parts is None or set(totals[direction]) == parts
        if parts and "values" in parts:
            assert totals[direction]["values"] + totals[direction]["indices"] == payload
            assert totals[direction]["indices"] == 2 * 10


def test_gradients_of_a_step_that_an_earlier_generation_sent_are_retries() -> None:
    traffic = WorkerTraffic()
    for first in (0, 1):
        meter = LedgerMeter(traffic)  # of a generation
        meter.book(0, "pull", first, {"ids": 1}, answer=False)
        for step in (first, first + 1):
            meter.book_among_workers("tower", {"values": 100, "framing": 10})
            meter.book_among_workers("control", {"agreements": 7})
            meter.book(0, "push", step, {"ids": 1}, answer=False)
    totals = traffic.ledger.totals()
    assert totals["tower"] == {"values": 300, "framing": 30, "retries": 110}  # of steps 0, 1 and 2; of step 1 again
    assert totals["control"] == 4 * 7
