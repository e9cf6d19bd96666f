"""The data plane and strangers: what a formed group keeps out, what a server refuses, and what nothing of ours can."""

from __future__ import annotations

import collections
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import rpc
from torch.distributed.rpc import internal as rpc_internal

from shardkeep.ps.rpc.calls import handle
from shardkeep.ps.rpc.listen_filter import ListenFilter, listening_ports, refuse_newcomers
from shardkeep.ps.rpc.unpickler import RestrictedUnpickler
from shardkeep.ps.wire.message import Kind
from tests.support import cluster
from tests.support.cases import every
from tests.support.messages import text_of
from tests.support.rpc_groups import LIMIT_S, Group, Pair, answer, pull, push, question

SOON_S = 0.3
processes = pytest.mark.waits_for_processes
linux = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")


@processes
def test_messages_of_another_generation_are_refused_and_change_nothing(group: Group) -> None:
    ours = group.generation
    before = text_of(answer(group.transport, question(ours)))
    for old in (ours - 1, ours + 1, 0, 2**32 - 1):
        for message in (push(0, generation=old), pull(0, generation=old), question(old)):
            refused = answer(group.transport, message)
            assert refused.kind is Kind.ERROR
            assert text_of(refused) == f"server 0 is in generation {ours}, the message is of generation {old}"
    assert text_of(answer(group.transport, question(ours))) == before


@processes
@linux
def test_nobody_can_connect_to_a_member_of_a_formed_group(lasting_pair: Pair) -> None:
    members = [psutil.Process(lasting_pair.peer.pid), psutil.Process()]

    def listening() -> set[int]:
        return {port for member in members for port in cluster.listening_ports(member)}

    before = listening()
    group = lasting_pair.form()
    ports = listening() - before
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
    assert group.is_alive()
    group.leave()


@processes
def test_documented_whoever_gets_into_a_forming_group_runs_any_operator_of_torch_as_the_servers_user(
    group: Group, tmp_path: Path
) -> None:
    """docs/guide/security.md, "What nothing here protects against". If this fails, torch has closed it: say so there.

    This process plays the stranger: nothing asked it who it is, it only knew the store's port."""
    made = tmp_path / "made"
    target: Any = group.transport.server_name(0)
    rpc.rpc_sync(target, torch.from_file, args=(str(made), True, 4), timeout=LIMIT_S)
    assert made.stat().st_size == 4 * torch.float32.itemsize


# ---- calls of strangers ----


class Foreign:
    """Pickles as a call of what is given."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


class Raw:
    """A pickler of torch RPC that sends the same bytes for any object."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def serialize(self, _call: object) -> tuple[bytes, list[torch.Tensor]]:
        return self._sent, []


@processes
def test_a_foreign_call_is_refused_in_one_line_and_the_server_lives_on(group: Group, tmp_path: Path) -> None:
    made, message = str(tmp_path / "made"), torch.zeros(4, dtype=torch.uint8)
    target: Any = group.transport.server_name(0)
    calls: list[tuple[Callable[..., Any], tuple[object, ...], str]] = [
        (os.mkdir, (made,), "shardkeep refuses posix.mkdir in an RPC"),
        (handle, (Foreign(os.mkdir, made), message), "shardkeep refuses posix.mkdir in an RPC"),
        (handle, (Foreign(getattr, "text", "upper"), message), "shardkeep refuses upper of 'text'"),
        (handle, (Foreign(rpc_internal.PythonUDF, 5), message), "cannot be read: .* missing 2 required positional arg"),
        (handle, ("server9-g1", message), "server9-g1 serves nothing in this process"),
    ]
    for function, arguments, text in calls:
        with pytest.raises(RuntimeError, match=text):
            rpc.rpc_sync(target, function, args=arguments, timeout=LIMIT_S)
    opcodes = named(rpc_internal.PythonUDF) + state((None, {"func": "no function"}))  # would break later calls
    with (
        rpc.api._use_rpc_pickler(Raw(b"\x80\x04" + opcodes + b".")),
        pytest.raises(RuntimeError, match="shardkeep refuses the opcode BUILD in an RPC"),
    ):
        rpc.rpc_sync(target, handle, args=(target,), timeout=LIMIT_S)
    assert list(tmp_path.iterdir()) == []
    assert group.is_alive()
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


def test_the_unpickler_admits_no_name_and_no_opcode_beyond_its_list() -> None:
    for harmless in (collections.OrderedDict, collections.Counter, torch.load):
        with pytest.raises(AttributeError, match=f"shardkeep refuses {harmless.__module__}.{harmless.__qualname__} in"):
            unpickled(named(harmless))
    for rest in (b"\x82\x01", b"\x92", b"(i__main__\nx\n", b"P1\n", b"r\xff\xff\xff\x7f", b"\xff"):
        with pytest.raises(AttributeError, match=r"^shardkeep refuses the opcode \w+ in an RPC$"):
            unpickled(b"N", rest)
    for garbage in (b"", b".", b"\x80\x04\x95", pickle.dumps([1])[:-1], b"\x8c\xff.", os.urandom(64)):
        with pytest.raises(AttributeError, match="shardkeep refuses"):
            RestrictedUnpickler(io.BytesIO(garbage)).load()


@every("attributes", [{"made": 1}, (None, {"made": 1})])  # as a dict, as slots
@every("admitted", [handle, rpc_internal.PythonUDF, rpc_internal._InternalRPCPickler])
def test_no_message_sets_attributes_of_what_is_admitted(admitted: Any, attributes: object) -> None:
    assert unpickled(named(admitted)) is admitted
    with pytest.raises(AttributeError, match=r"^shardkeep refuses the opcode BUILD in an RPC$"):
        unpickled(named(admitted), state(attributes))
    assert not hasattr(admitted, "made")


@every("size", [0, 255, 256, 70_000])
def test_plain_values_of_any_size_can_be_read(size: int) -> None:
    values = {"b" * size: [True, None, 1.5, -1, 300, 2**40], "numbers": list(range(size))}
    assert RestrictedUnpickler(io.BytesIO(pickle.dumps(values))).load() == values


# ---- the filter of a listening socket ----


def lets_in(listener: socket.socket) -> bool:
    try:
        with socket.create_connection(listener.getsockname()[:2], timeout=SOON_S):
            listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


@linux
@every(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_filter_starts_with_the_last_member_and_keeps_connections(host: str, family: int) -> None:
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2], timeout=LIMIT_S) as inside,
    ):
        other, _ = listener.accept()
        listen_filter = ListenFilter(awaited=2)
        listen_filter.arrived(0)
        listen_filter.guard(listener.getsockname()[1])
        listen_filter.arrived(0)
        assert lets_in(listener)
        listen_filter.arrived(1)
        assert not lets_in(listener)
        with other:
            inside.sendall(b"still here")
            assert other.recv(100) == b"still here"


@linux
def test_a_filter_that_awaits_nobody_starts_at_once_and_on_its_own_port_only(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as other,
        (tmp_path / "file").open("wb"),
    ):
        port, before = listener.getsockname()[1], descriptors()
        ListenFilter(awaited=0).guard(port)
        assert not lets_in(listener) and lets_in(other)
        assert port in listening_ports() and refuse_newcomers(port)
        assert descriptors() == before
    assert not refuse_newcomers(port)


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())
