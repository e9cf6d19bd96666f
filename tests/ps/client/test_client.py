"""RowClient against real services in this process: what it sends, waits for, checks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage, DeadlineExceeded, ProtocolError, RemoteError, TransportError
from shardkeep.compression.config import CompressionConfig, PullConfig, PushConfig
from shardkeep.compression.ids.codes import IdFormat
from shardkeep.compression.selection.shares import num_kept
from shardkeep.compression.values.codec import value_codec
from shardkeep.compression.values.registry import FORMATS as VALUE_FORMATS
from shardkeep.compression.values.rounding import row_keys, table_key
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.admin import GetReport
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.held_gate import HeldGate
from tests.support.messages import Message, Section, pack, unpack
from tests.support.one_table import OneTable, exported, pulled

TABLES = (
    TableSpec(name="user", dim=4),
    TableSpec(name="item", dim=3, optimizer={"name": "sgd", "lr": 1.0}, init={"name": "zeros"}),
)
SOON_S = 0.05


def consistency(mode: str) -> ConsistencyConfig:
    return ConsistencyConfig(mode=mode)


def services(
    count: int = 1,
    mode: str = "bounded",
    pull_values: str = "fp32",
    pull_scale: Any = None,
    workers: int = 1,
    push: PushConfig | None = None,
) -> list[ShardService]:
    return [
        ShardService(
            shard=shard,
            tables=TABLES,
            consistency=consistency(mode),
            num_workers=workers,
            seed=3,
            compression=CompressionConfig(
                pull=PullConfig(values=pull_values, scale=pull_scale), push=push or PushConfig()
            ),
        )
        for shard in range(count)
    ]


def metered(handlers: Sequence[Handler], traffic: WorkerTraffic) -> MeteredTransport:
    """The transport of another generation."""
    return MeteredTransport(LocalTransport(handlers), LedgerMeter(traffic))


def connect(
    handlers: Sequence[Handler], mode: str = "bounded", traffic: WorkerTraffic | None = None, **settings: Any
) -> RowClient:
    transport = metered(handlers, WorkerTraffic() if traffic is None else traffic)
    return RowClient(transport, tables=TABLES, consistency=consistency(mode), **settings)


class Recorded:
    """A server's handler that keeps all packets of both directions."""

    def __init__(self, service: ShardService) -> None:
        self.asked: list[Bytes] = []
        self.answered: list[Future[Bytes]] = []
        self._service = service

    def __call__(self, message: Bytes) -> Future[Bytes]:
        self.asked.append(message)
        self.answered.append(self._service.handle(message))
        return self.answered[-1]

    def sizes(self, kind: Kind) -> list[tuple[int, int]]:
        """Bytes of each packet of a kind and of its answer."""
        pairs = zip(self.asked, self.answered, strict=True)
        return [(asked.size, done.result(0).size) for asked, done in pairs if unpack(asked).kind is kind]

    def num_bytes(self, *kinds: Kind) -> int:
        """Bytes of the packets of these kinds and of their answers."""
        pairs = zip(self.asked, self.answered, strict=True)
        return sum(asked.size + done.result(0).size for asked, done in pairs if unpack(asked).kind in kinds)


def messages(parts: dict[str, int]) -> int:
    """The messages themselves, without what RPC adds."""
    return sum(parts.values()) - parts.get("rpc", 0)


