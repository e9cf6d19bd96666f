"""The transport between processes, and its in-process twin: one server process, one worker, which is the test."""

from __future__ import annotations

import itertools
import re
import time
from concurrent.futures import Future

import numpy as np
import pytest

from shardkeep.base.deadlines import wait_for_reply, wait_while_moving
from shardkeep.base.errors import DeadlineExceeded, TransportError
from shardkeep.ps.rpc.group import MIN_THREADS, connect_store, rpc_threads
from shardkeep.ps.transport.transport import LocalTransport, Transport
from shardkeep.ps.wire.message import EMPTY, Kind
from tests.support.messages import Message, Section, pack, unpack
from tests.support.ports import reserved_port
from tests.support.rpc_groups import (
    IDS,
    LIMIT_S,
    SERVICE,
    WORKERS,
    Group,
    Pair,
    answer,
    pull,
    push,
    question,
    reply,
)  # fmt: skip
from tests.support.rpc_peer import footprint, service_of

processes = pytest.mark.waits_for_processes


def local_twin(generation: int) -> LocalTransport:
    return LocalTransport([service_of(SERVICE, generation).handle])


# ---- over real RPC ----


@processes
def test_the_twin_and_rpc_give_the_same_bytes_for_the_same_messages(group: Group) -> None:
    g = group.generation
    parked = pack(Message(Kind.PULL, g, 1, 1))
    talk = [
        pull(0, 0, generation=g),
        pull(0, 1, generation=g, ids=IDS[:0]),
        push(0, 0, generation=g),
        push(0, 1, generation=g, table=1, ids=IDS[1:]),
        push(0, 1, generation=g),
        parked,
        pull(1, 0, generation=g),
        pull(1, 1, generation=g, table=1),
        pull(9, 0, generation=g, kind=Kind.READ),
        pull(9, 0, generation=g, table=1, kind=Kind.READ, ids=np.arange(1) * 977),
        pull(9, 0, generation=g, table=1, kind=Kind.READ, ids=np.arange(150_000) * 977),
        push(7, 0, generation=g),
        push(1, 0, generation=g + 1),
        np.arange(200, dtype=np.uint8),
        EMPTY,
        pack(Message(Kind.PUSH, g, 0, 1, (Section(9, 0, EMPTY, EMPTY),))),
        question(g),
    ]
    transports: list[Transport] = [group.transport, local_twin(g)]
    both = []
    for transport in transports:
        futures = []
        for message in talk:
            futures.append(transport.send(0, message, timeout_s=LIMIT_S))
            if message is not parked:
                reply(futures[-1])
        both.append([bytes(reply(future)) for future in futures])
    kinds = [unpack(np.frombuffer(part, np.uint8)).kind for part in both[0]]
    assert both[0] == both[1]
    assert {Kind.ROWS, Kind.ACK, Kind.ANSWER, Kind.ERROR} <= set(kinds)


@processes
def test_parked_pulls_far_beyond_the_threads_block_nothing(group: Group) -> None:
    g = group.generation
    for rank in range(WORKERS):
        answer(group.transport, pull(0, rank, generation=g))
        answer(group.transport, push(0, rank, generation=g))
    parked = [group.send(pull(1, 0, generation=g)) for _ in range(25 * MIN_THREADS)]
    assert answer(group.transport, pull(0, generation=g, kind=Kind.READ)).kind is Kind.ROWS
    assert not any(future.done() for future in parked)
    last = answer(group.transport, pull(1, 1, generation=g))
    for future in parked:
        assert bytes(unpack(future.result(LIMIT_S)).sections[0].values) == bytes(last.sections[0].values)


@processes
def test_a_wait_ends_by_its_limit_or_by_the_end_of_the_service(group: Group) -> None:
    g = group.generation
    answer(group.transport, push(0, 0, generation=g))
    started = time.monotonic()
    told = r"^server 0 did not answer within \d+\.\d s \(liveness.step_timeout_s\)$"
    with pytest.raises(DeadlineExceeded, match=told):
        group.transport.send(0, pull(1, generation=g), timeout_s=0.3).result(LIMIT_S)
    assert time.monotonic() - started >= 0.29  # two clocks
    assert group.is_alive()

    waiting = group.send(pull(1, generation=g))
    group.peer.ask("close_service", reason="the job is over")
    for future in (waiting, group.send(push(1, generation=g))):
        with pytest.raises(TransportError, match=r"^server 0: the job is over$"):
            future.result(LIMIT_S)


