"""How bytes move between two processes of one host: out of the sender's memory, or through sockets only."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import wait_for_reply
from shardkeep.base.errors import TransportError
from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc.group import RpcGroup, connect_store
from shardkeep.ps.wire.message import EMPTY, Kind
from tests.support.messages import Message, Section, pack, unpack
from tests.support.rpc_peer import Peer

pytestmark = pytest.mark.waits_for_processes

LIMIT_S = 90.0  # a peer imports torch on a busy machine
NUM_IDS, DIM = 300_000, 16
SERVICE: dict[str, Any] = {
    "tables": [{"name": "item", "dim": DIM}],
    "consistency": {"mode": "sync"},
    "num_workers": 1,
    "seed": 5,
}


@pytest.fixture
def peer(store_host: StoreHost) -> Iterator[Peer]:
    peer = Peer(store_host.open(0)[1], service=SERVICE)
    yield peer
    peer.kill()
    peer.close()


def join(peer: Peer, host: StoreHost, generation: int, same_host: Literal["memory", "sockets"]) -> RpcGroup:
    store = connect_store(*host.open(0), timeout_s=LIMIT_S)
    peer.tell("form", generation=generation)
    transport = RpcGroup.form(
        store, generation=generation, role="worker", index=0, num_servers=1, num_workers=1, host="127.0.0.1",
        timeout_s=LIMIT_S, same_host=same_host,
    )  # fmt: skip
    assert peer.answer() == "formed"
    return transport


def question(generation: int, kind: Kind = Kind.READ, step: int = 0) -> Bytes:
    ids = np.arange(NUM_IDS, dtype=np.int64) * 977
    return pack(Message(kind, generation, 0, step, (Section(0, NUM_IDS, ids.view(np.uint8), EMPTY),)))


def memory_is_readable() -> bool:
    """As far as a test can tell: Yama may forbid it to all but root."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return sys.platform == "linux" and (not scope.exists() or scope.read_text().strip() in "01")


def loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


@pytest.mark.skipif(not memory_is_readable(), reason="the system does not let processes read each other's memory")
def test_memory_spares_the_sockets_the_bytes_and_brings_the_same(peer: Peer, store_host: StoreHost) -> None:
    answers, moved = [], []
    for generation, same_host in ((1, "memory"), (2, "sockets")):
        transport = join(peer, store_host, generation, same_host)
        before = loopback_bytes()
        answers.append(
            wait_for_reply(transport.send(0, question(generation), timeout_s=LIMIT_S), peer="it", timeout_s=LIMIT_S)
        )
        moved.append(loopback_bytes() - before)
        transport.close()
        peer.ask("leave")
    rows = [bytes(unpack(answer).sections[0].values) for answer in answers]
    size = NUM_IDS * (8 + 4 * DIM)
    assert rows[0] == rows[1] and len(rows[0]) == NUM_IDS * 4 * DIM
    assert moved[1] > size
    assert moved[0] < size / 2  # other processes of this host use loopback, too


def test_a_server_killed_while_its_memory_is_read_is_lost_in_one_line(peer: Peer, store_host: StoreHost) -> None:
    transport = join(peer, store_host, 3, "memory")
    answers = [transport.send(0, question(3), timeout_s=LIMIT_S) for _ in range(40)]
    answers[0].result(LIMIT_S)
    peer.kill()
    with pytest.raises(TransportError, match=r"^server 0 was lost after \d+\.\d s: [^\n]+$"):
        for answer in answers:
            assert len(unpack(answer.result(LIMIT_S)).sections[0].values) == NUM_IDS * 4 * DIM
    transport.close()


def test_a_message_that_a_peer_may_still_read_outlives_its_group(peer: Peer, store_host: StoreHost) -> None:
    """Else the peer, which lives on, could take what the memory holds next for the message."""
    transport = join(peer, store_host, 4, "memory")
    message = question(4)
    reference = weakref.ref(message)
    answer = transport.send(0, message, timeout_s=LIMIT_S)
    del message
    transport.close()
    with pytest.raises(TransportError):
        answer.result(LIMIT_S)
    del answer
    assert reference() is not None
    peer.ask("leave")
    again = join(peer, store_host, 5, "memory")
    again.close()
    assert reference() is None