class Held:
    """A server's handler that answers pushes, and only them, when told to."""

    def __init__(self, service: ShardService) -> None:
        self.pushes: list[tuple[int, Future[Bytes]]] = []
        self.pulls: list[int] = []
        self._service = service

    def __call__(self, message: Bytes) -> Future[Bytes]:
        header = unpack(message)
        answer = self._service.handle(message)
        if header.kind is not Kind.PUSH:
            self.pulls.append(header.step)
            return answer
        late: Future[Bytes] = Future()
        self.pushes.append((header.step, late))
        return late

    def acknowledge(self, step: int) -> None:
        for pushed, late in self.pushes:
            if pushed == step:
                late.set_result(pack(Message(Kind.ACK, 0, 0, step)))


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def many(count: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


def ones(ids: np.ndarray, table: int) -> np.ndarray:
    return np.ones((ids.size, TABLES[table].dim), dtype=np.float32)


# ---- rows and gradients find their way ----


@every("num_servers", [1, 2, 3, 5])
def test_rows_come_back_in_the_order_of_the_ids_from_any_number_of_servers(num_servers: int) -> None:
    shards = services(num_servers)
    client = connect([shard.handle for shard in shards])
    expected = OneTable(TABLES[0], seed=3)
    rng = np.random.default_rng(1)
    for step in range(5):
        ids = many(400, seed=step)
        request = client.request({"user": ids})
        pulled = client.pull(step, request)
        assert (pulled.result()["user"] == expected.pull(ids)).all()
        grad = rng.normal(size=(ids.size, 4)).astype(np.float32)
        client.push(step, request, {"user": grad})
        client.wait_acknowledged()
        expected.apply(ids, grad, step=step)
        assert pulled.staleness == 0
    assert (client.read(request).result()["user"] == expected.pull(ids)).all()
    assert sum(shard.tables[0].num_rows for shard in shards) == expected.num_rows
    for server, shard in enumerate(shards):
        assert (server_of(exported(shard.tables[0])[0], num_servers) == server).all()


@pytest.mark.parametrize("mode", ["sync", "bounded", "async"])
def test_tables_without_ids_and_steps_without_tables_are_fine(mode: str) -> None:
    shards = services(2, mode)
    client = connect([shard.handle for shard in shards], mode)
    none = np.empty(0, dtype=np.int64)
    asked = [{"user": none, "item": many(5)}, {"user": none, "item": none}, {}, {"item": ids_of(7)}]
    for step, ids in enumerate(asked):
        request = client.request(ids)
        rows = client.pull(step, request).result()
        assert {name: row.shape for name, row in rows.items()} == {
            name: (wanted.size, client.tables[name].dim) for name, wanted in ids.items()
        }
        client.push(step, request, {name: np.ones_like(row) for name, row in rows.items()})
    client.fence(len(asked))
    assert [report["pushes"] for report in client.calls.ask(GetReport(), dict)] == [4, 4]
    assert (client.read(client.request({"item": ids_of(7)})).result()["item"] == -1.0).all()


def test_gradients_may_be_reused_as_soon_as_push_returns() -> None:
    shard = services(1, "sync")[0]
    client = connect([shard.handle], "sync")
    request = client.request({"item": ids_of(1, 2)})
    grad = ones(ids_of(1, 2), 1)
    client.pull(0, request).result()
    client.push(0, request, {"item": grad})
    grad[:] = 777.0
    assert (client.pull(1, request).result()["item"] == -1.0).all()


def test_what_the_server_holds_is_not_changed_through_pulled_rows() -> None:
    client = connect([services()[0].handle])
    request = client.request({"user": ids_of(1)})
    rows = client.pull(0, request).result()["user"]
    before = rows.copy()
    rows[:] = 5.0
    assert (client.read(request).result()["user"] == before).all()


# ---- order and windows ----


@pytest.mark.parametrize(("mode", "window"), [("sync", 1), ("bounded", 3), ("async", 3)])
def test_a_push_waits_when_a_window_of_pushes_is_not_acknowledged(mode: str, window: int) -> None:
    held = Held(services()[0])
    client = connect([held], mode, timeout_s=SOON_S - 1.0)
    request = client.request({"item": ids_of(1)})
    for step in range(window):
        client.push(step, request, {"item": ones(ids_of(1), 1)})
    with pytest.raises(DeadlineExceeded, match="server 0 did not answer within"):
        client.push(window, request, {"item": ones(ids_of(1), 1)})
    assert [step for step, _ in held.pushes] == list(range(window))
    held.acknowledge(0)
    client.push(window, request, {"item": ones(ids_of(1), 1)})
    assert [step for step, _ in held.pushes] == list(range(window + 1))


def test_in_sync_a_pull_is_sent_only_when_every_server_has_acknowledged_the_push_before_it() -> None:
    shards = services(2, "sync")
    late = Held(shards[1])
    client = connect([shards[0].handle, late], "sync", timeout_s=SOON_S - 1.0)
    request = client.request({"user": many(50)})
    client.pull(0, request).result()
    client.push(0, request, {"user": ones(request.ids["user"], 0)})
    with pytest.raises(DeadlineExceeded, match="server 1"):
        client.pull(1, request)
    assert late.pulls == [0]
    late.acknowledge(0)
    client.pull(1, request).result()
    assert late.pulls == [0, 1]


def test_a_fence_waits_for_acknowledgements() -> None:
    held = Held(services()[0])
    client = connect([held], timeout_s=SOON_S - 1.0)
    request = client.request({"item": ids_of(1)})
    client.push(0, request, {"item": ones(ids_of(1), 1)})
    with pytest.raises(DeadlineExceeded):
        client.fence(1)
    held.acknowledge(0)
    client.fence(1)


def test_acknowledged_pushes_are_forgotten() -> None:
    client = connect([services()[0].handle])
    request = client.request({"item": ids_of(1)})
    for step in range(50):
        client.push(step, request, {"item": ones(ids_of(1), 1)})
    assert client.pushes.num_unacknowledged <= 1


def test_the_histogram_counts_each_pull_that_asked_for_rows_once() -> None:
    shard = services()[0]
    client = connect([shard.handle])
    held = HeldGate(shard)
    request = client.request({"item": ids_of(1)})
    for step in range(3):
        client.pull(step, request).result()
        client.push(step, request, {"item": ones(ids_of(1), 1)})
    client.pull(3, client.request({}))
    client.read(request).result()
    assert client.pulls.staleness_seen == {0: 1, 1: 1, 2: 1}
    held.release()


# ---- compression ----


def gaussian(num_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, dim)).astype(np.float32)


