"""LastingTransport: trainers that lose their servers again and again, and end with the rows of an undisturbed run."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import JobStopped, RemoteError, TransportError
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.control.records import ResumeRange
from shardkeep.ps.control.recovery import agreed_start
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.lasting import LastingTransport
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.message import Kind, allocate, step_of, text_message
from tests.support.cases import every

SERVERS, RANKS, STEPS, KILLS, LIMIT_S = 2, 2, 24, 4, 60.0
EXACT: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.5}, "init": {"name": "zeros"}}
TABLES = [TableSpec(name="item", dim=4, **EXACT), TableSpec(name="tag", dim=2, **EXACT)]
CODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coded": {"ids": "coded"},
    "top_k": {"ids": "coded", "push": {"keep": 0.25, "pool_rows": 4096}},
}


class Sent:
    """The messages of all trainers, each with a copy from when it was sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[Bytes, Bytes]] = []
        self._more = threading.Condition()

    def add(self, *messages: Bytes | None) -> None:
        with self._more:
            self.messages += [(message, message.copy()) for message in messages if message is not None]
            self._more.notify_all()

    def reach(self, count: int, limit_s: float = LIMIT_S) -> bool:
        """Waits until there are so many messages."""
        with self._more:
            return self._more.wait_for(lambda: len(self.messages) >= count, limit_s)


class Wire:
    """A transport of one generation. `cut` lets later messages vanish, or arrive without an answer."""

    def __init__(self, handlers: list[Handler], chance: random.Random, sent: Sent) -> None:
        self._sent = sent
        self.num_servers = len(handlers)
        self._inner, self._chance = LocalTransport(handlers), chance
        self._lock = threading.Lock()
        self._cut = False
        self._open: list[Future[Bytes]] = []

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        reply: Future[Bytes] = Future()
        with self._lock:
            cut = self._cut
            self._open.append(reply)
        self._sent.add(message, then)
        arrived = message.copy()  # as a network would
        if not (cut and self._chance.random() < 0.5):
            found = self._inner.send(server, arrived, None if then is None else then.copy(), timeout_s=timeout_s)
            found.add_done_callback(lambda found: self._answer(reply, found, lost=cut))
        return reply

    def _answer(self, reply: Future[Bytes], found: Future[Bytes], *, lost: bool) -> None:
        with self._lock:
            lost = lost or self._cut or reply not in self._open
            if not lost:
                self._open.remove(reply)
        if not lost and found.exception() is not None:
            reply.set_exception(found.exception())
        elif not lost:
            reply.set_result(found.result())

    def cut(self) -> None:
        with self._lock:
            self._cut = True

    def close(self) -> None:
        with self._lock:
            self._cut, waiting, self._open = True, self._open, []
        for reply in waiting:
            reply.set_exception(TransportError("the connection is lost"))


class Cluster:
    """Servers with journals, and trainers; `kill` replaces a server as coordinator and roles do."""

    def __init__(self, folder: Path, mode: str, coding: str = "plain", seed: int = 0) -> None:
        compression = CompressionConfig.model_validate(CODINGS[coding])
        self._folder, self._chance, self._compression = folder, random.Random(seed), compression
        self._consistency = ConsistencyConfig.model_validate({"mode": mode})
        self._generation = 1
        self.sent = Sent()
        self._journals: dict[int, Journal] = {}
        self.services = [self._service(shard) for shard in range(SERVERS)]
        for service in self.services:
            service.life.begin(1, 0)
        self._wires = [self._wire() for _ in range(RANKS)]
        self.transports = [LastingTransport(wire, self._consistency) for wire in self._wires]
        self.clients = [
            RowClient(
                transport, tables=TABLES, rank=rank, generation=1, consistency=self._consistency,
                compression=compression, seed=3, num_workers=RANKS, patience_s=60.0,
            )
            for rank, transport in enumerate(self.transports)
        ]  # fmt: skip

    @property
    def handlers(self) -> list[Handler]:
        return [service.handle for service in self.services]

    def _service(self, shard: int) -> ShardService:
        """A server with what its journal holds."""
        self._journals[shard] = Journal(self._folder / f"journal-{shard}", sync=False)
        settings: dict[str, Any] = {"tables": TABLES, "consistency": self._consistency, "num_workers": RANKS, "seed": 3}
        settings["compression"] = self._compression
        service = ShardService(shard=shard, journal=self._journals[shard], generation=0, **settings)
        service.life.replay(self._journals[shard].replay())
        return service

    def _wire(self) -> Wire:
        return Wire(self.handlers, self._chance, self.sent)

    def kill(self, shard: int) -> None:
        for wire in self._wires:
            wire.cut()
        some = len(self.sent.messages) + self._chance.randint(0, 4)
        self.sent.reach(some, limit_s=0.004)  # some messages arrive, and their answers do not
        for service in self.services:
            service.life.suspend("the generation is lost")
        self._journals[shard].close()
        self.services[shard] = self._service(shard)
        for transport in self.transports:
            transport.suspend()
        servers = {i: ResumeRange(*service.life.resume_range) for i, service in enumerate(self.services)}
        ranges = {i: ResumeRange(*t.resume_range(), holds=True) for i, t in enumerate(self.transports)}
        start = agreed_start(servers, ranges)
        assert start is not None and not start.lacking, (servers, ranges)
        self._generation += 1
        for service in self.services:
            service.life.begin(self._generation, start.step)
        self._wires = [self._wire() for _ in range(RANKS)]
        for transport, wire in zip(self.transports, self._wires, strict=True):
            transport.renew(wire, self._generation, start.step)

    def digests(self) -> list[str]:
        return [str(service.report()["digest"]) for service in self.services]


