"""How bytes move between two processes: what torch RPC adds to a message, as computed and as the kernel counts it on
the sockets, and what comes out of the sender's memory instead."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.base.net.sockets import Counters, connections
from shardkeep.ps.rpc.group import RpcGroup
from shardkeep.ps.transport.metered import answer_bytes, call_bytes
from shardkeep.ps.wire.message import EMPTY, Kind
from tests.support.cluster import stalled
from tests.support.messages import Message, Section, pack, unpack
from tests.support.rpc_groups import LIMIT_S, Group, Pair, reply

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the counters of a socket"),
]

CALLS = 3
NUM_IDS, DIM = 200_000, 16
SERVICE: dict[str, Any] = {
    "tables": [{"name": "item", "dim": 4}, {"name": "large", "dim": DIM}],
    "consistency": {"mode": "bounded"},
    "num_workers": 1,
    "seed": 5,
}


@pytest.fixture(scope="module")
def lasting_pair() -> Iterator[Pair]:
    with contextlib.closing(Pair(SERVICE)) as pair:
        yield pair


@pytest.fixture
def group(lasting_pair: Pair) -> Iterator[Group]:
    group = lasting_pair.form("sockets")
    yield group
    group.leave()


def message(group: Group, kind: Kind, step: int, num_ids: int) -> Bytes:
    ids = np.arange(num_ids, dtype=np.int64)
    grad = np.ones(num_ids * 4 * (kind is Kind.PUSH), np.float32)
    section = Section(0, num_ids, ids.view(np.uint8), grad.view(np.uint8))
    return pack(Message(kind, group.generation, 0, step, (section,)))


def counted(transport: RpcGroup) -> Counters:
    """On this process's connections to the server. What was answered has been sent and received."""
    ports = transport.server_ports
    return sum((seen for (_, peer), seen in connections().items() if peer[1] in ports), Counters())


def test_a_call_and_its_answer_take_just_the_bytes_that_are_computed(group: Group) -> None:
    for num_ids in (1, 13, 14, 29, 30, 700, 2000, 2045, 4000, 4092, 8200, 100_000):
        question = message(group, Kind.READ, 0, num_ids)
        before = counted(group.transport)
        for _ in range(CALLS):
            answer = reply(group.send(question))
        after = counted(group.transport)
        assert (after.sent - before.sent) / CALLS == question.size + call_bytes(question.size), num_ids
        assert (after.received - before.received) / CALLS == answer.size + answer_bytes(answer.size), num_ids

    before, sent = counted(group.transport), 0
    for step, num_ids in enumerate((1, 2, 12, 400, 5000, 50_000)):  # two messages share a call
        parts = message(group, Kind.PUSH, step, num_ids), message(group, Kind.PULL, step + 1, num_ids)
        reply(group.transport.send(0, *parts, timeout_s=LIMIT_S))
        sent += sum(part.size for part in parts) + call_bytes(*(part.size for part in parts))
    assert counted(group.transport).sent - before.sent == sent


# ---- out of the sender's memory ----


def large(group: Group) -> Bytes:
    """A read of 13 MB of rows."""
    ids = np.arange(NUM_IDS, dtype=np.int64) * 977
    return pack(Message(Kind.READ, group.generation, 0, 0, (Section(1, NUM_IDS, ids.view(np.uint8), EMPTY),)))


def memory_is_readable() -> bool:
    """As far as a test can tell: Yama may forbid it to all but root."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text().strip() in "01"


@pytest.mark.skipif(not memory_is_readable(), reason="the system does not let processes read each other's memory")
def test_memory_spares_the_sockets_the_bytes_and_brings_the_same(lasting_pair: Pair) -> None:
    rows, moved = [], []
    for same_host in ("memory", "sockets"):
        group = lasting_pair.form(same_host)
        before = counted(group.transport)
        rows.append(bytes(unpack(reply(group.send(large(group)))).sections[0].values))
        after = counted(group.transport)
        moved.append((after.sent - before.sent, after.received - before.received))
        group.leave()
    assert rows[0] == rows[1] and len(rows[0]) == NUM_IDS * 4 * DIM
    assert max(moved[0]) < 10_000
    assert moved[1][0] > NUM_IDS * 8 and moved[1][1] > NUM_IDS * 4 * DIM


def test_a_message_that_a_peer_may_still_read_outlives_its_group(lasting_pair: Pair) -> None:
    """Else the peer, which lives on, could take what the memory holds next for the message."""
    group = lasting_pair.form()
    message = large(group)
    reference = weakref.ref(message)
    with stalled(psutil.Process(lasting_pair.peer.pid)):
        answer = group.send(message)
        del message
        group.transport.close()
        with pytest.raises(TransportError):
            answer.result(LIMIT_S)
        del answer
        assert reference() is not None
    group.leave()
    lasting_pair.form().leave()
    assert reference() is None


def test_a_server_killed_while_its_memory_is_read_is_lost_in_one_line() -> None:
    with contextlib.closing(Pair(SERVICE)) as pair:
        group = pair.form()
        answers = [group.send(large(group)) for _ in range(30)]
        answers[0].result(LIMIT_S)
        pair.peer.kill()
        with pytest.raises(TransportError, match=r"^server 0 was lost after \d+\.\d s: [^\n]+$"):
            for answer in answers:
                assert len(unpack(answer.result(LIMIT_S)).sections[0].values) == NUM_IDS * 4 * DIM
