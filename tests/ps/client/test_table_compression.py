"""Tables with number formats and shares of rows of their own, against real services in this process."""

# T = tables, U = unique ids of a table in a step, D = embedding dim

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, RemoteError
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.values.codec import value_codec
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import LocalTransport
from tests.support.cases import every
from tests.support.clients import servers_of
from tests.support.one_table import exported

ADAGRAD = {"name": "rowwise_adagrad", "lr": 0.1}
DIMS = {"big": 8, "small": 8, "wide": 6}
STEPS = 10
LOSSY = {"values": "int8", "keep_rows": 0.1}
POOL = {"pool_rows": 2000, "second_moment": True}
Tables = dict[str, dict[str, Any]]


class Job:
    """Servers and workers. `own`: settings of single tables; `job`: those of all."""

    def __init__(
        self,
        own: Tables,
        job: dict[str, Any],
        *,
        servers: int = 1,
        workers: int = 1,
        optimizer: dict[str, Any] | None = None,
        journal: Path | None = None,
        mode: str = "sync",
    ) -> None:
        specs = [
            TableSpec(name=name, dim=dim, **{"optimizer": optimizer or ADAGRAD, **own.get(name, {})})
            for name, dim in DIMS.items()
        ]
        both: dict[str, Any] = {"consistency": ConsistencyConfig(mode=mode), "seed": 3}
        both["compression"] = CompressionConfig(**job)
        self.journals = [] if journal is None else [Journal(journal / str(s), sync=False) for s in range(servers)]
        self.services = servers_of(specs, servers, num_workers=workers, **both)
        for service, kept in zip(self.services, self.journals, strict=False):
            service.applier.journal = kept
            service.life.begin(0, 0)
        self.traffic = WorkerTraffic()
        transport = LocalTransport([service.handle for service in self.services])
        metered = MeteredTransport(transport, LedgerMeter(self.traffic))
        self.clients = [
            RowClient(metered, tables=specs, rank=rank, history=6, num_workers=workers, **both)
            for rank in range(workers)
        ]

    def step(self, step: int, *, last: bool = False) -> list[dict[str, np.ndarray]]:
        """Pulls, and pushes random gradients; the rows that each worker pulled."""
        requests = [client.request(ids_of(step, rank)) for rank, client in enumerate(self.clients)]
        pulls = [client.pull(step, request) for client, request in zip(self.clients, requests, strict=True)]
        rows = [{name: part.copy() for name, part in pull.result().items()} for pull in pulls]
        for rank, (client, request) in enumerate(zip(self.clients, requests, strict=True)):
            client.push(step, request, grads_of(step, rank), last=last)
        return rows

    def run(self, steps: range = range(STEPS)) -> list[list[dict[str, np.ndarray]]]:
        """All steps, then a fence."""
        rows = [self.step(step, last=step == STEPS - 1) for step in steps]
        fences = [client.pull(steps.stop, client.request({})) for client in self.clients]
        for fence in fences:
            fence.result()
        return rows

    def digests(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for service in self.services:
            for name, digest in service.tables.digests().items():
                total[name] = (total.get(name, 0) + digest) % 2**128
        return total

    def weights(self, table: str) -> dict[int, np.ndarray]:
        t = list(DIMS).index(table)
        return {
            int(id_): row
            for service in self.services
            for id_, row in zip(*exported(service.tables[t])[:2], strict=True)
        }


def ids_of(step: int, rank: int) -> dict[str, np.ndarray]:
    """The worker 1 has rows of one table alone in every third step, and none in the steps after."""
    rng = np.random.default_rng(100 * step + rank)
    found = {
        "big": np.unique(rng.zipf(1.2, 80) % 400),
        "small": np.unique(rng.integers(0, 12, 8)),
        "wide": np.unique(rng.zipf(1.3, 40) % 90),
    }
    if rank == 1 and step % 3 < 2:
        return {"small": found["small"]} if step % 3 == 0 else {}
    return found


def grads_of(step: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7000 + 100 * step + rank)
    return {n: rng.normal(size=(i.size, DIMS[n])).astype(np.float32) for n, i in ids_of(step, rank).items()}


def compressed(push: dict[str, Any] | None = None, pull: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"compression": {"push": push or {}, "pull": pull or {}}}


WHOLE = {"values": "fp32", "keep_rows": 1.0}
MIXED: Tables = {
    "big": compressed({"values": "int4", "rounding": "stochastic", "keep_rows": 0.2}, {"values": "int8"}),
    "small": compressed(WHOLE),
    "wide": {"freeze": True, **compressed(pull={"values": "fp16"})},
}
JOBS: dict[str, dict[str, Any]] = {
    "dropped rows": {"push": {"values": "bf16"}},
    "residuals": {"push": {"values": "int8", **POOL}},
    "random rows": {"push": {"values": "int8", "keep_rows": 0.5, "select": "random", **POOL}},
}


@every(("name", "ids"), [("dropped rows", "coded"), ("residuals", "raw"), ("random rows", "coded")])
def test_the_number_of_servers_changes_no_bit(name: str, ids: str) -> None:
    ends, rows = [], []
    for servers in (1, 2, 3):
        one = Job(MIXED, {**JOBS[name], "ids": ids}, servers=servers, workers=2)
        rows.append(one.run())
        ends.append(one.digests())
    assert ends[0] == ends[1] == ends[2]
    for steps in zip(*rows, strict=True):
        for first, *others in zip(*steps, strict=True):
            assert all(np.array_equal(first[name], other[name]) for other in others for name in first)


@every(
    ("optimizer", "rows", "ids"),
    [
        ("rowwise_adagrad", "fp32", "coded"),
        ("adagrad", "int8", "raw"),
        ("adam", "fp32", "raw"),
        ("partial_rowwise_adam", "int8", "coded"),
    ],
)
def test_an_uncompressed_table_has_the_bits_of_a_job_without_compression(optimizer: str, rows: str, ids: str) -> None:
    """Also where the others send second moments, and where a worker has rows of this table alone."""
    stored, own = {"dtype": rows}, compressed(WHOLE, {"values": "fp32"})
    plain = Job({"small": stored}, {}, workers=2, optimizer={"name": optimizer})
    job = {"ids": ids, "push": {**LOSSY, **POOL}, "pull": {"values": "int8"}}
    mixed = Job({"small": {**stored, **own}}, job, servers=2, workers=2, optimizer={"name": optimizer})
    expected, found = plain.run(), mixed.run()
    assert mixed.digests()["small"] == plain.digests()["small"]
    assert mixed.digests()["big"] != plain.digests()["big"]
    pulled = [(a["small"], b["small"]) for a, b in zip(chain(*expected), chain(*found), strict=True) if "small" in a]
    assert len(pulled) > STEPS and all(np.array_equal(a, b) for a, b in pulled)
    unsent = mixed.clients[0].residuals_and_cache()
    assert unsent["unsent_rows"] > 0  # rounding errors of the others


@every(
    ("push", "others"),
    [
        ({"keep_rows": 0.1}, {}),
        ({"keep_rows": 0.1, "values": "int8", "scale": "fp16"}, {"select": "random", "keep_rows": 0.6}),
        ({"values": "int4", "rounding": "stochastic"}, {}),
        ({"values": "int8", "rounding": "nearest"}, {"values": "int4", "rounding": "stochastic"}),
        ({"values": "int4", "rounding": "stochastic"}, {"pool_rows": 2000}),
        ({"values": "int8", "keep_rows": 0.1}, {"pool_rows": 2000, "max_age": 3}),
    ],
    ids=["rows", "rows, int8", "int4", "nearest", "int4, residuals", "int8 rows, residuals"],
)
def test_a_tables_own_settings_do_what_the_same_settings_of_the_job_do(
    push: dict[str, Any], others: dict[str, Any]
) -> None:
    """`wide` is alone in its dim, so it has a pool of its own in both jobs."""
    whole = Job({}, {"push": {**others, **push}})
    single = Job({"wide": compressed(push)}, {"push": others})
    whole.run()
    single.run()
    assert single.digests()["wide"] == whole.digests()["wide"]
    assert single.digests()["big"] != whole.digests()["big"]


def test_every_byte_is_counted_as_what_it_is_and_each_table_is_rounded_as_it_says() -> None:
    """By hand, in one step: rows of 8 values as int8 with a scale of one byte and a second moment, rows of 8 as
    float32, a tenth of the rows of 6 values as int4 with a scale of two bytes and a second moment."""
    own = {"small": compressed(WHOLE), "wide": compressed({"values": "int4", "scale": "fp16", "keep_rows": 0.1})}
    job = Job(own, {"push": {"values": "int8", "pool_rows": 100, "second_moment": True}})
    wanted = {"big": np.arange(40), "small": np.arange(10), "wide": np.arange(30)}
    request = job.clients[0].request(wanted)
    job.clients[0].pull(0, request).result()
    job.clients[0].push(0, request, {n: np.ones((i.size, DIMS[n]), np.float32) for n, i in wanted.items()})
    job.clients[0].fence(1)
    sent = job.traffic.ledger.totals()["push"]
    assert sent["ids"] == 8 * (40 + 10 + 3)
    assert sent["values"] == 40 * 8 + 10 * 8 * 4 + 3 * 3
    assert (sent["scales"], sent["moments"]) == (40 * 1 + 3 * 2, 40 + 3)

    own = {"small": compressed(pull={"values": "fp32"}), "wide": compressed(pull={"values": "fp16"})}
    job = Job(own, {"pull": {"values": "int8"}})
    exact = Job({}, {})
    wanted = {"big": np.arange(40), "small": np.arange(10), "wide": np.arange(30)}
    rows, plain = (each.clients[0].pull(0, each.clients[0].request(wanted)).result() for each in (job, exact))
    for name, values in (("big", "int8"), ("small", "fp32"), ("wide", "fp16")):
        codec = value_codec(values)
        assert np.array_equal(rows[name], codec.decode(codec.encode(plain[name]), DIMS[name])), name
    got = job.traffic.ledger.totals()["pull"]
    assert got["values"] == 40 * 8 + 10 * 8 * 4 + 30 * 6 * 2 and got["scales"] == 40


def test_nothing_of_a_table_with_a_share_of_its_own_is_dropped() -> None:
    """Plain SGD with rate 1 from zeros: a row is minus the sum of what arrived, and the pool holds the rest."""
    zeros = {"optimizer": {"name": "sgd", "lr": 1.0}, "init": {"name": "zeros"}}
    own = {name: dict(zeros) for name in DIMS}
    own["big"] |= compressed({"keep_rows": 0.05})
    job = Job(own, {"push": {"values": "int8", "keep_rows": 0.5, "pool_rows": 3000}})
    for step in range(STEPS):
        job.step(step)
    job.clients[0].fence(STEPS)
    state, client = job.clients[0].memory.state(), job.clients[0]
    assert client.memory.lost_squares == 0.0
    for table, group, index in (("big", "8 of 0", 0), ("small", "8 of 1", 0), ("wide", "6", 0)):
        mine = state[f"{group}/tables"] == index
        left = dict(zip(state[f"{group}/ids"][mine].tolist(), state[f"{group}/rests"][mine], strict=True))
        arrived, total = job.weights(table), {}
        for step in range(STEPS):
            for id_, grad in zip(ids_of(step, 0)[table].tolist(), grads_of(step, 0)[table], strict=True):
                total[id_] = total.get(id_, 0) + grad.astype(np.float64)
        zero = np.zeros(DIMS[table])
        for id_, expected in total.items():
            np.testing.assert_allclose(-arrived.get(id_, zero) + left.get(id_, zero), expected, atol=1e-4)
        assert left and len(arrived) <= len(total)
    again = Job(own, {"push": {"values": "int8", "keep_rows": 0.5, "pool_rows": 3000}}).clients[0].memory
    again.load([state])
    assert all(np.array_equal(array, again.state()[key]) for key, array in state.items())
    with pytest.raises(
        CheckpointError, match="of a pool of dim 8 of 0; the pools are of dim 6, 8: resume with the same"
    ):
        Job({}, {"push": {"values": "int8", "pool_rows": 3000}}).clients[0].memory.load([state])


def test_going_back_some_steps_repeats_their_bits() -> None:
    straight, back = (Job(MIXED, JOBS["residuals"], servers=2, mode="bounded") for _ in range(2))
    straight.run()
    for step in range(7):
        back.step(step)
    back.clients[0].regroup(LocalTransport([service.handle for service in back.services]), 0, 4)
    back.run(range(4, STEPS))
    assert back.digests() == straight.digests()


def test_rows_that_are_cached_are_those_of_each_tables_format() -> None:
    own = {"small": compressed(WHOLE, {"values": "fp32"}), "big": compressed({"keep_rows": 0.3})}
    job = Job(own, {"push": {"values": "int8", **POOL}, "pull": {"values": "int8"}})
    cached = CompressionConfig.model_validate(
        {"push": {"values": "int8", **POOL}, "pull": {"values": "int8", "cache_rows": 500, "lease": 3}}
    )
    specs = list(job.clients[0].tables.values())
    service = ShardService(
        shard=0, tables=specs, consistency=ConsistencyConfig(mode="async"), num_workers=1, seed=3, compression=cached
    )
    client = RowClient(
        LocalTransport([service.handle]),
        tables=specs, consistency=ConsistencyConfig(mode="async"), compression=cached, seed=3, history=3,
    )  # fmt: skip
    for step in range(STEPS):
        request = client.request(ids_of(step, 0))
        client.pull(step, request).result()
        client.push(step, request, grads_of(step, 0))
    client.wait_acknowledged()
    counters = client.residuals_and_cache()
    assert counters["cache_hits"] > 20 and counters["unsent_rows"] > 0


@every("ids", ["raw", "coded"])
def test_a_journal_of_mixed_formats_is_replayed_to_the_same_bits(tmp_path: Path, ids: str) -> None:
    job = {**JOBS["residuals"], "ids": ids}
    one = Job(MIXED, job, servers=2, workers=2, journal=tmp_path)
    one.run()
    expected = one.digests()
    for journal in one.journals:
        journal.close()
    again = Job(MIXED, job, servers=2, workers=2)
    for s, service in enumerate(again.services):
        with contextlib.closing(Journal(tmp_path / str(s), sync=False)) as journal:
            assert service.life.replay(journal.replay()) == 2 * STEPS
    assert again.digests() == expected


def test_a_server_refuses_gradients_of_a_frozen_table() -> None:
    job, other = Job({"wide": {"freeze": True}}, {}), Job({}, {})
    before = job.digests()
    other.clients[0].calls.regroup(LocalTransport([service.handle for service in job.services]), 0)
    other.step(0)
    with pytest.raises(RemoteError, match="table wide: is frozen, and a push has gradients of it"):
        other.clients[0].wait_acknowledged()
    assert job.digests() == before
