"""A push and the next pull in one call: what answers both, what is refused, and gradients that are in their message."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import RemoteError
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.clients import SUMS, servers_of
from tests.support.messages import Message, pack, unpack
from tests.support.one_table import pulled

SPEC = TableSpec(name="t", dim=4, **SUMS)
IDS = np.arange(1, 30, 4)
ONES = {"t": np.ones((IDS.size, 4), np.float32)}


class CountedTransport(LocalTransport):
    def __init__(self, services: list[ShardService]) -> None:
        super().__init__([service.handle for service in services])
        self.calls: list[int] = []

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        self.calls.append(1 if then is None else 2)
        return super().send(server, message, then, timeout_s=timeout_s)


def make(
    mode: str = "bounded", num_servers: int = 1, generation: int = 0
) -> tuple[RowClient, list[ShardService], CountedTransport]:
    services = servers_of([SPEC], num_servers, mode=mode)
    transport = CountedTransport(services)
    client = RowClient(transport, tables=[SPEC], consistency=ConsistencyConfig(mode=mode), generation=generation)
    return client, services, transport


@every("mode", ["sync", "bounded", "async"])
@every("num_servers", [1, 3])
def test_an_exchange_is_a_push_and_a_pull(mode: str, num_servers: int) -> None:
    client, services, _ = make(mode, num_servers)
    request = client.request({"t": IDS})
    pull = client.pull(0, request)
    for step in range(4):
        assert (pull.result()["t"] == -step).all()
        grads = client.gradients(step, request)
        grads["t"][...] += 1.0
        pull = client.exchange(step, request, grads, step + 1, request)
    assert (pull.result()["t"] == -4).all()
    client.wait_acknowledged()
    assert sum(service.report()["pushes"] for service in services) == 4 * num_servers


@every("num_servers", [1, 3])
def test_a_push_that_rides_goes_in_the_call_of_the_next_pull(num_servers: int) -> None:
    client, _, transport = make(num_servers=num_servers)
    request = client.request({"t": IDS})
    pull = client.pull(0, request)
    for step in range(3):
        assert (pull.result()["t"] == -step).all()
        client.push(step, request, ONES, pulls=[pull], rides=True)
        pull = client.pull(step + 1, request)
    assert transport.calls == [1] * num_servers + [2] * num_servers * 3
    assert (pull.result()["t"] == -3).all()


@every("call", ["read", "fence", "push", "wait_acknowledged"])
def test_any_other_call_sends_a_push_that_rides(call: str) -> None:
    client, (service,), _ = make()
    request = client.request({"t": IDS})
    client.push(0, request, ONES, rides=True)
    assert service.report()["pushes"] == 0 and client.pushes.next_step == 1
    calls = {
        "read": lambda: client.read(request).result(),
        "fence": lambda: client.fence(1),
        "push": lambda: client.push(1, request, ONES, rides=True),
        "wait_acknowledged": client.wait_acknowledged,
    }
    calls[call]()
    assert service.report()["pushes"] == 1 and (pulled(service.tables[0], IDS) == -1).all()


def test_a_refused_push_answers_for_both_and_raises_when_rows_are_wanted() -> None:
    _, (service,), _ = make()
    answer = service.handle(pack(Message(Kind.PUSH, 7, 0, 0)), pack(Message(Kind.PULL, 0, 0, 1))).result(90)
    assert unpack(answer).kind is Kind.ERROR
    assert service.report()["pulls"] == 0

    client, *_ = make(generation=3)
    request = client.request({"t": IDS})
    pull = client.exchange(0, request, ONES, 1, request)
    with pytest.raises(RemoteError, match="generation 0, the message is of generation 3"):
        pull.result()


def test_gradients_made_for_other_ids_are_sent_with_the_ids_of_their_push() -> None:
    client, (service,), _ = make()
    grads = client.gradients(0, client.request({"t": IDS + 100}))
    grads["t"][...] += 1.0
    client.push(0, client.request({"t": IDS}), grads)
    client.wait_acknowledged()
    assert (pulled(service.tables[0], IDS) == -1).all() and (pulled(service.tables[0], IDS + 100) == 0).all()
