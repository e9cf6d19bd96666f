"""Compressed pulls and pushes against real services: what arrives, what is left for later, what is saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.clients import SUMS, Job, grads_of_step, ids_of_step
from tests.support.one_table import exported

STEPS = range(8)
TABLES: dict[str, dict[str, Any]] = {"big": SUMS, "wide": {"optimizer": {"name": "adam"}}}


@every("last", [False, True])
def test_the_push_of_what_was_held_back_is_counted_apart(last: bool) -> None:
    job = Job(TABLES, servers=2, push={"keep": 0.2, "pool_rows": 2000})
    job.run(STEPS, last=last)
    final = [push.buffer.size for push in job.sent(Kind.PUSH) if push.step == STEPS[-1]]
    pushed = job.traffic.ledger.totals()["push"]
    assert len(final) == 2 and pushed.get("flush", 0) == (sum(final) if last else 0)


@every(("servers", "mode"), [(1, "sync"), (3, "bounded")])
def test_coded_ids_change_no_bit_and_spare_bytes(servers: int, mode: str) -> None:
    raw, coded = (Job(TABLES, servers=servers, mode=mode, ids=ids) for ids in ("raw", "coded"))
    raw.run(STEPS)
    coded.run(STEPS)
    assert coded.digests() == raw.digests()
    raw_bytes, coded_bytes = raw.traffic.ledger.totals(), coded.traffic.ledger.totals()
    for way in ("pull", "push"):
        assert coded_bytes[way]["ids"] < 0.5 * raw_bytes[way]["ids"]
    assert coded_bytes["push"]["values"] == raw_bytes["push"]["values"]
    assert coded_bytes["pull"]["values"] < raw_bytes["pull"]["values"]  # rows that are not there yet are left out


@every("ids", ["raw", "coded"])
def test_a_push_stands_alone_where_its_server_has_forgotten_the_pull_that_it_names(ids: str) -> None:
    digests = []
    for forgets in (False, True):
        job = Job(TABLES, servers=2, ids=ids)
        for step in range(4):
            wanted = ids_of_step(step)
            pull = job.client.pull(step, job.client.request(wanted))
            pull.result()
            if forgets:
                for service in job.services:
                    service.pulls.forget_all()
            job.client.push(step, job.client.request(wanted), grads_of_step(step, wanted), pulls=[pull])
        job.client.fence(4)
        digests.append(job.digests())
    assert digests[0] == digests[1]


def test_second_moments_reach_the_optimizer() -> None:
    """Two equal gradients sent as one sum: row-wise Adagrad must see their two squares, not the square of the sum."""
    slots = {}
    for with_moments in (False, True):
        job = Job({}, push={"keep": 0.01, "pool_rows": 100, "second_moment": with_moments})
        request = job.client.request({"small": np.array([5, 9])})
        for step in range(3):
            job.client.pull(step, request).result()
            grads = {"small": np.stack([np.full(8, 100.0), np.full(8, 2.0)]).astype(np.float32)}
            job.client.push(step, request, grads, last=step == 2)
        job.client.fence(3)
        ids_N, _, slots_NS = exported(job.services[0].tables[1])
        slots[with_moments] = float(slots_NS[ids_N == 9][0, 0])
    assert slots[False] == pytest.approx(36.0, rel=1e-5)  # (2 + 2 + 2) ** 2
    assert slots[True] == pytest.approx(12.0, rel=0.2)  # 3 * 2 ** 2, in one byte


# ---- the cache ----

CACHE: dict[str, Any] = {"cache_rows": 1000, "lease": 3}


def trained(job: Job, step: int, ids: np.ndarray) -> np.ndarray:
    """The rows of a pull whose push adds 1 to each of their values."""
    request = job.client.request({"big": ids})
    rows = job.client.pull(step, request).result()["big"].copy()
    job.client.push(step, request, {"big": np.full((ids.size, 8), -1.0, np.float32)})
    job.client.fence(step + 1)
    return rows


def num_asked(job: Job) -> int:
    return sum(int(pull.rows_S.sum()) for pull in job.sent(Kind.PULL))


@every(
    ("drift", "rows", "hits"),
    [
        ({}, [0, 0, 0, 0, 4, 4, 4, 4, 8], 18),
        ({"drift": 0.5}, [0, 0, 2, 2, 4, 4, 4, 7, 7], 15),  # half of 4 is grown in two steps, less of 7 in three
    ],
    ids=["lease", "drift"],
)
def test_a_row_is_read_again_when_its_lease_ends_or_sooner_if_it_moves(
    drift: dict[str, float], rows: list[int], hits: int
) -> None:
    job = Job(TABLES, pull=CACHE | drift)
    assert [float(trained(job, step, np.array([3, 4, 99]))[0, 0]) for step in range(9)] == rows
    assert (job.client.pulls.cache.hits, job.client.pulls.cache.misses) == (hits, 27 - hits)


def test_only_rows_that_are_missing_and_not_on_their_way_are_asked_for() -> None:
    job = Job(TABLES, servers=3, ids="coded", pull=CACHE)
    trained(job, 0, np.arange(0, 100, 2))
    job.packets.clear()
    assert (trained(job, 1, np.arange(100))[::2] == 0).all()
    assert num_asked(job) == 50

    job, plain = Job(TABLES, servers=2, pull=CACHE), Job(TABLES, servers=2)
    first = job.client.request({"big": np.arange(50), "wide": np.arange(9)})
    later = {"big": np.arange(25, 75), "wide": np.arange(4, 30)}
    pulls = [job.client.pull(0, first), job.client.pull(1, job.client.request(later))]
    rows = [pull.result() for pull in pulls]
    assert num_asked(job) == 75 + 30
    wanted = plain.client.pull(0, plain.client.request(later)).result()
    for name in later:
        np.testing.assert_array_equal(rows[1][name], wanted[name])


def test_an_evaluation_reads_past_the_cache_and_a_lost_generation_forgets_it() -> None:
    job, ids = Job(TABLES, pull=CACHE | {"values": "int4"}), np.arange(5)
    trained(job, 0, ids)
    assert (job.client.read(job.client.request({"big": ids})).result()["big"] == 1).all()
    job.client.regroup(LocalTransport(job.handlers), 0, 1)
    assert (trained(job, 1, ids) == 1).all()
