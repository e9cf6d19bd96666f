"""Replies: a READ says for each id whether it has a row, and the last reply to arrive gets the wait of a step."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.calls import ReplyWaits, ServerCalls
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import EMPTY, Kind, allocate
from tests.support.cases import every
from tests.support.clients import TABLES, connect, ids_of, many, services
from tests.support.messages import Message, Section, pack, unpack


def job(num_servers: int, coding: str = "raw") -> tuple[list[ShardService], RowClient]:
    shards = services(num_servers, "sync", ids=coding)
    return shards, connect([shard.handle for shard in shards], "sync", compression=CompressionConfig(ids=coding))


def train(client: RowClient, **ids: np.ndarray) -> None:
    request = client.request(ids)
    rows = client.pull(0, request).result()
    client.push(0, request, {name: np.ones_like(row) for name, row in rows.items()})
    client.fence(1)


@every("coding", ["raw", "coded"])
@every("num_servers", [1, 3])
def test_a_read_says_for_each_id_whether_it_has_a_row(num_servers: int, coding: str) -> None:
    _, client = job(num_servers, coding)
    user, item = many(203, seed=5), many(203, seed=6)
    train(client, user=user[::3], item=item[:7])
    pulled = client.read(client.request({"user": user, "item": item}))
    rows = pulled.result()
    expected = np.concatenate([np.isin(user, user[::3]), np.isin(item, item[:7])])
    assert pulled.has_row_V is not None and np.array_equal(pulled.has_row_V, expected)
    assert rows["user"].shape == (user.size, 4) and np.isfinite(rows["item"]).all()


def test_a_read_of_no_ids_and_a_pull_say_nothing_of_rows() -> None:
    (shard, _), client = job(2)
    pulled = client.read(client.request({}))
    pulled.result()
    assert pulled.has_row_V is not None and pulled.has_row_V.size == 0
    reply = unpack(shard.handle(pack(Message(Kind.READ, 0, 0, 0))).result(0))
    assert (reply.kind, reply.sections) == (Kind.ROWS, ())

    (shard,), client = job(1)
    train(client, user=ids_of(1, 2))
    pulled = client.pull(1, client.request({"user": ids_of(1, 2, 3)}))
    pulled.result()
    assert pulled.has_row_V is None
    shard.handle(pack(Message(Kind.PUSH, 0, 0, 1)))
    message = pack(Message(Kind.PULL, 0, 0, 2, (Section(0, 3, ids_of(1, 2, 3).view(np.uint8), EMPTY),)))
    assert [(s.ids.size, s.id_format) for s in unpack(shard.handle(message).result(0)).sections] == [(0, 0)]


def damaged(section: Section, change: str) -> Section:
    ids = section.ids.copy()
    match change:
        case "a bit behind the last id":
            ids[-1] |= 0x80
        case "a byte too few":
            ids = ids[:-1]
        case "a byte too many":
            ids = np.append(ids, np.uint8(0))
        case "no bits":
            ids = ids[:0]
    return replace(section, ids=ids, id_format=0 if change == "another format" else section.id_format)


@every("change", ["a bit behind the last id", "a byte too few", "a byte too many", "no bits", "another format"])
def test_a_damaged_answer_is_refused(change: str) -> None:
    (shard,), _ = job(1)

    def handle(message: Bytes) -> Future[Bytes]:
        answer = unpack(shard.handle(message).result(0))
        changed: Future[Bytes] = Future()
        changed.set_result(pack(replace(answer, sections=(damaged(answer.sections[0], change),))))
        return changed

    client = connect([handle], "sync")
    with pytest.raises(CorruptMessage, match="say which of 11 ids have rows; allowed: a bit for each"):
        client.read(client.request({"user": np.arange(11)})).result()


# ---- how long steps wait for each server ----


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
                return allocate(Kind.ACK, generation=0, rank=0, step=0).buffer

        return Reply()


@every(
    ("arrive_s", "waited"),
    [
        ((0.0, 0.0, 0.0), {}),
        ((3.0, 0.0, 0.0), {0: 3.0}),
        ((1.0, 2.0, 5.0), {2: 5.0}),
        ((1.0, 5.0, 2.0), {1: 5.0}),
    ],
)
def test_the_last_reply_to_arrive_gets_the_whole_wait_and_those_of_steps_add_up(
    arrive_s: tuple[float, ...], waited: dict[int, float]
) -> None:
    servers = Servers()
    assert servers.reply(*arrive_s) == [0, 1, 2]
    assert servers.waits.seconds == waited
    servers.reply(servers.now + 9.0, servers.now + 8.0)
    assert servers.waits.seconds == waited | {0: waited.get(0, 0.0) + 9.0}


LATE_S = 0.05


class Late(Future[Bytes]):
    """A reply that comes LATE_S after somebody begins to wait for it."""

    def __init__(self, reply: Future[Bytes]) -> None:
        super().__init__()
        self.reply = reply

    def result(self, timeout: float | None = None) -> Bytes:
        if not self.done():
            threading.Timer(LATE_S, lambda: self.set_result(self.reply.result(90))).start()
        return super().result(timeout)


def test_a_pull_that_waits_for_a_late_server_counts_for_that_server_and_nothing_else_nor_unasked_does() -> None:
    first, second = services(2)
    transport = LocalTransport([first.handle, lambda *messages: Late(second.handle(*messages))])
    client = RowClient(transport, tables=TABLES, measures_waits=True)
    request = client.request({"user": np.arange(20)})
    client.read(request).result()
    client.push(0, request, {"user": np.ones((20, 4), np.float32)})
    client.fence(1)
    assert client.waits is not None and client.waits.seconds == {}
    client.pull(1, request).result()
    assert list(client.waits.seconds) == [1] and client.waits.seconds[1] > LATE_S / 2

    client = RowClient(transport, tables=TABLES)
    client.pull(0, request).result()
    assert client.waits is None
