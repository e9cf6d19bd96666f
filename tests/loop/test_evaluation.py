"""A read after `apply` sees the step, also where one of several trainers reads alone."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.base.errors import DeadlineExceeded
from shardkeep.loop.joining import Joined
from shardkeep.loop.metering import NoMeter
from shardkeep.loop.saving import LoopCheckpoints
from shardkeep.nn import EmbeddingBagCollection
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.workers.embeddings.loop_lookup import Lookup
from tests.support.cases import every

TABLES = [TableSpec(name="user", dim=4, optimizer={"name": "adam", "lr": 0.1}), TableSpec(name="tag", dim=3)]
EVERY = {name: torch.arange(40) for name in ("user", "tag")}
STEPS, SOON_S = 5, 0.05


def trainers(mode: str, *, servers: int = 2, timeout_s: float = 20.0) -> list[EmbeddingClient]:
    given: dict[str, Any] = {"tables": TABLES, "consistency": ConsistencyConfig(mode=mode), "seed": 5, "num_workers": 2}
    services = [ShardService(shard=shard, **given) for shard in range(servers)]
    clients = []
    for rank in range(2):
        rows = RowClient(LocalTransport([each.handle for each in services]), rank=rank, timeout_s=timeout_s, **given)
        saving = LoopCheckpoints(rows, None, None, num_trainers=2, seed=5)
        ending = contextlib.ExitStack()
        joined = Joined(rows, WorkerTraffic().ledger, ending, saving, NoMeter(), num_trainers=2)
        clients.append(EmbeddingClient(joined))
    return clients


def ids_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randint(0, 40, (12,), generator=random) for name in EVERY}


def backward(rows: Lookup) -> Lookup:
    sum((row**2).sum() for row in rows.values()).backward()  # type: ignore[union-attr]
    return rows


def train(clients: list[EmbeddingClient], steps: int, form: str = "lookup") -> None:
    modules = [EmbeddingBagCollection(client, {name: name for name in EVERY}) for client in clients]
    for step in range(steps):
        if form == "modules":
            ahead = [module.prefetch(ids_of(step, rank)) for rank, module in enumerate(modules)]
            for module, pending in zip(modules, ahead, strict=True):
                backward(module(pending))  # pushes each trainer's part of the mean
            continue
        coming = [client.prefetch(ids_of(step, rank)) for rank, client in enumerate(clients)]
        lookups = [backward(each.result()) for each in coming]
        for client, rows in zip(clients, lookups, strict=True):
            client.apply(rows, scale=0.5)


def trained_in_one_process(steps: int, *, both: bool = True) -> dict[str, torch.Tensor]:
    with EmbeddingClient.local(TABLES, seed=5, consistency="sync") as client:
        for step in range(steps):
            client.apply(*[backward(client.lookup(ids_of(step, rank))) for rank in range(1 + both)], scale=0.5)
        return client.read(EVERY)


def seen_by(client: EmbeddingClient, form: str) -> dict[str, torch.Tensor]:
    if form == "read":
        return client.read(EVERY)
    with torch.no_grad():
        if form == "lookup":
            return dict(client.lookup(EVERY))
        modules = EmbeddingBagCollection(client, {"user": "user", "tag": "tag"})
        return modules.eval()(EVERY)


@every(("form", "servers"), [("read", 2), ("lookup", 1), ("modules", 2)])
def test_in_sync_a_trainer_that_evaluates_alone_has_the_bits_of_one_process(form: str, servers: int) -> None:
    for steps in (0, 1, STEPS):
        clients = trainers("sync", servers=servers)
        train(clients, steps, form)
        expected = trained_in_one_process(steps)
        for client in reversed(clients):
            for _ in range(2):
                found = seen_by(client, form)
                assert all(torch.equal(found[name], expected[name]) for name in EVERY)


@every(("mode", "form"), [("bounded", "read"), ("async", "lookup"), ("bounded", "modules")])
def test_elsewhere_a_trainer_sees_what_it_has_applied_itself(mode: str, form: str) -> None:
    clients = trainers(mode)
    for step in range(2):
        clients[0].apply(backward(clients[0].lookup(ids_of(step, 0))), scale=0.5)
    found, expected = seen_by(clients[0], form), trained_in_one_process(2, both=False)
    assert all(torch.equal(found[name], expected[name]) for name in EVERY)


def test_training_goes_on_after_one_trainer_has_evaluated_alone_at_any_step() -> None:
    clients = trainers("sync")
    for step in range(STEPS):
        coming = [client.prefetch(ids_of(step, rank)) for rank, client in enumerate(clients)]
        clients[step % 2].read(EVERY)
        lookups = [backward(each.result()) for each in coming]
        clients[1 - step % 2].read(EVERY)
        for client, rows in zip(clients, lookups, strict=True):
            client.apply(rows, scale=0.5)
    found, expected = clients[0].read(EVERY), trained_in_one_process(STEPS)
    assert all(torch.equal(found[name], expected[name]) for name in EVERY)


def test_in_sync_a_read_waits_for_the_step_of_a_slower_trainer() -> None:
    clients = trainers("sync")
    train(clients, 2)
    coming = [client.prefetch(ids_of(2, rank)) for rank, client in enumerate(clients)]
    lookups = [backward(each.result()) for each in coming]
    clients[0].apply(lookups[0], scale=0.5)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(clients[0].read, EVERY)
        assert not wait([reading], timeout=SOON_S).done
        clients[1].apply(lookups[1], scale=0.5)
        found, expected = reading.result(90), trained_in_one_process(3)
    assert all(torch.equal(found[name], expected[name]) for name in EVERY)


def test_in_sync_a_read_ends_at_its_deadline_when_another_trainer_does_not_push() -> None:
    clients = trainers("sync", timeout_s=SOON_S - 1.0)
    coming = [client.prefetch(ids_of(0, rank)) for rank, client in enumerate(clients)]
    clients[0].apply(backward(coming[0].result()))
    with pytest.raises(DeadlineExceeded, match="server 0 did not answer within"):
        clients[0].read(EVERY)
