"""Replies: a READ says for each id whether it has a row, and the last reply to arrive gets the wait of a step."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.calls import ReplyWaits, ServerCalls
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.ids import ROW_BITS, read_row_bits, row_bit_bytes, write_row_bits
from shardkeep.ps.wire.message import EMPTY, Kind, allocate, read
from tests.support.cases import every
from tests.support.clients import ids_of, servers_of
from tests.support.examples import examples
from tests.support.messages import Message, Section, pack, unpack

TABLES = (TableSpec(name="user", dim=4), TableSpec(name="item", dim=3))
SYNC = ConsistencyConfig(mode="sync")


def job(num_servers: int, coding: str) -> tuple[list[ShardService], CompressionConfig]:
    compression = CompressionConfig(ids=coding)
    return servers_of(TABLES, num_servers, mode="sync", compression=compression), compression


def connect(handlers: list[Handler], compression: CompressionConfig) -> RowClient:
    return RowClient(LocalTransport(handlers), tables=TABLES, consistency=SYNC, compression=compression)


def train(client: RowClient, **ids: np.ndarray) -> None:
    """One step whose gradients create rows."""
    request = client.request(ids)
    rows = client.pull(0, request).result()
    client.push(0, request, {name: np.ones_like(row) for name, row in rows.items()})
    client.fence(1)


@every("coding", ["raw", "coded"])
@every("num_servers", [1, 3])
def test_a_read_says_for_each_id_whether_it_has_a_row(num_servers: int, coding: str) -> None:
    services, compression = job(num_servers, coding)
    client = connect([service.handle for service in services], compression)
    rng = np.random.default_rng(5)
    user, item = (np.unique(rng.integers(-(2**63), 2**63 - 1, 203)) for _ in range(2))
    train(client, user=user[::3], item=item[:7])
    pulled = client.read(client.request({"user": user, "item": item}))
    rows = pulled.result()
    expected = np.concatenate([np.isin(user, user[::3]), np.isin(item, item[:7])])
    assert pulled.has_row_V is not None and np.array_equal(pulled.has_row_V, expected)
    assert rows["user"].shape == (user.size, 4) and np.isfinite(rows["item"]).all()


def test_a_read_of_no_ids_and_a_pull_say_nothing_of_rows() -> None:
    services, compression = job(2, "raw")
    client = connect([service.handle for service in services], compression)
    pulled = client.read(client.request({}))
    pulled.result()
    assert pulled.has_row_V is not None and pulled.has_row_V.size == 0
    reply = unpack(services[0].handle(pack(Message(Kind.READ, 0, 0, 0))).result(0))
    assert (reply.kind, reply.sections) == (Kind.ROWS, ())

    services, compression = job(1, "raw")
    client = connect([services[0].handle], compression)
    train(client, user=ids_of(1, 2))
    pulled = client.pull(1, client.request({"user": ids_of(1, 2, 3)}))
    pulled.result()
    assert pulled.has_row_V is None
    message = pack(Message(Kind.PULL, 0, 0, 2, (Section(0, 3, ids_of(1, 2, 3).view(np.uint8), EMPTY),)))
    push = pack(Message(Kind.PUSH, 0, 0, 1, ()))
    services[0].handle(push)
    assert [(s.ids.size, s.id_format) for s in unpack(services[0].handle(message).result(0)).sections] == [(0, 0)]


def damaged(section: Section, change: str) -> Section:
    ids, form = section.ids.copy(), section.id_format
    match change:
        case "a bit behind the last id":
            ids[-1] |= 0x80
        case "a byte too few":
            ids = ids[:-1]
        case "a byte too many":
            ids = np.append(ids, np.uint8(0))
        case "no bits":
            ids = ids[:0]
        case "another format":
            form = 0
    return Section(section.table, section.rows, ids, section.values, form, section.value_format)


@every("coding", ["raw", "coded"])
@every("change", ["a bit behind the last id", "a byte too few", "a byte too many", "no bits", "another format"])
def test_a_damaged_answer_is_refused(change: str, coding: str) -> None:
    (service,), compression = job(1, coding)

    def handle(message: Bytes) -> Future[Bytes]:
        answer = unpack(service.handle(message).result(0))
        changed: Future[Bytes] = Future()
        parts = (damaged(answer.sections[0], change),)
        changed.set_result(pack(Message(answer.kind, answer.generation, answer.rank, answer.step, parts)))
        return changed

    client = connect([handle], compression)
    with pytest.raises(CorruptMessage, match="say which of 11 ids have rows; allowed: a bit for each"):
        client.read(client.request({"user": np.arange(11)})).result()


@examples()
@given(st.lists(st.lists(st.booleans(), max_size=20), max_size=6))
def test_bits_come_back_of_any_sections(sections: list[list[bool]]) -> None:
    rows_S = np.array([len(section) for section in sections], np.int64)
    starts_S1 = np.concatenate([[0], np.cumsum(rows_S)]).astype(np.int64)
    has_row_V = np.array([bit for section in sections for bit in section], np.bool_)
    message = allocate(
        Kind.ROWS,
        generation=0,
        rank=0,
        step=0,
        tables_S=np.arange(len(sections)),
        rows_S=rows_S,
        id_formats_S=ROW_BITS,
        id_bytes_S=row_bit_bytes(starts_S1),
    )
    message.ids_area[:] = write_row_bits(has_row_V)
    assert message.ids_area.size == -(-has_row_V.size // 8)
    assert np.array_equal(read_row_bits(read(message.buffer)), has_row_V)


# ---- how long steps wait for each server ----


ACK = allocate(Kind.ACK, generation=0, rank=0, step=0).buffer
SPEC = TableSpec(name="user", dim=4)
TWENTY = np.arange(20, dtype=np.int64)
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


class Late(Future[Bytes]):
    """A reply that comes LATE_S after somebody begins to wait for it."""

    def __init__(self, reply: Future[Bytes]) -> None:
        super().__init__()
        self.reply = reply

    def result(self, timeout: float | None = None) -> Bytes:
        if not self.done():
            threading.Timer(LATE_S, lambda: self.set_result(self.reply.result(90))).start()
        return super().result(timeout)


class LateServer:
    """A server whose replies are late for whoever waits for them."""

    def __init__(self, service: ShardService) -> None:
        self._service = service

    def __call__(self, message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
        return Late(self._service.handle(message, then))


def connected(*, measures_waits: bool) -> RowClient:
    """A client of two servers. The second is late."""
    consistency = ConsistencyConfig(mode="bounded", staleness=1)
    first, second = servers_of([SPEC], 2, consistency=consistency)
    transport = LocalTransport([first.handle, LateServer(second)])
    return RowClient(transport, tables=[SPEC], consistency=consistency, measures_waits=measures_waits)


def test_a_pull_that_waits_for_a_late_server_counts_for_that_server() -> None:
    client = connected(measures_waits=True)
    client.pull(0, client.request({"user": TWENTY})).result()
    assert client.waits is not None
    assert list(client.waits.seconds) == [1] and client.waits.seconds[1] > LATE_S / 2


def test_nothing_is_measured_of_evaluation_and_the_end_of_training_nor_unasked() -> None:
    client = connected(measures_waits=True)
    request = client.request({"user": TWENTY})
    client.read(request).result()
    client.push(0, request, {"user": np.ones((TWENTY.size, 4), np.float32)})
    client.fence(1)
    assert client.waits is not None and client.waits.seconds == {}

    client = connected(measures_waits=False)
    client.pull(0, client.request({"user": TWENTY})).result()
    assert client.waits is None