def train(cluster: Cluster, rank: int) -> None:
    """Gradients that a float32 adds without rounding: the order of the ranks' pushes does not matter."""
    client, random_ids = cluster.clients[rank], np.random.default_rng(rank)
    for step in range(STEPS):
        request = client.request({name: np.unique(random_ids.integers(0, 60, 20)) for name in ("item", "tag")})
        pull = client.pull(step, request)
        rows = pull.result()
        grads = client.gradients(step, request)
        for name in rows:
            grads[name][:] = 1.0 + rank + step % 3
        client.push(step, request, grads, pulls=[pull], last=step == STEPS - 1)
    client.fence(STEPS)


def trained(cluster: Cluster, kills: Sequence[int], chance: random.Random) -> list[str]:
    """The digests after training; a server dies when so many messages are sent."""
    with ThreadPoolExecutor(RANKS) as pool:
        training = [pool.submit(train, cluster, rank) for rank in range(RANKS)]
        for count in kills:
            assert cluster.sent.reach(count)
            cluster.kill(chance.randrange(SERVERS))
        for rank in training:
            rank.result(LIMIT_S)
    return cluster.digests()


def check_deaths(folder: Path, seed: int, mode: str, coding: str) -> None:
    chance = random.Random(seed)
    undisturbed, disturbed = (Cluster(folder / name, mode, coding, seed) for name in ("one", "two"))
    digests = trained(undisturbed, [], chance)
    kills = sorted(chance.sample(range(len(undisturbed.sent.messages)), KILLS))
    assert trained(disturbed, kills, chance) == digests
    assert all(np.array_equal(message, as_sent) for message, as_sent in disturbed.sent.messages)


@every(("seed", "mode", "coding"), [(0, "sync", "coded"), (0, "bounded", "top_k")])
def test_servers_that_die_change_no_bit(tmp_path: Path, seed: int, mode: str, coding: str) -> None:
    check_deaths(tmp_path, seed, mode, coding)


@pytest.mark.chaos
@every(("seed", "mode", "coding"), itertools.product(range(5), ("sync", "bounded"), CODINGS))
def test_servers_that_die_in_any_mode_change_no_bit(tmp_path: Path, seed: int, mode: str, coding: str) -> None:
    check_deaths(tmp_path, seed, mode, coding)


@every("mode", ["sync", "bounded"])
@every("coding", ["plain", "coded"])
def test_a_server_that_dies_between_two_pulls_and_their_push_changes_no_bit(
    tmp_path: Path, mode: str, coding: str
) -> None:
    digests, steps = [], 4
    for deaths in (0, steps):
        cluster = Cluster(tmp_path / str(deaths), mode, coding)
        for step in range(steps):
            ids = {rank: [np.arange(9) + step, np.arange(5, 30, 2 + rank)] for rank in range(RANKS)}
            pulls = {
                rank: [client.pull(step, client.request({"item": each})) for each in ids[rank]]
                for rank, client in enumerate(cluster.clients)
            }
            assert all(pull.result() for rank in range(RANKS) for pull in pulls[rank])
            if step < deaths:
                cluster.kill(step % SERVERS)
            for rank, client in enumerate(cluster.clients):
                pushed = np.unique(np.concatenate(ids[rank]))
                grads = {"item": np.repeat(pushed[:, None], 4, 1).astype(np.float32)}
                client.push(step, client.request({"item": pushed}), grads, pulls=pulls[rank])
        for client in cluster.clients:
            client.fence(steps)
        digests.append(cluster.digests())
    assert digests[0] == digests[1]


