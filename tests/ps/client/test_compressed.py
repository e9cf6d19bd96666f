"""Compressed pulls and pushes against real services: what arrives, what is left for later, what is saved."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import RemoteError
from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.compressor import Compressor
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.client.row_memory import RowMemory
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedRows
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import Handler, LocalTransport
from shardkeep.ps.wire.message import REFERENCE, Kind, read
from tests.support.cases import every
from tests.support.clients import servers_of
from tests.support.one_table import exported

SGD = {"name": "sgd", "lr": 1.0}
TABLES = (
    TableSpec(name="a", dim=8, optimizer=SGD, init={"name": "zeros"}),
    TableSpec(name="b", dim=8),
    TableSpec(name="c", dim=3, optimizer={"name": "adam"}),
)
STEPS = 12
Grads = dict[str, np.ndarray]


class Job:
    """Some servers and one worker, in this process."""

    def __init__(self, *, servers: int = 1, mode: str = "bounded", **compression: Any) -> None:
        self.compression = CompressionConfig(**compression)
        consistency = ConsistencyConfig(mode=mode)
        self.services = servers_of(TABLES, servers, mode=mode, compression=self.compression)
        self.messages: list[Bytes] = []
        self.traffic = WorkerTraffic()
        transport = LocalTransport([self.listening(service.handle) for service in self.services])
        self.client = RowClient(
            MeteredTransport(transport, LedgerMeter(self.traffic)),
            tables=TABLES, consistency=consistency, compression=self.compression, history=6, seed=3,
        )  # fmt: skip

    def listening(self, handle: Handler) -> Handler:
        def handler(*messages: Bytes) -> Any:
            self.messages += messages
            return handle(*messages)

        return handler

    def step(self, step: int, *, last: bool = False) -> Grads:
        """Pulls, and pushes random gradients."""
        ids = ids_of(step)
        request = self.client.request(ids)
        pull = self.client.pull(step, request)
        pull.result()
        grads = grads_of(step, ids)
        self.client.push(step, request, grads, pulls=[pull], last=last)
        return grads

    def run(self, steps: range = range(STEPS), *, last: bool = True) -> None:
        for step in steps:
            self.step(step, last=last and step == STEPS - 1)
        self.client.fence(steps.stop)

    def digest(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for service in self.services:
            for name, digest in service.tables.digests().items():
                total[name] = (total.get(name, 0) + digest) % 2**128
        return total

    def weights(self, table: int) -> dict[int, np.ndarray]:
        return {
            int(id_): row
            for service in self.services
            for id_, row in zip(*exported(service.tables[table])[:2], strict=True)
        }


def ids_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "a": np.unique(rng.zipf(1.3, 60) % 500),
        "b": np.unique(rng.integers(-(2**62), 2**62, 5)),
        "c": np.unique(rng.zipf(1.2, 40) % 90),
    }


def grads_of(step: int, ids: dict[str, np.ndarray]) -> Grads:
    rng = np.random.default_rng(1000 + step)
    dims = {spec.name: spec.dim for spec in TABLES}
    return {name: rng.normal(size=(i.size, dims[name])).astype(np.float32) for name, i in ids.items()}


def sums_of(table: str, steps: int = STEPS) -> dict[int, np.ndarray]:
    total: dict[int, np.ndarray] = {}
    for step in range(steps):
        ids = ids_of(step)
        for id_, grad in zip(ids[table], grads_of(step, ids)[table], strict=True):
            total[int(id_)] = total.get(int(id_), 0) + grad.astype(np.float64)
    return total


@every("last", [False, True])
def test_the_push_of_what_was_held_back_is_counted_apart(last: bool) -> None:
    job = Job(servers=2, push={"keep_rows": 0.2, "pool_rows": 2000})
    job.run(last=last)
    final = [m.size for m in job.messages if read(m).kind is Kind.PUSH and read(m).step == STEPS - 1]
    pushed = job.traffic.ledger.totals()["push"]
    assert len(final) == 2 and pushed.get("flush", 0) == (sum(final) if last else 0)


@every("mode", ["sync", "bounded"])
@every("servers", [1, 3])
def test_coded_ids_and_references_change_no_bit_and_spare_bytes(servers: int, mode: str) -> None:
    raw, coded = Job(servers=servers, mode=mode), Job(servers=servers, mode=mode, ids="coded")
    raw.run()
    coded.run()
    assert coded.digest() == raw.digest()
    raw_bytes, coded_bytes = raw.traffic.ledger.totals(), coded.traffic.ledger.totals()
    assert "ids" not in coded_bytes["push"] or not coded_bytes["push"]["ids"]  # all by reference, of all rows: no byte
    assert coded_bytes["pull"]["ids"] < 0.5 * raw_bytes["pull"]["ids"]
    assert coded_bytes["pull"]["values"] < raw_bytes["pull"]["values"]  # rows that are not there yet are only named


def test_a_push_refers_to_its_pull_and_says_so_in_the_message() -> None:
    job = Job(ids="coded", push={"keep_rows": 0.3})
    job.run(range(3))
    pushes = [message for buffer in job.messages if (message := read(buffer)).kind is Kind.PUSH]
    assert all((message.id_formats_S >= REFERENCE).all() for message in pushes)
    assert job.traffic.ledger.totals()["push"]["masks"] > 0


def test_fewer_rows_than_were_pulled_are_the_same_by_reference_and_others_travel_with_their_ids() -> None:
    found = []
    for ids in ("raw", "coded"):
        job = Job(servers=2, ids=ids)
        for step in range(4):
            wanted = ids_of(step)
            pull = job.client.pull(step, job.client.request(wanted))
            pull.result()
            fewer = {name: i[:: 1 + (name == "a")] for name, i in wanted.items() if name != "b"}
            job.client.push(step, job.client.request(fewer), grads_of(step, fewer), pulls=[pull])
        job.client.fence(4)
        found.append(job.digest())
    assert found[0] == found[1]

    found = []
    for ids in ("raw", "coded"):
        job = Job(servers=2, ids=ids)
        pull = job.client.pull(0, job.client.request({"a": np.arange(0, 40, 2)}))
        pull.result()
        other = {"a": np.arange(10, 60, 3), "c": np.array([-5, 7])}
        job.client.push(0, job.client.request(other), grads_of(0, other), pulls=[pull])
        job.client.fence(1)
        found.append(job.digest())
    assert found[0] == found[1]


def test_a_push_by_reference_counts_once_and_one_to_an_unknown_pull_changes_nothing() -> None:
    job = Job(ids="coded")
    job.step(0)
    job.client.fence(1)
    before = job.digest()
    pull = job.client.pull(1, job.client.request(ids_of(1)))
    pull.result()
    job.services[0].pulls.forget_all()
    job.client.push(1, job.client.request(ids_of(1)), grads_of(1, ids_of(1)), pulls=[pull])
    with pytest.raises(RemoteError, match="by reference to a pull that is not known"):
        job.client.wait_acknowledged()
    assert job.digest() == before

    job, other = Job(ids="coded"), Job(ids="coded")
    job.step(0)
    push = next(buffer for buffer in job.messages if read(buffer).kind is Kind.PUSH)
    again = read(job.services[0].handle(push).result(90))
    assert again.kind is Kind.ACK
    other.step(0)
    assert job.digest() == other.digest()
    assert job.services[0].report()["duplicates"] == 1


POOLS: dict[str, dict[str, Any]] = {
    "rows": {"keep_rows": 0.2, "pool_rows": 2000},
    "rows, small pool": {"keep_rows": 0.2, "pool_rows": 60},
    "int4": {"values": "int4", "pool_rows": 2000},
    "int4 rows": {"values": "int4", "keep_rows": 0.2, "pool_rows": 2000, "max_age": 4},
    "random rows": {"values": "int4", "keep_rows": 0.2, "select": "random", "pool_rows": 2000},
    "values": {"keep_values": 0.1, "pool_rows": 2000},
}


@every("push", POOLS.values(), ids=POOLS)
def test_nothing_is_dropped(push: dict[str, Any]) -> None:
    job = Job(servers=2, ids="coded", push=push)
    job.run()
    delivered = job.weights(0)  # plain SGD with rate 1 from zeros: minus the sum
    state = job.client.memory.state()
    mine = state["8/tables"] == 0
    left = dict(zip(state["8/ids"][mine].tolist(), state["8/rests"][mine], strict=True))
    lost = job.client.memory.lost_squares
    for id_, total in sums_of("a").items():
        of_table_a = left.get(id_, np.zeros(8))
        np.testing.assert_allclose(-delivered.get(id_, np.zeros(8)) + of_table_a, total, atol=1e-5 + 2 * lost**0.5)


@every("keep", [{"keep_rows": 0.1}, {"keep_values": 0.05}, {"keep_values": 0.05, "dgc": {}}])
def test_one_worker_takes_what_four_have_not_sent(keep: dict[str, Any]) -> None:
    push = keep | {"pool_rows": 60}
    states = []
    for worker in range(4):
        job = Job(mode="async", push=push)
        job.run(range(5 * worker, 5 * worker + 5), last=False)
        states.append(job.client.memory.state())
    memory = Job(push=push).client.memory
    memory.load(states)
    merged = memory.state()
    assert len(merged["8/ids"]) > 60
    total = sum(state["8/rests"].sum(dtype=np.float64) for state in states)
    assert merged["8/rests"].sum(dtype=np.float64) == pytest.approx(total, rel=1e-5)


@every("push", POOLS.values(), ids=POOLS)
def test_what_is_sent_does_not_depend_on_the_number_of_servers(push: dict[str, Any]) -> None:
    found = []
    for servers in (1, 2, 5):
        job = Job(servers=servers, ids="coded", mode="sync", push=push)
        job.run()
        found.append(job.digest())
    assert found[0] == found[1] == found[2]


def test_random_rows_are_as_many_as_said_and_others_in_each_step_and_on_each_worker() -> None:
    compression = CompressionConfig(push={"keep_rows": 0.25, "select": "random"})  # type: ignore[arg-type]
    catalog = Catalog(TABLES)
    wanted = {"a": np.arange(300), "c": np.arange(7, 107)}
    ids = JaggedIds.of_arrays(catalog, wanted)
    grads = JaggedRows.of_arrays(ids, grads_of(0, wanted))
    sent = []
    for rank, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        memory = RowMemory(catalog, compression, history=1)
        packed = Compressor(catalog, compression.push, memory, seed=5, rank=rank).compress(step, ids, grads)
        assert packed.positions_K is not None and packed.positions_K.size == 100 == np.unique(packed.positions_K).size
        assert packed.ids.ids_V.tolist() == ids.ids_V[packed.positions_K].tolist()
        assert packed.ids["a"].size == 75  # of each table as many as of its largest rows
        sent.append(packed.positions_K)
    assert sent[0].tolist() == sent[3].tolist()
    assert all(np.intersect1d(sent[0], other).size < 50 for other in sent[1:3])  # 25 by chance


def test_second_moments_reach_the_optimizer() -> None:
    """Two equal gradients sent as one sum: row-wise Adagrad must see their two squares, not the square of the sum."""
    slots = {}
    for told in (False, True):
        job = Job(push={"keep_rows": 0.01, "pool_rows": 100, "second_moment": told})
        ids = {"b": np.array([5, 9])}
        for step in range(3):
            request = job.client.request(ids)
            job.client.pull(step, request).result()
            grads = {"b": np.stack([np.full(8, 100.0), np.full(8, 2.0)]).astype(np.float32)}
            job.client.push(step, request, grads, last=step == 2)
        job.client.fence(3)
        ids_N, _, slots_NS = exported(job.services[0].tables[1])
        slots[told] = float(slots_NS[ids_N == 9][0, 0])
    assert slots[False] == pytest.approx(36.0, rel=1e-5)  # (2 + 2 + 2) ** 2
    assert slots[True] == pytest.approx(12.0, rel=0.2)  # 3 * 2 ** 2, in one byte


def test_going_back_to_an_earlier_step_repeats_what_was_sent() -> None:
    push = POOLS["int4 rows"]
    straight, back = Job(ids="coded", push=push), Job(ids="coded", push=push)
    straight.run()
    for step in range(8):
        back.step(step)
    sent = [bytes(buffer) for buffer in back.messages if read(buffer).kind is Kind.PUSH][5:]
    back.messages.clear()
    back.client.regroup(LocalTransport([back.listening(s.handle) for s in back.services]), 0, 5)
    for step in range(5, STEPS):
        back.step(step, last=step == STEPS - 1)
    back.client.fence(STEPS)
    assert [bytes(b) for b in back.messages if read(b).kind is Kind.PUSH][:3] == sent
    assert back.digest() == straight.digest()


def test_a_journal_of_compressed_pushes_needs_no_pull(tmp_path: Path) -> None:
    push = POOLS["int4 rows"] | {"second_moment": True}
    job, again = Job(ids="coded", push=push), Job(ids="coded", push=push)
    with contextlib.closing(Journal(tmp_path, sync=False)) as journal:
        job.services[0].applier.journal = journal
        job.services[0].life.begin(0, 0)
        job.run()
    with contextlib.closing(Journal(tmp_path, sync=False)) as journal:
        assert again.services[0].life.replay(journal.replay()) == STEPS
    assert again.digest() == job.digest()


CACHE: dict[str, Any] = {"cache_rows": 1000, "lease": 3}


class TestCache:
    def rows(self, job: Job, step: int, ids: np.ndarray) -> np.ndarray:
        request = job.client.request({"a": ids})
        rows = job.client.pull(step, request).result()["a"].copy()
        job.client.push(step, request, {"a": np.full((ids.size, 8), -1.0, np.float32)})
        job.client.fence(step + 1)
        return rows

    def test_a_row_is_read_again_when_its_lease_has_ended(self) -> None:
        job = Job(pull=CACHE)
        ids = np.array([3, 4, 99])
        seen = [float(self.rows(job, step, ids)[0, 0]) for step in range(9)]
        assert seen == [0, 0, 0, 0, 4, 4, 4, 4, 8]
        assert (job.client.pulls.cache.hits, job.client.pulls.cache.misses) == (18, 9)

    def test_a_row_that_moves_is_read_again_before_its_lease_has_ended(self) -> None:
        job = Job(pull=CACHE | {"drift": 0.5})
        seen = [float(self.rows(job, step, np.array([3, 4, 99]))[0, 0]) for step in range(9)]
        assert seen == [0, 0, 2, 2, 4, 4, 4, 7, 7]  # it grows by 1 a step: half of 4 in two, less of 7 in three

    def test_only_what_is_missing_is_asked_for(self) -> None:
        job = Job(servers=3, ids="coded", pull=CACHE)
        self.rows(job, 0, np.arange(0, 100, 2))
        job.messages.clear()
        rows = self.rows(job, 1, np.arange(100))
        assert (rows[::2] == 0).all()
        asked = sum(int(m.rows_S.sum()) for b in job.messages if (m := read(b)).kind is Kind.PULL)
        assert asked == 50

    def test_a_row_on_its_way_is_not_asked_for_again(self) -> None:
        job = Job(servers=2, pull=CACHE)
        first = job.client.request({"a": np.arange(50), "c": np.arange(9)})
        second = job.client.request({"a": np.arange(25, 75), "c": np.arange(4, 30)})
        pulls = [job.client.pull(0, first), job.client.pull(1, second)]
        rows = [pull.result() for pull in pulls]
        asked = sum(int(m.rows_S.sum()) for b in job.messages if (m := read(b)).kind is Kind.PULL)
        assert asked == 75 + 30
        plain = Job(servers=2)
        wanted = plain.client.pull(0, plain.client.request({"a": np.arange(25, 75), "c": np.arange(4, 30)})).result()
        for name in ("a", "c"):
            np.testing.assert_array_equal(rows[1][name], wanted[name])

    def test_a_lost_generation_forgets_rows(self) -> None:
        job = Job(pull=CACHE)
        self.rows(job, 0, np.arange(5))
        job.client.regroup(LocalTransport([s.handle for s in job.services]), 0, 1)
        assert (self.rows(job, 1, np.arange(5)) == 1).all()

    def test_reading_for_an_evaluation_passes_by_the_cache(self) -> None:
        job = Job(pull=CACHE | {"values": "int4"})
        ids = np.arange(5)
        self.rows(job, 0, ids)
        rows = job.client.read(job.client.request({"a": ids})).result()["a"]
        assert (rows == 1).all()
