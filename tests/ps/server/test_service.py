"""ShardService through packed messages, as a server sees them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.compression.config import CompressionConfig, PushConfig
from shardkeep.compression.values.codecs import built_in
from shardkeep.ps.server.consistency import BoundedGate
from shardkeep.ps.server.figures import shard_record
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from shardkeep.ps.wire.rows import MOMENTS, PLAIN
from tests.support.cases import every
from tests.support.held_gate import HeldGate
from tests.support.messages import Message, Section, pack, text_of
from tests.support.one_table import OneTable, pulled
from tests.support.services import IDS, LIMIT_S, TABLES, answer, gradient, make_service, pull, push, raw, wanted
from tests.support.tables import of_one_table


def rows_of(future: Future[Bytes], dim: int = 4) -> np.ndarray:
    message = answer(future)
    assert message.kind is Kind.ROWS, text_of(message)
    codec, section = built_in(message.sections[0].value_format).codec, message.sections[0]
    return codec.decode(codec.unpack(section.values, section.rows, dim), dim)


def report(service: ShardService) -> dict[str, Any]:
    message = answer(service.handle(text_message(Kind.ASK, '{"ask": "report"}')))
    assert message.kind is Kind.ANSWER
    return json.loads(text_of(message))  # type: ignore[no-any-return]


def read(service: ShardService, table: int = 0, ids: np.ndarray = IDS) -> np.ndarray:
    return rows_of(pull(service, 0, wanted(table, ids), kind=Kind.READ), TABLES[table].dim)


# ---- pull, push, read, ask ----


def test_rows_come_back_section_by_section_and_only_pushes_change_and_create_them() -> None:
    service, pulled_from = make_service(), make_service("sync")
    first = answer(pull(service, 0, wanted(0, IDS[:2]), wanted(1)))
    assert [(s.table, s.rows, s.ids.size, s.values.size) for s in first.sections] == [(0, 2, 0, 32), (1, 4, 0, 48)]
    assert (first.kind, first.rank, first.step, first.value) == (Kind.ROWS, 0, 0, 0)
    rows_of(pull(pulled_from, 0, wanted(0)))
    read(pulled_from)
    assert [t["rows"] for t in report(pulled_from)["tables"]] == [0, 0]
    before, message = read(service, 1), pack(Message(Kind.PUSH, 0, 0, 0, (gradient(1),)))
    unaligned = np.empty(message.size + 1, np.uint8)[1:]
    unaligned[:] = message
    assert answer(service.handle(unaligned)).kind is Kind.ACK
    assert np.allclose(read(service, 1), before - np.float32(0.05))


def test_the_report_counts_what_happened() -> None:
    service = make_service(staleness=3)
    for step in (0, 1, 1, 3):
        push(service, step, gradient(0))
    bad = gradient(1, value=np.nan)
    push(service, 2, bad)
    pull(service, 4, wanted(0))
    pull(service, 6, wanted(0), wanted(1))
    pull(service, 7)
    found = report(service)
    assert (found["pushes"], found["duplicates"], found["pulls"], found["skipped_rows"]) == (4, 1, 2, 4)
    assert found["staleness"] == {"0": 1, "2": 1}
    expected = OneTable(TABLES[0], seed=1)
    for step in (0, 1, 3):
        expected.apply(IDS, np.ones((4, 4), np.float32), step=step)
    assert found["digest"] == {"user": f"{expected.digest():032x}", "item": "0" * 32}
    sizes = {"bytes": expected.size_bytes, "entries": expected.index.num_entries}
    assert found["tables"][0] == {"name": "user", "rows": 4, **sizes}


# ---- sync ----


@every(("num_workers", "seed"), [(1, 0), (2, 1), (3, 2), (3, 3)])
def test_sync_gives_the_bits_of_one_process_for_any_order_of_arrival(num_workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    service = make_service("sync", num_workers=num_workers)
    expected = Tables(TABLES[:1], seed=1)
    for step in range(6):
        shown = {rank: pull(service, step, wanted(0), rank=rank) for rank in rng.permutation(num_workers).tolist()}
        for future in shown.values():
            assert (rows_of(future) == pulled(expected[0], IDS)).all()
            assert answer(future).value == 0
        parts = []
        for _ in range(num_workers):
            ids = np.sort(rng.choice(IDS, rng.integers(1, 5), replace=False))
            parts.append((ids, rng.normal(size=(ids.size, 4)).astype(np.float32)))
        for rank in rng.permutation(num_workers).tolist():
            ids, grad = parts[rank]
            acknowledged = push(service, step, Section(0, ids.size, raw(ids), raw(grad)), rank=rank)
            assert acknowledged.done() and answer(acknowledged).kind is Kind.ACK
        expected.apply([of_one_table(ids, grad) for ids, grad in parts], step=step)
    fences = [pull(service, 6, rank=rank) for rank in range(num_workers)]
    assert all(answer(fence).kind is Kind.ROWS for fence in fences)
    assert report(service)["digest"]["user"] == f"{expected[0].digest():032x}"
    assert report(service)["staleness"] == {"0": 6 * num_workers}


def test_a_sync_pull_waits_for_the_other_rank_and_what_comes_twice_counts_once() -> None:
    service = make_service("sync", num_workers=2)
    for rank in (0, 1):
        push(service, 0, gradient(0), rank=rank)
    first, again = pull(service, 1, wanted(0)), pull(service, 1, wanted(0))
    assert not first.done() and not again.done()
    pull(service, 1, rank=1)
    assert (rows_of(first) == rows_of(again)).all()
    assert (rows_of(pull(service, 1, wanted(0))) == rows_of(first)).all()

    service, once = make_service("sync"), make_service("sync")
    push(once, 0, gradient(0))
    for _ in range(2):
        assert answer(push(service, 0, gradient(0))).kind is Kind.ACK
    for each in (service, once):
        pull(each, 1)
    assert answer(push(service, 0, gradient(0))).kind is Kind.ACK
    assert report(service)["digest"] == report(once)["digest"]
    assert report(service)["duplicates"] == 2


# ---- bounded and async ----


@every(("mode", "bound"), [("bounded", 0), ("bounded", 2), ("bounded", 5), ("without the gate", 9), ("async", 9)])
def test_bounded_holds_its_bound_while_the_application_of_pushes_is_delayed(mode: str, bound: int) -> None:
    """Ten pulls by a worker whose pushes are acknowledged but not applied. Without the gate the check is turned off."""
    service = make_service("async" if mode == "async" else "bounded", staleness=2 if bound == 9 else bound)
    if mode == "without the gate":
        service.applier.gate = BoundedGate(num_workers=1, start_step=0, bound=None)
    held, futures = HeldGate(service), []
    for step in range(10):
        futures.append(pull(service, step, wanted(0)))
        assert answer(push(service, step, gradient(0))).kind is Kind.ACK
    assert [future.done() for future in futures] == [step <= bound for step in range(10)]
    held.release()
    assert max(answer(future).value for future in futures) == bound
    seen = report(service)["staleness"]
    assert sum(seen.values()) == 10 and max(int(s) for s in seen) == bound


def test_concurrent_pushes_and_pulls_lose_no_update() -> None:
    service = make_service("async", num_workers=4)
    steps, ids = 8, np.arange(0, 100_000, 5, dtype=np.int64)
    together = threading.Barrier(4)

    def work(rank: int) -> None:
        for step in range(steps):
            together.wait(LIMIT_S)
            assert answer(push(service, step, gradient(1, ids), rank=rank)).kind is Kind.ACK
            assert answer(pull(service, step, wanted(0), wanted(1, ids), rank=rank)).kind is Kind.ROWS

    before = read(service, 1, ids)
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(work, rank) for rank in range(4)]:
            call.result(timeout=LIMIT_S)
    assert np.allclose(read(service, 1, ids), before - 4 * steps * np.float32(0.05), atol=1e-4)
    assert report(service)["pushes"] == 4 * steps


def test_a_bounded_push_is_acknowledged_when_it_is_applied() -> None:
    service = make_service(num_workers=2)
    entered, leave = threading.Event(), threading.Event()
    apply = service.tables.apply

    def slowly(*args: Any, **kwargs: Any) -> None:
        entered.set()
        assert leave.wait(LIMIT_S)
        apply(*args, **kwargs)

    service.tables.apply = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(push, service, 0, gradient(0))
        assert entered.wait(LIMIT_S)
        waiting = pull(service, 4, wanted(0))
        again = push(service, 0, gradient(0))
        assert not call.done() and not waiting.done() and not again.done()
        leave.set()
        assert answer(again).kind is Kind.ACK
        assert answer(call.result(timeout=LIMIT_S)).kind is Kind.ACK
    push(service, 0, rank=1)
    assert not waiting.done()
    for rank in (0, 1):
        push(service, 1, rank=rank)
    assert answer(waiting).value == 2


# ---- garbage ----


def packed(kind: Kind, *sections: Section, generation: int = 0, rank: int = 0) -> Bytes:
    return pack(Message(kind, generation, rank, 0, sections))


FEW_VALUES = replace(gradient(0), values=raw(np.zeros(15, np.float32)))
GARBAGE: list[tuple[Bytes, str]] = [
    (EMPTY, "0 bytes are no message"),
    (np.arange(200, dtype=np.uint8), "version 0, expected 4"),
    (packed(Kind.PUSH, gradient(0))[:-8].copy(), "the sections add up to"),
    (packed(Kind.PUSH, gradient(0), replace(gradient(1), table=2)), "table 2 of 2"),
    (packed(Kind.PUSH, gradient(0, IDS[::-1]), gradient(1)), "ids must rise"),
    (packed(Kind.PULL, wanted(0, IDS[[0, 1, 1]])), "id 0 follows 0"),
    (packed(Kind.PUSH, replace(gradient(0), rows=5)), "32 bytes of ids for 5 rows"),
    (packed(Kind.READ, replace(wanted(0), ids=raw(IDS)[:-3])), "29 bytes of ids for 4 rows"),
    (packed(Kind.PUSH, FEW_VALUES, gradient(1)), "60 bytes of fp32 values for 4 rows of 4"),
    (packed(Kind.PUSH, replace(gradient(0), table=1)), "4 rows of 3"),
    (packed(Kind.PUSH, replace(gradient(0), value_format=60)), "format 60"),
    (packed(Kind.PUSH, replace(gradient(0), id_format=9)), "format is unknown"),
    (packed(Kind.PULL, gradient(0)), "PULL with 64 bytes of values"),
    (packed(Kind.PUSH, gradient(0), rank=1), "rank 1 of 1"),
    (packed(Kind.PUSH, gradient(0), generation=3), "generation 0, the message is of generation 3"),
    (packed(Kind.ROWS), "kind ROWS"),
    (text_message(Kind.ASK, '{"ask": "time"}'), "allowed"),
    (text_message(Kind.ASK, "{{{"), "allowed"),
    (packed(Kind.ASK), "ASK with 0 sections"),
]


@every("mode", ["sync", "bounded", "async"])
def test_garbage_is_answered_by_an_error_and_changes_nothing(mode: str) -> None:
    service, untouched = make_service(mode), make_service(mode)
    for each in (service, untouched):
        push(each, 0, gradient(0))
    for buffer, text in GARBAGE:
        future = service.handle(buffer)
        assert future.done() and answer(future).kind is Kind.ERROR
        assert text in text_of(answer(future))
    for each in (service, untouched):
        assert answer(pull(each, 1)).kind is Kind.ROWS
    assert report(service) == report(untouched)


# ---- the end ----


def test_closing_fails_what_is_parked_and_what_comes_later() -> None:
    service = make_service("sync", num_workers=2)
    push(service, 0, gradient(0))
    parked = [pull(service, 1, wanted(0)) for _ in range(3)]
    service.close("the job ended")
    service.close("again")
    for future in [*parked, pull(service, 0, wanted(0)), push(service, 0), pull(service, 0, kind=Kind.READ)]:
        with pytest.raises(TransportError, match="the job ended"):
            future.result(timeout=LIMIT_S)


def test_a_push_that_cannot_be_applied_ends_the_service_with_its_reason() -> None:
    service = make_service("sync")
    push(service, 0, gradient(0))

    def out_of_memory(*_args: Any, **_kwargs: Any) -> None:
        raise MemoryError("no room for a block")

    service.tables.apply = out_of_memory  # type: ignore[method-assign]
    message = answer(pull(service, 1, wanted(0)))
    assert message.kind is Kind.ERROR and "MemoryError: no room for a block" in text_of(message)
    with pytest.raises(TransportError, match="server 0 could not apply step 0: MemoryError"):
        pull(service, 0, wanted(0)).result(timeout=LIMIT_S)


@every("second_moment", [False, True])
def test_a_push_has_second_moments_where_the_job_says_so_and_nowhere_else(second_moment: bool) -> None:
    push_config = PushConfig(second_moment=second_moment, pool_rows=1 if second_moment else 0)
    service = make_service(compression=CompressionConfig(push=push_config))
    other = PLAIN if second_moment else PLAIN | MOMENTS
    values = np.zeros(IDS.size * (4 * TABLES[0].dim + (not second_moment)), np.uint8)
    reply = answer(push(service, 0, Section(0, IDS.size, raw(IDS), values, value_format=other)))
    assert "table user: a push differs from compression.push.second_moment of the job" in text_of(reply)
    assert report(service)["digest"] == report(make_service())["digest"]


# ---- telemetry records ----


def test_a_telemetry_record_has_the_time_of_a_request_and_the_counts_that_a_table_can_have() -> None:
    def figures(requests: int, seconds: float, **more: Any) -> dict[str, Any]:
        return {"requests": requests, "request_s": seconds, "request_histogram": {}, **more}

    plain = {"name": "a", "rows": 0, "bytes": 0, "created": 0, "removed": 0, "refused": 0, "candidates": 0}
    ruled = {"name": "b", "rows": 3, "bytes": 9, "created": 5, "removed": 2, "refused": 0, "candidates": 4}
    record = shard_record(figures(0, 0.0, tables=[plain, ruled]), figures(0, 0.0))
    assert record["tables"] == [
        {"name": "a", "rows": 0, "bytes": 0, "created": 0},
        {"name": "b", "rows": 3, "bytes": 9, "created": 5, "removed": 2, "candidates": 4},
    ]
    assert shard_record(figures(30, 5.1, pulls=7), figures(10, 5.0)) == {"pulls": 7, "request_ms": 5.0}
    assert shard_record(figures(10, 5.0), figures(10, 5.0)) == {"request_ms": None}, "there was no service yet"
