"""The data plane and strangers: what a formed group keeps out, what a server refuses, and what nothing of ours can."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import rpc
from torch.distributed.rpc import internal as rpc_internal

from shardkeep.base.errors import ProtocolError
from shardkeep.ps.rpc.calls import arrive, handle
from shardkeep.ps.rpc.envelope import Envelope
from shardkeep.ps.rpc.listen_filter import ListenFilter, listening_ports, refuse_newcomers
from shardkeep.ps.transport.transport import MAX_INLINE
from shardkeep.ps.wire.message import Kind
from tests.support import cluster
from tests.support.cases import every
from tests.support.examples import examples
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


class Foreign(Envelope):
    """A pickler of torch RPC that sends the same for any object."""

    def __init__(self, content: bytes, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._sent = content, list(tensors)

    def serialize(self, _sent: object) -> tuple[bytes, list[torch.Tensor]]:
        return self._sent


@processes
def test_a_foreign_call_is_refused_in_one_line_and_the_server_lives_on(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = group.transport.server_name(0)
    message = np.zeros(4, np.uint8)
    calls = [
        (Foreign(pickle.dumps((os.mkdir, str(tmp_path / "made")))), "refuses an RPC that it did not send: .* kind 2e"),
        (Foreign(Envelope().serialize(message)[0]), "shardkeep refuses an answer as an RPC"),
        (Foreign(b"\x01", torch.ones(3, requires_grad=True)), "requires grad"),
    ]
    for pickler, text in calls:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=text):
            patch.setattr(rpc.api, "_default_pickler", pickler)
            rpc.rpc_sync(target, handle, args=(message,), timeout=LIMIT_S)
    assert list(tmp_path.iterdir()) == []
    assert group.is_alive()
    assert "Traceback" not in group.peer.stderr()


PROBE = torch.zeros(1, dtype=torch.uint8)
CALLS = [
    rpc_internal.PythonUDF(handle, tuple(np.full(size, 7, np.uint8) for size in sizes), {})
    for sizes in ((0,), (40,), (0, 0), (300, 5), (MAX_INLINE + 1,), (MAX_INLINE, 1))
]


def plain(sent: Any) -> object:
    return [bytes(part) for part in sent.args] if isinstance(sent, rpc_internal.PythonUDF) else bytes(sent)


def test_calls_and_answers_come_back_and_only_large_ones_take_tensors() -> None:
    for sent in (*CALLS, np.full(9, 3, np.uint8), np.full(MAX_INLINE + 1, 3, np.uint8)):
        content, tensors = Envelope().serialize(sent)
        assert plain(Envelope().deserialize(content, tensors)) == plain(sent)
        size = sum(part.size for part in sent.args) if isinstance(sent, rpc_internal.PythonUDF) else sent.size
        assert bool(tensors) == (size > MAX_INLINE)
        assert len(content) - size * (not tensors) in (1, 3)
    call = Envelope().deserialize(*Envelope().serialize(rpc_internal.PythonUDF(arrive, (300, PROBE), {})))
    assert (call.func, call.args) == (arrive, (300, PROBE))
    assert str(Envelope().deserialize(*Envelope().serialize(RuntimeError("no\nmore")))) == "no"


@examples()
@given(st.binary(max_size=12), st.integers(0, 3))
def test_bytes_that_are_no_call_are_refused(content: bytes, num_tensors: int) -> None:
    read = Envelope().deserialize(content, [PROBE] * num_tensors)
    if isinstance(read, rpc_internal.PythonUDF):
        assert read.func in (handle, arrive) and read.kwargs == {}
    else:
        assert isinstance(read, ProtocolError) or 4 <= content[-1] <= 6


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
