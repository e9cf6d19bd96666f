"""RowClient against real services in this process: what it sends, waits for, checks and counts."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.base.errors import DeadlineExceeded
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.admin import GetReport
from tests.support.cases import every
from tests.support.clients import TABLES, Held, connect, ids_of, many, ones, servers_of, services
from tests.support.held_gate import HeldGate
from tests.support.one_table import OneTable, exported

SOON_S = 0.05


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


@every("mode", ["sync", "bounded", "async"])
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


def test_gradients_may_be_reused_after_a_push_and_pulled_rows_changed() -> None:
    shard = services(1, "sync")[0]
    client = connect([shard.handle], "sync")
    request = client.request({"item": ids_of(1, 2)})
    grad = ones(ids_of(1, 2), 1)
    client.pull(0, request).result()
    client.push(0, request, {"item": grad})
    grad[:] = 777.0
    assert (client.pull(1, request).result()["item"] == -1.0).all()

    client = connect([services()[0].handle])
    request = client.request({"user": ids_of(1)})
    rows = client.pull(0, request).result()["user"]
    before = rows.copy()
    rows[:] = 5.0
    assert (client.read(request).result()["user"] == before).all()


@every(("mode", "window"), [("sync", 1), ("bounded", 3), ("async", 3)])
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


def test_a_fence_waits_for_acknowledgements_and_acknowledged_pushes_are_forgotten() -> None:
    held = Held(services()[0])
    client = connect([held], timeout_s=SOON_S - 1.0)
    request = client.request({"item": ids_of(1)})
    client.push(0, request, {"item": ones(ids_of(1), 1)})
    with pytest.raises(DeadlineExceeded):
        client.fence(1)
    held.acknowledge(0)
    client.fence(1)

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


# ---- initial rows ----


LAWS = {
    "uniform": {"name": "uniform", "low": -0.2, "high": 0.7},
    "normal": {"name": "normal", "mean": 0.5, "std": 0.01},
    "constant": {"name": "constant", "value": 0.25},
    "scaled": {"name": "normal", "scale": 0.1},
}
BY_LAW = tuple(TableSpec(name=name, dim=5, init=InitConfig(**law)) for name, law in LAWS.items())
LAW_IDS = np.unique(np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 500))


def rows_over(servers: int, ids: str) -> dict[str, np.ndarray]:
    compression = CompressionConfig(ids=ids)
    handlers = [service.handle for service in servers_of(BY_LAW, servers, seed=9, compression=compression)]
    client = RowClient(LocalTransport(handlers), tables=BY_LAW, compression=compression, seed=9)
    rows = client.pull(0, client.request(dict.fromkeys(LAWS, LAW_IDS))).result()
    return {name: rows[name].copy() for name in LAWS}


@every("ids", ["raw", "coded"])
@every("servers", [1, 3])
def test_initial_rows_are_equal_over_any_number_of_servers(servers: int, ids: str) -> None:
    expected, found = rows_over(2, "raw"), rows_over(servers, ids)
    for name in LAWS:
        assert found[name].tobytes() == expected[name].tobytes()
    assert (found["constant"] == 0.25).all()
    assert abs(found["normal"].mean() - 0.5) < 0.01
