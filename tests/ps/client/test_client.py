"""RowClient against real services in this process: what it sends, waits for, checks and counts."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.base.errors import DeadlineExceeded
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.admin import GetReport
from tests.support.cases import every
from tests.support.clients import TABLES, Arrays, Held, connect, ids_of, many, ones, servers_of, services
from tests.support.held_gate import HeldGate
from tests.support.one_table import OneTable, exported

ITEM = {"item": ones(ids_of(1), 1)}


@every("num_servers", [1, 2, 5])
def test_rows_come_back_in_the_order_of_the_ids_from_any_number_of_servers(num_servers: int) -> None:
    shards = services(num_servers)
    client = connect([shard.handle for shard in shards])
    expected = OneTable(TABLES[0], seed=3)
    rng = np.random.default_rng(1)
    for step in range(3):
        ids = many(400, seed=step)
        request = client.request({"user": ids})
        pulled = client.pull(step, request)
        rows = pulled.result()["user"]
        assert (rows == expected.pull(ids)).all() and pulled.staleness == 0
        rows[:] = 5.0  # a caller may do so
        grad = rng.normal(size=(ids.size, 4)).astype(np.float32)
        client.push(step, request, {"user": grad})
        client.wait_acknowledged()
        expected.apply(ids, grad, step=step)
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
        grads = {name: np.ones_like(row) for name, row in rows.items()}
        client.push(step, request, grads)
        for grad in grads.values():
            grad[:] = 777.0  # of no use to the client any more
    client.fence(len(asked))
    assert [report["pushes"] for report in client.calls.ask(GetReport(), dict)] == [4, 4]
    assert (client.read(client.request({"item": ids_of(7)})).result()["item"] == -1.0).all()


@every(("mode", "window"), [("sync", 1), ("bounded", 3), ("async", 3)])
def test_a_push_waits_when_a_window_of_pushes_is_not_acknowledged(mode: str, window: int) -> None:
    held = Held(services()[0])
    client = connect([held], mode, timeout_s=-0.95)
    request = client.request({"item": ids_of(1)})
    for step in range(window):
        client.push(step, request, ITEM)
    for call in (lambda: client.push(window, request, ITEM), lambda: client.fence(window)):
        with pytest.raises(DeadlineExceeded, match="server 0 did not answer within"):
            call()
    assert [step for step, _ in held.pushes] == list(range(window))
    held.acknowledge(0)
    client.push(window, request, ITEM)
    assert [step for step, _ in held.pushes] == list(range(window + 1))
    for step in range(1, window + 1):
        held.acknowledge(step)
    client.wait_acknowledged()
    assert client.pushes.num_unacknowledged == 0


def test_in_sync_a_pull_is_sent_only_when_every_server_has_acknowledged_the_push_before_it() -> None:
    shards = services(2, "sync")
    late = Held(shards[1])
    client = connect([shards[0].handle, late], "sync", timeout_s=-0.95)
    request = client.request({"user": many(50)})
    client.pull(0, request).result()
    client.push(0, request, {"user": ones(request.ids["user"], 0)})
    with pytest.raises(DeadlineExceeded, match="server 1"):
        client.pull(1, request)
    assert late.pulls == [0]
    late.acknowledge(0)
    client.pull(1, request).result()
    assert late.pulls == [0, 1]


def test_acknowledged_pushes_are_forgotten_and_each_pull_of_rows_is_in_the_histogram_once() -> None:
    (shard,) = services()
    client = connect([shard.handle])
    request = client.request({"item": ids_of(1)})
    for step in range(50):
        client.push(step, request, ITEM)
    assert client.pushes.num_unacknowledged <= 1
    held = HeldGate(shard)
    for step in range(50, 53):
        client.pull(step, request).result()
        client.push(step, request, ITEM)
    client.pull(53, client.request({}))
    client.read(request).result()
    assert client.pulls.staleness_seen == {0: 1, 1: 1, 2: 1}
    held.release()


LAWS = {
    "uniform": {"name": "uniform", "low": -0.2, "high": 0.7},
    "normal": {"name": "normal", "mean": 0.5, "std": 0.01},
    "constant": {"name": "constant", "value": 0.25},
    "scaled": {"name": "normal", "scale": 0.1},
}
BY_LAW = tuple(TableSpec(name=name, dim=5, init=InitConfig(**law)) for name, law in LAWS.items())


def rows_over(servers: int) -> Arrays:
    handlers = [service.handle for service in servers_of(BY_LAW, servers, seed=9)]
    client = RowClient(LocalTransport(handlers), tables=BY_LAW)
    return client.pull(0, client.request(dict.fromkeys(LAWS, many(500, seed=4)))).result()


@every("servers", [1, 3])
def test_initial_rows_are_equal_over_any_number_of_servers(servers: int) -> None:
    expected, rows = rows_over(2), rows_over(servers)
    for name in LAWS:
        assert rows[name].tobytes() == expected[name].tobytes()
    assert (rows["constant"] == 0.25).all()
    assert abs(rows["normal"].mean() - 0.5) < 0.01
