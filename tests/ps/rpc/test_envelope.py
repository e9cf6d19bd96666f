"""What torch RPC adds to a message, as computed and as the kernel counts it on the sockets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import wait_for_reply
from shardkeep.base.net.sockets import Counters, connections
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc.group import RpcGroup, connect_store
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic, answer_bytes, call_bytes
from shardkeep.ps.wire.message import Kind
from tests.support.messages import Message, Section, pack
from tests.support.rpc_peer import Peer

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells its counters on Linux"),
]

LIMIT_S = 90.0
GENERATION = 12
CALLS = 5
SERVICE: dict[str, Any] = {
    "tables": [{"name": "item", "dim": 4}],
    "consistency": {"mode": "bounded"},
    "num_workers": 1,
    "seed": 5,
}


@pytest.fixture(scope="module")
def transport(store_host: StoreHost) -> Iterator[RpcGroup]:
    peer = Peer(store_host.open(0)[1], service=SERVICE)
    peer.tell("form", generation=GENERATION)
    transport = RpcGroup.form(
        connect_store(*store_host.open(0), timeout_s=LIMIT_S), generation=GENERATION, role="worker", index=0,
        num_servers=1, num_workers=1, host="127.0.0.1", timeout_s=LIMIT_S, same_host="sockets",
    )  # fmt: skip
    assert peer.answer() == "formed"
    yield transport
    transport.close()
    assert peer.close() == 0


def message(kind: Kind, step: int, num_ids: int) -> Bytes:
    ids = np.arange(num_ids, dtype=np.int64)
    grad = np.ones(num_ids * 4 * (kind is Kind.PUSH), np.float32)
    return pack(Message(kind, GENERATION, 0, step, (Section(0, num_ids, ids.view(np.uint8), grad.view(np.uint8)),)))


def counted(transport: RpcGroup) -> Counters:
    """On this process's connections to the server, once nothing moves any more."""
    before = None
    while True:
        ports = transport.server_ports
        now = sum((seen for (_, peer), seen in connections().items() if peer[1] in ports), Counters())
        if before is not None and (now.sent, now.received) == (before.sent, before.received):
            return now
        before = now
        time.sleep(0.02)


@pytest.mark.parametrize("num_ids", [1, 4, 11, 12, 23, 24, 4000, 4092, 8200, 100_000])
def test_a_call_and_its_answer_take_just_the_bytes_that_are_computed(transport: RpcGroup, num_ids: int) -> None:
    question = message(Kind.READ, 0, num_ids)
    before = counted(transport)
    for _ in range(CALLS):
        answer = wait_for_reply(transport.send(0, question, timeout_s=LIMIT_S), peer="server 0", timeout_s=LIMIT_S)
    after = counted(transport)
    assert (after.sent - before.sent) / CALLS == question.size + call_bytes(0, GENERATION, question.size)
    assert (after.received - before.received) / CALLS == answer.size + answer_bytes(answer.size)


def test_two_messages_share_a_call(transport: RpcGroup) -> None:
    before, sent = counted(transport), 0
    for step, num_ids in enumerate((1, 12, 5000, 50_000)):
        parts = message(Kind.PUSH, step, num_ids), message(Kind.PULL, step + 1, num_ids)
        wait_for_reply(transport.send(0, *parts, timeout_s=LIMIT_S), peer="server 0", timeout_s=LIMIT_S)
        sent += sum(part.size for part in parts) + call_bytes(0, GENERATION, *(part.size for part in parts))
    assert counted(transport).sent - before.sent == sent


@pytest.mark.parametrize("num_ids", [10, 4000])
def test_the_ledger_of_a_client_holds_just_the_bytes_of_its_connections(transport: RpcGroup, num_ids: int) -> None:
    table, mode = TableSpec(**SERVICE["tables"][0]), ConsistencyConfig(**SERVICE["consistency"])
    traffic = WorkerTraffic()
    metered = MeteredTransport(transport, LedgerMeter(traffic))
    client = RowClient(metered, tables=[table], generation=GENERATION, consistency=mode)
    before = counted(transport)
    request = client.request({"item": np.arange(num_ids, dtype=np.int64) ** 3})
    for step in range(3):
        client.pull(step, request).result()
        client.push(step, request, {"item": np.ones((num_ids, 4), np.float32)})
    client.wait_acknowledged()
    after, totals = counted(transport), traffic.ledger.totals()
    assert (totals["to_servers"], totals["from_servers"]) == (
        after.sent - before.sent, after.received - before.received,
    )  # fmt: skip
