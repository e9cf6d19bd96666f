"""How many bytes collective calls count; test_processes.py compares them with the kernel's counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardkeep.compression.tower.exchange import Exchange
from shardkeep.ps.transport.metered import LedgerMeter, WorkerTraffic
from shardkeep.workers.collectives import wire_bytes as collective_bytes
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
from tests.support.cases import every
from tests.support.ranks import run_ranks

PACKET = torch.zeros(50, dtype=torch.uint8)


def every_call(collective: Collective, purpose: Purpose) -> None:
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
        every_call(MeteredCollective(collective, LedgerMeter(traffic)), purpose)
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
