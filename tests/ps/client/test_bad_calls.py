"""What a client refuses: gradients that do not fit, ids that cannot be placed, answers that are none."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage, ProtocolError, RemoteError, TransportError
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.transport.transport import Handler
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from tests.support.cases import every
from tests.support.clients import Recorded, connect, ids_of, ones, services
from tests.support.messages import Message, Section, pack


@every(
    ("table", "grad", "text"),
    [
        ("item", np.ones((1, 3), np.float32), r"table item: float32 gradients \(1, 3\); expected .* \(2, 3\)"),
        ("item", np.ones((2, 4), np.float32), r"gradients \(2, 4\)"),
        ("item", np.ones((2, 3)), "float64 gradients"),
        ("item", np.ones((3, 2), np.float32).T, "expected contiguous"),
        ("user", np.ones((2, 4), np.float32), "gradients of table user, which the request has no"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_and_nothing_is_sent(table: str, grad: np.ndarray, text: str) -> None:
    recorded, traffic = [Recorded(shard) for shard in services(2)], WorkerTraffic()
    client = connect(recorded, traffic=traffic)
    with pytest.raises(ProtocolError, match=text):
        client.push(0, client.request({"item": ids_of(1, 2)}), {table: grad})
    assert [server.asked for server in recorded] == [[], []]
    assert traffic.ledger.totals()["total"] == 0


@every(
    ("ids", "text"),
    [
        ({"users": ids_of(1)}, "table users is unknown; the tables are user, item"),
        ({"user": np.array([1, 2], np.int32)}, r"table user: ids of int32 \(2,\); allowed: int64"),
        ({"user": np.array([[1]], np.int64)}, r"ids of int64 \(1, 1\)"),
    ],
    ids=["unknown table", "int32", "a matrix"],
)
def test_ids_that_cannot_be_placed_are_refused(ids: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        connect([services()[0].handle]).request(ids)


def test_a_step_pushed_again_ids_out_of_order_and_a_closed_server_are_told() -> None:
    (shard,) = services(mode="sync")
    client = connect([shard.handle], "sync")
    with pytest.raises(RemoteError, match="server 0: table user: id 1 follows 2; ids must rise"):
        client.pull(0, client.request({"user": ids_of(2, 1)})).result()
    client.push(0, client.request({}), {})
    with pytest.raises(ProtocolError, match="step 0 was pushed before"):
        client.push(0, client.request({}), {})
    shard.close("the job is over")
    with pytest.raises(TransportError, match="the job is over"):
        client.pull(1, client.request({})).result()


def answering(packed: Bytes) -> Handler:
    def handler(_message: Bytes) -> Future[Bytes]:
        future: Future[Bytes] = Future()
        future.set_result(packed)
        return future

    return handler


def rows(count: int, *, table: int = 0, id_bytes: int = 0, row_bytes: int = 16, **formats: int) -> Bytes:
    section = Section(table, count, np.zeros(id_bytes, np.uint8), np.zeros(count * row_bytes, np.uint8), **formats)
    return pack(Message(Kind.ROWS, 0, 0, 0, (section,)))


ASKED = r"asked for rows of 1 tables \(2 of table 0\)"
NO_IDS = "server 0 answered a pull with {} bytes of ids; allowed: none"
BAD_ANSWERS: dict[str, tuple[Bytes, type[Exception], str]] = {
    "an error": (text_message(Kind.ERROR, "out of paper"), RemoteError, "^server 0: out of paper$"),
    "another kind": (pack(Message(Kind.ACK, 0, 0, 0)), ProtocolError, "server 0 answered ACK, expected ROWS"),
    "no message": (np.arange(99, dtype=np.uint8), CorruptMessage, "^server 0 answered version 0"),
    "nothing": (EMPTY, CorruptMessage, "^server 0 answered 0 bytes are no message"),
    "no tables": (pack(Message(Kind.ROWS, 0, 0, 0)), CorruptMessage, f"answered rows of 0 tables, {ASKED}"),
    "another table": (rows(2, table=1), CorruptMessage, rf"answered rows of 1 tables \(2 of table 1\), {ASKED}"),
    "a row too few": (rows(1), CorruptMessage, r"answered rows of 1 tables \(1 of table 0\)"),
    "a row too many": (rows(3), CorruptMessage, r"answered rows of 1 tables \(3 of table 0\)"),
    "half a row": (rows(2, row_bytes=13), CorruptMessage, "26 bytes"),
    "another format": (rows(2, value_format=35), CorruptMessage, "unknown value format 35"),
    "ids": (rows(2, id_bytes=8), CorruptMessage, NO_IDS.format(8)),
    "names of rows": (rows(2, id_format=16), CorruptMessage, NO_IDS.format(0)),
}


@every("name", BAD_ANSWERS)
def test_a_bad_answer_is_one_line(name: str) -> None:
    packed, kind, text = BAD_ANSWERS[name]
    client = connect([answering(packed)])
    with pytest.raises(kind, match=text) as error:
        client.pull(0, client.request({"user": ids_of(1, 2)})).result()
    assert "\n" not in str(error.value)
    assert not getattr(error.value, "retryable", False)


def test_a_push_that_a_server_refused_is_told_by_the_next_wait_and_again_by_every_other() -> None:
    client = connect([answering(text_message(Kind.ERROR, "no room"))])
    client.push(0, client.request({"item": ids_of(1)}), {"item": ones(ids_of(1), 1)})
    for call in (client.wait_acknowledged, lambda: client.fence(1), lambda: client.push(3, client.request({}), {})):
        with pytest.raises(RemoteError, match="server 0: no room"):
            call()
