"""How long the steps of a worker wait for each server: the last reply to arrive gets the wait."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.ps.client.calls import ReplyWaits, ServerCalls
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind, allocate
from tests.support.cases import every

ACK = allocate(Kind.ACK, generation=0, rank=0, step=0).buffer
SPEC = TableSpec(name="user", dim=4)
IDS = np.arange(20, dtype=np.int64)
LATE_S = 0.05


class Servers:
    """Servers whose replies arrive at given times. The clock moves only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        calls = ServerCalls(LocalTransport([]), rank=0, generation=0, timeout_s=30.0)
        self.waits = ReplyWaits(calls, clock=lambda: self.now)

    def reply(self, *arrive_s: float) -> list[int]:
        """Waits for one reply of each server; the servers in the order in which their replies were read."""
        futures = [(server, self._future(at)) for server, at in enumerate(arrive_s)]
        return [server for server, _ in self.waits.replies(futures, Kind.ACK)]

    def _future(self, at: float) -> Future[Bytes]:
        servers = self

        class Reply(Future[Bytes]):
            def done(self) -> bool:
                return servers.now >= at

            def result(self, timeout: float | None = None) -> Bytes:
                servers.now = max(servers.now, at)
                return ACK

        return Reply()


@every(
    ("arrive_s", "waited"),
    [
        ((0.0, 0.0, 0.0), {}),
        ((3.0, 0.0, 0.0), {0: 3.0}),
        ((1.0, 4.0, 0.0), {1: 4.0}),
        ((4.0, 1.0, 2.0), {0: 4.0}),
        ((1.0, 2.0, 5.0), {2: 5.0}),
        ((1.0, 5.0, 2.0), {1: 5.0}),
    ],
    ids=["all are there", "one is late", "two are late", "the first", "the last", "the one between"],
)
def test_the_last_reply_to_arrive_gets_the_whole_wait(arrive_s: tuple[float, ...], waited: dict[int, float]) -> None:
    servers = Servers()
    assert servers.reply(*arrive_s) == [0, 1, 2]
    assert servers.waits.seconds == waited


def test_the_waits_of_steps_add_up() -> None:
    servers = Servers()
    servers.reply(2.0, 1.0)
    servers.reply(3.0, 7.0)
    servers.reply(9.0, 8.0)
    assert servers.waits.seconds == {0: 4.0, 1: 5.0}


class LateServer:
    """A server whose replies arrive LATE_S after they were made."""

    def __init__(self, service: ShardService) -> None:
        self._service = service

    def __call__(self, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        reply, late = self._service.handle(message, then), Future[Bytes]()
        threading.Timer(LATE_S, lambda: late.set_result(reply.result(90))).start()
        return late


def connected(*, measures_waits: bool) -> RowClient:
    """A client of two servers. The second is late."""
    consistency = ConsistencyConfig(mode="bounded", staleness=1)
    first, second = (
        ShardService(shard=s, tables=[SPEC], consistency=consistency, num_workers=1, seed=1) for s in range(2)
    )
    transport = LocalTransport([first.handle, LateServer(second)])
    return RowClient(transport, tables=[SPEC], consistency=consistency, measures_waits=measures_waits)


def test_a_pull_that_waits_for_a_late_server_counts_for_that_server() -> None:
    client = connected(measures_waits=True)
    client.pull(0, client.request({"user": IDS})).result()
    assert client.waits is not None
    assert list(client.waits.seconds) == [1] and LATE_S / 2 < client.waits.seconds[1] < 100 * LATE_S


def test_evaluation_and_the_end_of_training_count_for_no_step() -> None:
    client = connected(measures_waits=True)
    request = client.request({"user": IDS})
    client.read(request).result()
    client.push(0, request, {"user": np.ones((IDS.size, 4), np.float32)})
    client.fence(1)
    assert client.waits is not None and client.waits.seconds == {}


def test_nothing_is_measured_unless_somebody_asks_for_it() -> None:
    client = connected(measures_waits=False)
    client.pull(0, client.request({"user": IDS})).result()
    assert client.waits is None