# ---- one trainer of one step ----

IDS = {"item": np.arange(5)}


def first(
    folder: Path, mode: str = "bounded", coding: str = "plain"
) -> tuple[Cluster, RowClient, LastingTransport, Request]:
    """A cluster, its first trainer, and what it requests."""
    cluster = Cluster(folder, mode, coding)
    return cluster, cluster.clients[0], cluster.transports[0], cluster.clients[0].request(IDS)


def refusing(message: Bytes, then: Bytes | None = None) -> Future[Bytes]:
    reply: Future[Bytes] = Future()
    reply.set_result(text_message(Kind.ERROR, "no room"))
    return reply


@every("coding", ["plain", "coded"], ids=["push", "pull"])
def test_what_servers_refuse_of_answered_calls_is_an_error(tmp_path: Path, coding: str) -> None:
    _, client, transport, request = first(tmp_path, "sync", coding)
    pull = client.pull(0, request)
    pull.result()
    client.push(0, request, client.gradients(0, request), pulls=[pull])
    client.wait_acknowledged()
    transport.suspend()
    with pytest.raises(RemoteError, match="server 0, of what was sent again: no room"):
        transport.renew(LocalTransport([refusing] * SERVERS), 2, 0)


def test_what_servers_refuse_of_an_open_exchange_is_the_answer_to_its_caller(tmp_path: Path) -> None:
    cluster, client, transport, request = first(tmp_path)
    transport.suspend()
    pull = client.exchange(0, request, client.gradients(0, request), 1, request)

    def no_pushes(handle: Handler) -> Handler:
        return lambda message: (handle if step_of(message, Kind.PULL) >= 0 else refusing)(message)

    transport.renew(LocalTransport([no_pushes(handle) for handle in cluster.handlers]), 1, 0)
    with pytest.raises(RemoteError, match="server 0: no room"):
        pull.result()
    assert transport.num_kept == 0


def test_what_is_sent_between_generations_waits_and_ends_with_the_error_of_a_job_that_is_over(tmp_path: Path) -> None:
    cluster, client, transport, request = first(tmp_path)
    transport.suspend()
    pull = client.pull(0, request)
    assert not any(future.done() for _, future in pull.futures)
    transport.renew(LocalTransport(cluster.handlers), 1, 0)
    assert pull.result()["item"].shape == (5, 4)
    transport.suspend()
    waiting = client.pull(1, request)
    transport.fail(JobStopped("it is over"))
    for pull in (waiting, client.pull(2, request)):
        with pytest.raises(JobStopped, match="it is over"):
            pull.result()


@every(("mode", "kept"), [("sync", 2 * SERVERS), ("bounded", 0)])
def test_what_is_answered_is_kept_until_its_push_is_applied(tmp_path: Path, mode: str, kept: int) -> None:
    cluster = Cluster(tmp_path, mode)
    for client in cluster.clients:
        request = client.request(IDS)
        client.pull(0, request).result()
        client.push(0, request, client.gradients(0, request))
        client.wait_acknowledged()
    assert cluster.transports[0].num_kept == kept
    pulls = [client.pull(1, client.request(IDS)) for client in cluster.clients]
    assert [pull.result() is not None for pull in pulls] == [True, True]
    assert cluster.transports[0].num_kept == SERVERS, "the pulls, which the push of their step may name"


def test_a_lost_call_is_told_once_it_fails_and_not_to_its_caller() -> None:
    losses: list[str] = []
    transport = LastingTransport(LocalTransport([]), ConsistencyConfig(), on_loss=lambda: losses.append(transport.loss))
    message = allocate(Kind.FENCE, generation=0, rank=0, step=4)
    reply = transport.send(0, message.buffer, timeout_s=1.0)
    assert losses == ["server 0 cannot be reached: the transport is closed"] and not reply.done()
