"""What collective calls are counted as; tests/workers/test_collective.py compares it with the kernel's counters."""

from __future__ import annotations

import pytest

from shardkeep.compression.ledger import Ledger
from shardkeep.workers.sent import Sent


def told(sent: Sent, direction: str, *, again: bool = False) -> dict[str, int]:
    ledger = Ledger()
    sent.tell(ledger, direction, again=again)
    parts: dict[str, int] = ledger.totals()[direction]
    return parts


def test_one_worker_sends_nothing() -> None:
    sent = Sent(1)
    sent.all_gather(1000)
    sent.all_reduce(1000)
    sent.broadcast(1000, source=True)
    sent.barrier()
    assert sent.total == 0 and not any(told(sent, "tower").values())


@pytest.mark.parametrize(
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
    sent = Sent(world)
    sent.all_reduce(num_bytes)
    assert told(sent, "tower") == {"values": payload, "framing": headers}


def test_parts_of_a_packet_are_told_apart_and_each_byte_once() -> None:
    sent = Sent(3)
    sent.all_gather(1000, indices=150, scales=50)
    total = sent.total
    parts = told(sent, "tower")
    assert {k: parts[k] for k in ("indices", "scales", "values")} == {"indices": 300, "scales": 100, "values": 1600}
    assert sum(parts.values()) == total and not told(sent, "tower")


def test_what_is_no_gradient_is_one_part() -> None:
    sent = Sent(2)
    for direction, again, part in (("read", False, "metrics"), ("tower", True, "retries")):
        sent.all_gather(100)
        parts = told(sent, direction, again=again)
        assert set(parts) == {part} and parts[part] > 100
    sent.barrier()
    assert told(sent, "control") == sent.total - 2 * parts["retries"]