FORMATS = ("fp32", "fp16", "bf16")


@examples(40)
@given(
    keep=st.sampled_from([1.0, 0.5, 0.25, 0.01]),
    push=st.sampled_from(FORMATS),
    pull=st.sampled_from(FORMATS),
    num_servers=st.integers(1, 3),
    num_ids=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_every_format_keeps_signs_sends_the_largest_rows_and_counts_every_byte(
    keep: float, push: str, pull: str, num_servers: int, num_ids: int, seed: int
) -> None:
    recorded = [Recorded(shard) for shard in services(num_servers, pull_values=pull)]
    compression = CompressionConfig(push=PushConfig(keep_rows=keep, values=push), pull=PullConfig(values=pull))
    traffic = WorkerTraffic()
    client = connect(recorded, traffic=traffic, compression=compression)
    ids = many(num_ids, seed)
    grad = np.random.default_rng(seed).normal(size=(ids.size, 3)).astype(np.float32) + np.float32(0.01)
    request = client.request({"item": ids, "user": ids[: ids.size // 2]})
    client.pull(0, request).result()
    client.push(0, request, {"item": grad})
    after = client.pull(1, request).result()["item"]  # zeros - 1.0 * gradient, through both formats
    client.wait_acknowledged()
    sent = np.flatnonzero(after.any(axis=1))
    codecs = value_codec(push), value_codec(pull)
    assert sent.size == (num_kept(ids.size, keep) if ids.size else 0)
    assert (np.sign(after[sent]) == -np.sign(grad[sent])).all()
    carried = codecs[0].decode(codecs[0].encode(grad[sent]), 3)
    assert (after[sent] == codecs[1].decode(codecs[1].encode(-carried), 3)).all()
    norms = np.linalg.norm(grad, axis=1)
    assert sent.size == ids.size or norms[sent].min() >= np.delete(norms, sent).max()
    totals = traffic.ledger.totals()
    assert messages(totals["push"]) == sum(server.num_bytes(Kind.PUSH) for server in recorded)
    assert messages(totals["pull"]) == sum(server.num_bytes(Kind.PULL) for server in recorded)
    assert totals["push"]["values"] == sent.size * codecs[0].row_bytes(3)
    assert totals["push"]["ids"] == sent.size * 8


@every("rounding", ["nearest", "stochastic"])
@every("scale", ["pow2", "fp16"])
@every("name", [name for name, entry in VALUE_FORMATS.items() if entry.config.scaled])
def test_every_scaled_format_carries_rows_both_ways(name: str, scale: Any, rounding: Any) -> None:
    recorded = [Recorded(shard) for shard in services(2, pull_values=name, pull_scale=scale)]
    push, pull = PushConfig(values=name, scale=scale, rounding=rounding), PullConfig(values=name, scale=scale)
    traffic = WorkerTraffic()
    client = connect(recorded, traffic=traffic, compression=CompressionConfig(push=push, pull=pull), seed=5)
    ids, codec = many(40), value_codec(name, scale)
    request = client.request({"item": ids, "user": ids[::3]})
    grads = {"item": gaussian(40, 3, seed=1), "user": gaussian(14, 4, seed=2)}
    for step in (0, 1):
        client.pull(step, request).result()
        client.push(step, request, grads)
    after = client.pull(2, request).result()["item"]
    client.wait_acknowledged()
    rows = np.zeros((40, 3), np.float32)
    for step in (0, 1):
        keys = row_keys(5, table_key("item"), ids, step) if rounding == "stochastic" else None
        rows -= codec.decode(codec.encode(grads["item"], keys), 3)
    assert np.array_equal(after, codec.decode(codec.encode(rows), 3))
    totals = traffic.ledger.totals()
    values = sum(totals[direction].get(part, 0) for direction in ("push", "pull") for part in ("values", "scales"))
    assert values == 5 * (40 * codec.row_bytes(3) + 14 * codec.row_bytes(4))
    assert client.compressor.counts.saturated == 0


def test_what_two_workers_add_to_one_row_is_rounded_apart() -> None:
    stochastic = CompressionConfig(push=PushConfig(values="int2", rounding="stochastic"))
    sent = []
    for rank in (0, 1, 0):
        recorded = Recorded(services(workers=2)[0])
        client = connect([recorded], rank=rank, compression=stochastic)
        client.push(0, client.request({"item": many(40)}), {"item": gaussian(40, 3)})
        sent.append(bytes(unpack(recorded.asked[0]).sections[-1].values))
    assert sent[0] == sent[2] != sent[1]


def test_reads_are_counted_as_pulled_bytes() -> None:
    recorded = Recorded(services()[0])
    traffic = WorkerTraffic()
    client = connect([recorded], traffic=traffic)
    client.read(client.request({"user": many(10)})).result()
    assert messages(traffic.ledger.totals()["read"]) == recorded.num_bytes(Kind.READ) > 0


def test_what_rpc_adds_is_counted_for_each_call_and_each_answer() -> None:
    """503 bytes around 128 and 506 around 288 to the server, 419 around 208 and 418 around 40 back. The kernel counts
    the same around messages of these sizes: tests/ps/rpc/test_envelope.py."""
    recorded = Recorded(services()[0])
    traffic = WorkerTraffic()
    client = connect([recorded], traffic=traffic)
    request = client.request({"user": many(10)})
    client.pull(0, request).result()
    client.push(0, request, {"user": np.ones((10, 4), np.float32)})
    client.wait_acknowledged()
    assert (recorded.sizes(Kind.PULL), recorded.sizes(Kind.PUSH)) == ([(128, 208)], [(288, 40)])
    totals = traffic.ledger.totals()
    assert (totals["pull"]["rpc"], totals["push"]["rpc"]) == (503 + 419, 506 + 418)
    assert (totals["to_servers"], totals["from_servers"]) == (128 + 503 + 288 + 506, 208 + 419 + 40 + 418)
    assert totals["total"] == totals["to_servers"] + totals["from_servers"]


def test_steps_trained_again_are_counted_as_retries_and_questions_as_control() -> None:
    recorded = Recorded(services()[0])
    traffic = WorkerTraffic()
    client = connect([recorded], traffic=traffic)
    request = client.request({"user": many(10)})

    def step(number: int) -> None:
        client.pull(number, request).result()
        client.push(number, request, {"user": np.ones((10, 4), np.float32)})
        client.wait_acknowledged()

    step(0)
    step(1)
    once = traffic.ledger.totals()
    client.regroup(metered([recorded], traffic), 0, 1)
    step(1)
    step(2)
    totals = traffic.ledger.totals()
    for direction in ("pull", "push"):
        assert totals[direction]["retries"] == sum(once[direction].values()) / 2
        assert totals[direction]["values"] == once[direction]["values"] / 2 * 3
    client.calls.ask(GetReport(), dict)
    assert traffic.ledger.totals()["control"] > recorded.num_bytes(Kind.ASK) > 0


@every("moments", [False, True])
@every(("values", "saturated"), [("fp32", 0), ("fp16", 2), ("bf16", 0)])
def test_values_beyond_a_16_bit_range_are_counted(values: str, saturated: int, moments: bool) -> None:
    push = PushConfig(values=values, second_moment=moments, pool_rows=10 if moments else 0)
    shard = services(push=push)[0]
    client = connect([shard.handle], compression=CompressionConfig(push=push))
    request = client.request({"item": ids_of(1, 2)})
    grad = np.array([[1e6, 1.0, 0.0], [-7e5, 60000.0, -1e-3]], np.float32)
    for step in range(2):
        client.push(step, request, {"item": grad})
    assert client.compressor.counts.saturated == 2 * saturated
    client.wait_acknowledged()
    assert np.isfinite(pulled(shard.tables[1], ids_of(1, 2))).all()


# ---- what is refused before it is sent ----


BAD_PUSHES: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "too few rows": (
        {"item": np.ones((1, 3), np.float32)},
        r"table item: float32 gradients \(1, 3\); expected .* \(2, 3\)",
    ),
    "too many rows": ({"item": np.ones((3, 3), np.float32)}, r"gradients \(3, 3\)"),
    "another dim": ({"item": np.ones((2, 4), np.float32)}, r"gradients \(2, 4\)"),
    "float64": ({"item": np.ones((2, 3))}, "float64 gradients"),
    "not contiguous": ({"item": np.ones((3, 2), np.float32).T}, "expected contiguous"),
    "a table not asked for": (
        {"user": np.ones((2, 4), np.float32)},
        "gradients of table user, which the request has no",
    ),
}


@every("name", BAD_PUSHES)
@every("num_servers", [1, 2])
def test_gradients_that_do_not_fit_are_refused_and_nothing_is_sent(name: str, num_servers: int) -> None:
    grads, text = BAD_PUSHES[name]
    recorded = [Recorded(shard) for shard in services(num_servers)]
    traffic = WorkerTraffic()
    client = connect(recorded, traffic=traffic)
    request = client.request({"item": ids_of(1, 2)})
    with pytest.raises(ProtocolError, match=text):
        client.push(0, request, grads)
    assert [server.asked for server in recorded] == [[]] * num_servers
    assert traffic.ledger.totals()["total"] == 0


def test_a_step_is_pushed_once() -> None:
    client = connect([Held(services()[0])])
    request = client.request({"item": ids_of(1)})
    client.push(0, request, {})
    with pytest.raises(ProtocolError, match="step 0 was pushed before"):
        client.push(0, request, {})


@pytest.mark.parametrize(
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


def test_ids_out_of_order_are_refused_by_the_server() -> None:
    client = connect([services()[0].handle])
    with pytest.raises(RemoteError, match="server 0: table user: id 1 follows 2; ids must rise"):
        client.pull(0, client.request({"user": ids_of(2, 1)})).result()


# ---- bad servers ----


def answering(packed: Bytes) -> Handler:
    def handler(_message: Bytes) -> Future[Bytes]:
        future: Future[Bytes] = Future()
        future.set_result(packed)
        return future

    return handler


def rows(*sections: Section) -> Bytes:
    return pack(Message(Kind.ROWS, 0, 0, 0, sections))


def values(count: int, bytes_each: int = 16) -> Bytes:
    return np.zeros(count * bytes_each, np.uint8)


BAD_ANSWERS: dict[str, tuple[Bytes, type[Exception], str]] = {
    "an error": (text_message(Kind.ERROR, "out of paper"), RemoteError, "^server 0: out of paper$"),
    "another kind": (pack(Message(Kind.ACK, 0, 0, 0)), ProtocolError, "server 0 answered ACK, expected ROWS"),
    "no message": (np.arange(99, dtype=np.uint8), CorruptMessage, "^server 0 answered magic"),
    "nothing": (EMPTY, CorruptMessage, "^server 0 answered 0 bytes are no message"),
    "no tables": (
        rows(),
        CorruptMessage,
        r"server 0 answered rows of 0 tables, asked for rows of 1 tables \(2 of table 0\)",
    ),
    "another table": (
        rows(Section(1, 2, EMPTY, values(2))),
        CorruptMessage,
        r"answered rows of 1 tables \(2 of table 1\), asked for rows of 1 tables \(2 of table 0\)",
    ),
    "a row too few": (
        rows(Section(0, 1, EMPTY, values(1))),
        CorruptMessage,
        r"answered rows of 1 tables \(1 of table 0\)",
    ),
    "a row too many": (
        rows(Section(0, 3, EMPTY, values(3))),
        CorruptMessage,
        r"answered rows of 1 tables \(3 of table 0\)",
    ),
    "half a row": (rows(Section(0, 2, EMPTY, values(2, 13))), CorruptMessage, "26 bytes"),
    "another format": (
        rows(Section(0, 2, EMPTY, values(2), value_format=99)),
        CorruptMessage,
        "unknown value format 99",
    ),
    "ids": (
        rows(Section(0, 2, values(1, 8), values(2))),
        CorruptMessage,
        "ROWS with 2 rows and 8 bytes of ids; allowed: all 2 rows that were requested, without ids",
    ),
    "names of rows": (
        rows(Section(0, 2, EMPTY, values(2), id_format=IdFormat.MASK)),
        CorruptMessage,
        "ROWS with 2 rows and 0 bytes of ids; allowed: all 2 rows that were requested, without ids",
    ),
}


@every("name", BAD_ANSWERS)
def test_a_bad_answer_is_one_line(name: str) -> None:
    packed, kind, text = BAD_ANSWERS[name]
    client = connect([answering(packed)])
    with pytest.raises(kind, match=text) as error:
        client.pull(0, client.request({"user": ids_of(1, 2)})).result()
    assert "\n" not in str(error.value)
    assert not getattr(error.value, "retryable", False)


@pytest.mark.parametrize("servers", [1, 2])
def test_coded_rows_that_are_missing_without_a_name_are_refused(servers: int) -> None:
    bad, good = (rows(Section(0, n, EMPTY, values(n))) for n in (1, 2))
    ids = np.concatenate(
        [[i for i in range(50) if server_of(np.array([i]), servers)[0] == s][:2] for s in range(servers)]
    )
    client = connect([answering(bad), answering(good)][:servers], compression=CompressionConfig(ids="coded"))
    with pytest.raises(CorruptMessage, match="ROWS with 1 rows and 0 bytes of ids; allowed: all 2 rows"):
        client.pull(0, client.request({"user": np.sort(ids)})).result()


def test_a_push_that_a_server_refused_is_told_by_the_next_wait_and_again_by_every_other() -> None:
    client = connect([answering(text_message(Kind.ERROR, "no room"))])
    client.push(0, client.request({"item": ids_of(1)}), {"item": ones(ids_of(1), 1)})
    for call in (client.wait_acknowledged, lambda: client.fence(1), lambda: client.push(3, client.request({}), {})):
        with pytest.raises(RemoteError, match="server 0: no room"):
            call()


def test_a_server_that_closes_is_told_with_its_reason() -> None:
    shard = services(mode="sync")[0]
    client = connect([shard.handle], "sync")
    client.push(0, client.request({}), {})
    shard.close("the job is over")
    with pytest.raises(TransportError, match="the job is over"):
        client.pull(1, client.request({})).result()