@processes
def test_what_is_under_way_ends_when_this_side_leaves_which_leaves_the_next_generation_alone(
    lasting_pair: Pair,
) -> None:
    old = lasting_pair.form()
    answer(old.transport, push(0, 0, generation=old.generation))
    waiting = old.send(pull(1, generation=old.generation))
    old.transport.close()
    for future in (waiting, old.send(question(old.generation))):
        with pytest.raises(TransportError, match="server 0 was lost"):
            future.result(LIMIT_S)
    old.leave()
    new = lasting_pair.form()
    old.transport.close()
    assert new.is_alive()
    new.leave()


def footprints(pair: Pair, generations: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of both processes after a fifth of the generations, and after all."""
    marks = []
    for count in range(1, generations + 1):
        group = pair.form()
        assert group.is_alive()
        group.leave()
        if count in (generations // 5, generations):
            marks.append((footprint(), pair.peer.ask("footprint")))
    return marks


@processes
def test_generations_in_one_pair_of_processes_leak_no_descriptor_and_no_thread(pair: Pair) -> None:
    for early, late in zip(*footprints(pair, 15), strict=True):
        assert late["descriptors"] <= early["descriptors"] + 2
        assert late["threads"] <= early["threads"]


@pytest.mark.chaos
@processes
def test_a_hundred_generations_in_one_pair_of_processes_leak_no_memory(pair: Pair) -> None:
    for early, late in zip(*footprints(pair, 100), strict=True):
        assert late["rss"] <= early["rss"] + 16e6


@processes
def test_a_killed_server_is_seen_before_any_limit_is_over_and_the_survivors_form_the_next_generation(
    pair: Pair,
) -> None:
    group = pair.form()
    answer(group.transport, push(0, 0, generation=group.generation))
    waiting = group.send(pull(1, generation=group.generation))
    pair.peer.kill()
    with pytest.raises(TransportError, match=r"^server 0 was lost after \d+\.\d s: ") as lost:
        waiting.result(LIMIT_S)
    with pytest.raises(TransportError, match="server 0 was lost"):
        group.send(question(group.generation)).result(LIMIT_S)
    assert lost.value.retryable and "tensorpipe" not in str(lost.value)
    group.leave()
    pair.another_peer()
    number = pair.next_generation()  # nobody else comes to this one
    assert re.fullmatch(
        rf"TransportError: the group of generation {number} was not formed within \d+\.\d s; did not come: worker 0",
        pair.peer.ask("form", generation=number, timeout_s=1.0),
    )
    assert pair.form().is_alive()


# ---- without a peer ----


def test_a_wait_lasts_as_long_as_something_moves() -> None:
    came = iter([False] * 5 + [True])
    assert wait_while_moving(lambda _seconds: next(came), 0.0, itertools.count().__next__)
    assert not wait_while_moving(lambda _seconds: False, 0.0, int)


def test_a_closed_transport_a_late_reply_and_a_store_of_nobody_are_one_line() -> None:
    transport = local_twin(0)
    transport.close()
    with pytest.raises(TransportError, match="server 0 cannot be reached: the transport is closed"):
        transport.send(0, question(), timeout_s=1.0).result(LIMIT_S)

    with pytest.raises(DeadlineExceeded, match=r"server 3 did not answer within 0\.\d s"):
        wait_for_reply(Future(), peer="server 3", timeout_s=0.05)

    told = "the coordinator's store at 127.0.0.1:{} cannot be reached"
    with reserved_port() as port, pytest.raises(TransportError, match=told.format(port)) as error:
        connect_store("127.0.0.1", port, timeout_s=1.0)
    assert "\n" not in str(error.value)


def test_calls_have_a_thread_for_each_core_that_members_can_keep_busy() -> None:
    assert [rpc_threads(*of) for of in ((2, 8), (16, 8), (16, 400), (64, 400))] == [4, 8, 16, 16]
