"""The data plane and strangers: what a formed group keeps out, and what nothing of ours can."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import rpc

from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc.group import connect_store
from shardkeep.ps.wire.message import Kind
from tests.support.cluster import listening_ports
from tests.support.messages import text_of
from tests.support.rpc_groups import LIMIT_S, Group, answer, pull, push, question, service_settings
from tests.support.rpc_peer import Peer

pytestmark = pytest.mark.waits_for_processes
SOON_S = 0.3


@pytest.fixture(scope="module")
def peer(store_host: StoreHost) -> Iterator[Peer]:
    peer = Peer(store_host.open(0)[1], service=service_settings("sync"))
    yield peer
    assert peer.close() == 0


@pytest.fixture
def group(peer: Peer, store_host: StoreHost) -> Iterator[Group]:
    host, port = store_host.open(0)
    group = Group(peer, connect_store(host, port, timeout_s=LIMIT_S), 1 + secrets.randbelow(2**20))
    yield group
    group.leave()


def test_messages_of_another_generation_are_refused_and_change_nothing(group: Group) -> None:
    ours = group.generation
    before = text_of(answer(group.transport, question(ours)))
    for old in (ours - 1, ours + 1, 0, 2**32 - 1):
        for message in (push(0, generation=old), pull(0, generation=old), question(old)):
            refused = answer(group.transport, message)
            assert refused.kind is Kind.ERROR
            assert text_of(refused) == f"server 0 is in generation {ours}, the message is of generation {old}"
    assert text_of(answer(group.transport, question(ours))) == before


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
def test_nobody_can_connect_to_a_member_of_a_formed_group(group: Group, store_host: StoreHost) -> None:
    processes = [psutil.Process(group.peer.pid), psutil.Process()]
    ports = [port for process in processes for port in listening_ports(process) if port != store_host.open(0)[1]]
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
    assert answer(group.transport, question(group.generation)).kind is Kind.ANSWER


def test_documented_whoever_gets_into_a_forming_group_runs_any_operator_of_torch_as_the_servers_user(
    group: Group, tmp_path: Path
) -> None:
    """docs/guide/security.md, "What nothing here protects against". If this fails, torch has closed it: say so there.

    This process plays the stranger: nothing asked it who it is, it only knew the store's port."""
    made = tmp_path / "made"
    target: Any = group.transport.server_name(0)
    rpc.rpc_sync(target, torch.from_file, args=(str(made), True, 4), timeout=LIMIT_S)
    assert made.stat().st_size == 4 * torch.float32.itemsize
