"""The transport between processes, and its in-process twin: one server process, one worker, which is the test."""

from __future__ import annotations

import collections
import io
import itertools
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import rpc
from torch.distributed.rpc import internal as rpc_internal

from shardkeep.base.deadlines import wait_for_reply
from shardkeep.base.errors import DeadlineExceeded, TransportError
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc.calls import handle
from shardkeep.ps.rpc.group import RPC_THREADS, connect_store
from shardkeep.ps.rpc.unpickler import RestrictedUnpickler
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport, Transport
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from tests.support.cases import every
from tests.support.messages import Message, Section, pack, text_of, unpack
from tests.support.rpc_groups import (
    IDS,
    LIMIT_S,
    WORKERS,
    Group,
    answer,
    pull,
    push,
    question,
    service_settings,
)
from tests.support.rpc_peer import Peer, footprint

# ---- the pair of processes ----


@pytest.fixture(scope="module")
def store(store_host: StoreHost) -> Any:
    return connect_store(*store_host.open(0), timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def peer(store_host: StoreHost) -> Iterator[Peer]:
    peer = Peer(store_host.open(0)[1], service=service_settings("sync"))
    yield peer
    assert peer.close() == 0


@pytest.fixture(scope="module")
def generations() -> Iterator[int]:
    return itertools.count(1)  # type: ignore[return-value]


@pytest.fixture
def group(peer: Peer, store: Any, generations: Iterator[int]) -> Iterator[Group]:
    group = Group(peer, store, next(generations))
    yield group
    group.leave()


def local_twin(generation: int) -> LocalTransport:
    settings = service_settings("sync")
    tables = [TableSpec(**table) for table in settings["tables"]]
    service = ShardService(
        shard=0,
        tables=tables,
        consistency=ConsistencyConfig(**settings["consistency"]),
        num_workers=WORKERS,
        seed=settings["seed"],
        generation=generation,
    )
    return LocalTransport([service.handle])


# ---- over real RPC ----


@pytest.mark.waits_for_processes
def test_the_twin_and_rpc_give_the_same_bytes_for_the_same_messages(group: Group) -> None:
    g = group.generation
    none = np.empty(0, dtype=np.int64)
    parked = pack(Message(Kind.PULL, g, 1, 1))
    talk = [
        pull(0, 0, generation=g),
        pull(0, 1, generation=g, ids=none),
        push(0, 0, generation=g),
        push(0, 1, generation=g, table=1, ids=IDS[1:]),
        push(0, 1, generation=g),
        parked,
        pull(1, 0, generation=g),
        pull(1, 1, generation=g, table=1),
        pull(9, 0, generation=g, kind=Kind.READ),
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
                wait_for_reply(futures[-1], peer="server 0", timeout_s=LIMIT_S)
        both.append([bytes(wait_for_reply(future, peer="server 0", timeout_s=LIMIT_S)) for future in futures])
    kinds = [unpack(np.frombuffer(part, np.uint8)).kind for part in both[0]]
    assert both[0] == both[1]
    assert {Kind.ROWS, Kind.ACK, Kind.ANSWER, Kind.ERROR} <= set(kinds)


@pytest.mark.waits_for_processes
def test_parked_pulls_far_beyond_the_threads_block_nothing(group: Group) -> None:
    g = group.generation
    for rank in range(WORKERS):
        answer(group.transport, pull(0, rank, generation=g))
        answer(group.transport, push(0, rank, generation=g))
    parked = [group.send(pull(1, 0, generation=g)) for _ in range(25 * RPC_THREADS)]
    assert answer(group.transport, pull(0, generation=g, kind=Kind.READ)).kind is Kind.ROWS
    assert not any(future.done() for future in parked)
    last = answer(group.transport, pull(1, 1, generation=g))
    for future in parked:
        assert bytes(unpack(future.result(LIMIT_S)).sections[0].values) == bytes(last.sections[0].values)


@pytest.mark.waits_for_processes
@pytest.mark.parametrize("num_ids", [0, 1, 300_000], ids=["none", "one", "29 MB"])
def test_messages_of_any_size_arrive_whole(group: Group, num_ids: int) -> None:
    ids = np.arange(num_ids, dtype=np.int64) * 977
    message = pull(0, generation=group.generation, ids=ids, table=1)
    assert bytes(answer(group.transport, message).sections[0].values) == bytes(
        answer(local_twin(group.generation), message).sections[0].values
    )


@pytest.mark.waits_for_processes
def test_a_wait_that_runs_out_names_the_server_and_the_time_and_harms_nothing(group: Group) -> None:
    g = group.generation
    answer(group.transport, push(0, 0, generation=g))
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"^server 0 did not answer within \d+\.\d s \(liveness.step_timeout_s\)$"
    ):
        group.send(pull(1, generation=g), timeout_s=0.3).result(LIMIT_S)
    assert 0.3 <= time.monotonic() - started < LIMIT_S
    assert answer(group.transport, question(g)).kind is Kind.ANSWER


@pytest.mark.waits_for_processes
def test_a_service_that_closes_tells_the_waiting_why(group: Group) -> None:
    g = group.generation
    answer(group.transport, push(0, 0, generation=g))
    waiting = group.send(pull(1, generation=g))
    group.peer.ask("close_service", reason="the job is over")
    for future in (waiting, group.send(push(1, generation=g))):
        with pytest.raises(TransportError, match=r"^server 0: the job is over$"):
            future.result(LIMIT_S)


@pytest.mark.waits_for_processes
def test_what_is_under_way_ends_when_this_side_leaves(group: Group) -> None:
    g = group.generation
    answer(group.transport, push(0, 0, generation=g))
    waiting = group.send(pull(1, generation=g))
    group.transport.close()
    for future in (waiting, group.send(question(g))):
        with pytest.raises(TransportError, match="server 0 was lost"):
            future.result(LIMIT_S)


@pytest.mark.waits_for_processes
def test_closing_an_old_transport_leaves_the_next_generation_alone(
    peer: Peer, store: Any, generations: Iterator[int]
) -> None:
    old = Group(peer, store, next(generations))
    old.leave()
    new = Group(peer, store, next(generations))
    old.transport.close()
    assert answer(new.transport, question(new.generation)).kind is Kind.ANSWER
    new.leave()


class Foreign:
    """Pickles as a call of what is given."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


@pytest.mark.waits_for_processes
@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (os.mkdir, ("{made}",), "shardkeep refuses posix.mkdir in an RPC"),
        (handle, (Foreign(os.mkdir, "{made}"), EMPTY), "shardkeep refuses posix.mkdir in an RPC"),
        (handle, (Foreign(getattr, "text", "upper"), EMPTY), "shardkeep refuses upper of 'text'"),
        (
            handle,
            (Foreign(rpc_internal.PythonUDF, 5), EMPTY),
            r"cannot be read: .* missing 2 required positional arguments",
        ),
        (handle, ("server9-g1", EMPTY), "server9-g1 serves nothing in this process"),
    ],
    ids=["a foreign function", "a foreign argument", "an attribute", "what cannot be read", "an unknown target"],
)
def test_a_foreign_call_is_refused_in_one_line_and_the_server_lives_on(
    group: Group, tmp_path: Any, function: Any, arguments: tuple[Any, ...], text: str
) -> None:
    made = str(tmp_path / "made")
    for argument in arguments:
        if isinstance(argument, Foreign) and argument.call[1] == ("{made}",):
            argument.call = (argument.call[0], (made,))
    filled = tuple(made if a == "{made}" else a for a in arguments if not isinstance(a, np.ndarray))
    target = group.transport.server_name(0)
    if function is handle:
        filled = (*filled, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=text):
        rpc.rpc_sync(target, function, args=filled, timeout=LIMIT_S)
    assert list(tmp_path.iterdir()) == []
    assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER
    assert "Traceback" not in group.peer.stderr()


def unpickled(*parts: bytes) -> Any:
    return RestrictedUnpickler(io.BytesIO(b"\x80\x04" + b"".join(parts) + b".")).load()


def named(owner: Any) -> bytes:
    """The opcodes that find a class or function by its name."""
    texts = (text.encode() for text in (owner.__module__, owner.__qualname__))
    return b"".join(b"\x8c" + bytes([len(text)]) + text for text in texts) + b"\x93"


def state(value: object) -> bytes:
    """The opcodes of a plain value, and those that set it as the attributes of what stands before it."""
    return pickle.dumps(value, 4)[2:-1] + pickle.BUILD


class Raw:
    """A pickler of torch RPC that sends the same bytes for any object."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def serialize(self, _call: object) -> tuple[bytes, list[torch.Tensor]]:
        return self._sent, []


@pytest.mark.waits_for_processes
def test_a_message_that_would_break_later_calls_is_refused_in_one_line_and_breaks_none(group: Group) -> None:
    opcodes = named(rpc_internal.PythonUDF) + state((None, {"func": "no function"}))
    target: Any = group.transport.server_name(0)
    with (
        rpc.api._use_rpc_pickler(Raw(b"\x80\x04" + opcodes + b".")),
        pytest.raises(RuntimeError, match="shardkeep refuses the opcode BUILD in an RPC"),
    ):
        rpc.rpc_sync(target, handle, args=(target,), timeout=LIMIT_S)
    assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER
    assert "Traceback" not in group.peer.stderr()


@pytest.mark.waits_for_processes
def test_a_hundred_generations_in_one_pair_of_processes_leak_nothing(
    peer: Peer, store: Any, generations: Iterator[int]
) -> None:
    marks = []
    for count in range(100):
        group = Group(peer, store, next(generations))
        assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER
        group.leave()
        if count in (19, 99):
            marks.append((footprint(), peer.ask("footprint")))
    for early, late in zip(*marks, strict=True):
        assert late["descriptors"] <= early["descriptors"] + 2
        assert late["threads"] <= early["threads"]
        assert late["rss"] <= early["rss"] + 16e6


@pytest.mark.waits_for_processes
def test_a_killed_server_is_seen_before_any_limit_is_over_and_the_survivors_form_the_next_generation(
    peer: Peer, store_host: StoreHost, store: Any, generations: Iterator[int]
) -> None:
    doomed = Peer(store_host.open(0)[1], service=service_settings("sync"))
    try:
        group = Group(doomed, store, next(generations))
        answer(group.transport, push(0, 0, generation=group.generation))
        waiting = group.send(pull(1, generation=group.generation))
        started = time.monotonic()
        doomed.kill()
        with pytest.raises(TransportError, match=r"^server 0 was lost after \d+\.\d s: ") as lost:
            waiting.result(LIMIT_S)
        with pytest.raises(TransportError, match="server 0 was lost"):
            group.send(question(group.generation)).result(LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 4
        assert lost.value.retryable and "tensorpipe" not in str(lost.value)
        group.transport.close()
    finally:
        doomed.close()
    group = Group(peer, store, next(generations))
    assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER
    group.leave()


@pytest.mark.waits_for_processes
def test_a_member_that_does_not_come_is_named_in_time_and_the_others_can_try_again(
    peer: Peer, store: Any, generations: Iterator[int]
) -> None:
    number = next(generations)
    assert re.fullmatch(
        rf"TransportError: the group of generation {number} was not formed within [12]\.\d s; did not come: worker 0",
        peer.ask("form", generation=number, timeout_s=1.0),
    )
    group = Group(peer, store, next(generations))
    assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER
    group.leave()


# ---- without a peer ----


def test_a_closed_local_transport_says_so() -> None:
    transport = local_twin(0)
    transport.close()
    with pytest.raises(TransportError, match="server 0 cannot be reached: the transport is closed"):
        transport.send(0, question(), timeout_s=1.0).result(LIMIT_S)


def test_waiting_in_process_has_a_deadline_that_names_the_peer() -> None:
    with pytest.raises(DeadlineExceeded, match=r"server 3 did not answer within 0\.\d s"):
        wait_for_reply(Future(), peer="server 3", timeout_s=0.05)


def test_a_store_that_nobody_hosts_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TransportError, match=f"the coordinator's store at 127.0.0.1:{port} cannot be reached") as error:
        connect_store("127.0.0.1", port, timeout_s=1.0)
    assert "\n" not in str(error.value)


def test_the_private_names_of_torch_are_where_they_were() -> None:
    """A torch that moved one must fail here, not in the middle of a job."""
    assert {
        "module": [hasattr(rpc_internal, n) for n in ("_unpickler", "_run_function", "PythonUDF", "RemoteException")],
        "pickler": hasattr(rpc_internal._InternalRPCPickler, "_tensor_receiver"),
        "rpc": [hasattr(rpc, n) for n in ("TensorPipeAgent", "_is_current_rpc_agent_set")],
        "api": hasattr(rpc.api, "_init_rpc_states"),
        "autograd": hasattr(torch.distributed.autograd, "_init"),
    } == {
        "module": [True] * 4,
        "pickler": True,
        "rpc": [True] * 2,
        "api": True,
        "autograd": True,
    }
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    assert options.num_worker_threads > 0


def test_the_unpickler_admits_no_name_beyond_its_list() -> None:
    for harmless in (collections.OrderedDict, collections.Counter, torch.load):
        with pytest.raises(AttributeError, match=f"shardkeep refuses {harmless.__module__}.{harmless.__qualname__} in"):
            unpickled(named(harmless))
    for garbage in (b"", b".", b"\x80\x04\x95", pickle.dumps([1])[:-1], b"\x8c\xff.", os.urandom(64)):
        with pytest.raises(AttributeError, match="shardkeep refuses"):
            RestrictedUnpickler(io.BytesIO(garbage)).load()
    assert text_of(unpack(text_message(Kind.ERROR, "x"))) == "x"


@every("given", [{"made": 1}, (None, {"made": 1})], ids=["as a dict", "as slots"])
@every(
    "admitted",
    [handle, rpc_internal.PythonUDF, rpc_internal._InternalRPCPickler],
    ids=lambda admitted: admitted.__qualname__,
)
def test_no_message_sets_attributes_of_what_is_admitted(admitted: Any, given: object) -> None:
    assert unpickled(named(admitted)) is admitted
    with pytest.raises(AttributeError, match=r"^shardkeep refuses the opcode BUILD in an RPC$"):
        unpickled(named(admitted), state(given))
    assert not hasattr(admitted, "made")


@every("rest", [b"\x82\x01", b"\x92", b"(i__main__\nx\n", b"P1\n", b"r\xff\xff\xff\x7f", b"\xff"])
def test_opcodes_that_no_call_needs_are_refused(rest: bytes) -> None:
    with pytest.raises(AttributeError, match=r"^shardkeep refuses the opcode \w+ in an RPC$"):
        unpickled(b"N", rest)


@every("size", [0, 255, 256, 70_000])
def test_plain_values_of_any_size_can_be_read(size: int) -> None:
    values = {"b" * size: [True, None, 1.5, -1, 300, 2**40], "numbers": list(range(size))}
    assert RestrictedUnpickler(io.BytesIO(pickle.dumps(values))).load() == values
