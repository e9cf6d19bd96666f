"""Members that still form a generation which is given up: they leave it at once."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from shardkeep.base.errors import TransportError
from shardkeep.member.group import join_store
from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc import group as rpc_group
from shardkeep.ps.rpc.group import RpcGroup, connect_store

LONG_S = 120.0
SOON_S = 20.0  # far less than LONG_S, on a busy machine too
CONFIG: Any = SimpleNamespace(liveness=SimpleNamespace(form_timeout_s=LONG_S))


@pytest.fixture
def host() -> StoreHost:
    return StoreHost()


def formation(port: int) -> Any:
    return SimpleNamespace(generation=1, restores=False, start_step=0, store_host="127.0.0.1", store_port=port)


def after(delay_s: float, call: Callable[[], object]) -> None:
    threading.Timer(delay_s, call).start()


def form(store: Any, role: str = "worker") -> RpcGroup:
    return RpcGroup.form(
        store,
        generation=1,
        role=role,
        index=0,
        num_servers=1,
        num_workers=1,
        host="127.0.0.1",
        timeout_s=LONG_S,
        handler=None,
    )


def test_nobody_tries_to_reach_the_closed_store_of_a_lost_generation() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began, lost = time.monotonic(), threading.Event()
    after(0.2, lost.set)
    with pytest.raises(TransportError, match=f"store at 127.0.0.1:{port} cannot be reached"):
        join_store(CONFIG, formation(port), lambda _generation: lost.is_set())
    assert 0.2 <= time.monotonic() - began < SOON_S


def test_a_store_that_opens_late_is_reached() -> None:
    opened: list[TCPStore] = []
    asked = itertools.count()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else takes the port, and it refuses until somebody listens
        port = bound.getsockname()[1]

        def lost(_generation: int) -> bool:
            if next(asked) == 2:
                bound.listen()
                opened.append(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False,
                                       master_listen_fd=bound.detach()))  # fmt: skip
            return False

        store = join_store(CONFIG, formation(port), lost)
    opened[0].set("key", "value")
    assert store.get("key") == b"value" and next(asked) >= 3


@pytest.mark.parametrize("died", ["before it came", "before it listened"])
def test_the_end_of_the_store_wakes_a_member_that_waits_for_one_that_died(host: StoreHost, died: str) -> None:
    store = connect_store(*host.open(1), timeout_s=LONG_S)
    store.set_timeout(timedelta(seconds=1))  # torch waits so long for the name of one that said that it is here
    if died == "before it listened":
        PrefixStore("rpc/1", store).set("server 0", "is here")
    began = time.monotonic()
    after(0.3, host.close)
    with pytest.raises(TransportError, match="the group of generation 1 was not formed within"):
        form(store)
    assert time.monotonic() - began < SOON_S


def test_the_end_of_the_store_wakes_a_worker_whose_server_does_not_answer(host: StoreHost) -> None:
    store = connect_store(*host.open(1), timeout_s=LONG_S)
    began = time.monotonic()
    after(0.3, host.close)
    PrefixStore("rpc/1", store).set("server 0", "is here")
    agent = mock.Mock(rpc_async=mock.Mock(return_value=torch.futures.Future()))
    with (
        mock.patch.object(rpc_group, "rpc", agent),
        pytest.raises(TransportError, match="the group of generation 1 was not formed within"),
    ):
        form(store)
    assert time.monotonic() - began < SOON_S
    agent.rpc_async.assert_called_once()
