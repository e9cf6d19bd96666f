"""Members that still form a generation which is given up: they leave it at once."""

from __future__ import annotations

import itertools
import socket
import threading
import time
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
from tests.support.cases import every

LONG_S = 120.0
SOON_S = 20.0  # far less than LONG_S, on a busy machine too
CONFIG: Any = SimpleNamespace(liveness=SimpleNamespace(form_timeout_s=LONG_S))


def formation(port: int) -> Any:
    return SimpleNamespace(generation=1, restores=False, members=(), store_host="127.0.0.1", store_port=port)


def test_nobody_tries_to_reach_the_closed_store_of_a_lost_generation() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    asked = itertools.count()
    with pytest.raises(TransportError, match=f"store at 127.0.0.1:{port} cannot be reached"):
        join_store(CONFIG, formation(port), lambda _generation: next(asked) == 3)
    assert next(asked) == 4


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


@every("server", ["has not come", "does not listen", "does not answer"])
def test_the_end_of_the_store_wakes_a_worker_whose_server_died(server: str) -> None:
    host, called = StoreHost(), threading.Event()
    place = host.open(1)
    store, other = (connect_store(*place, timeout_s=LONG_S) for _ in range(2))
    store.set_timeout(timedelta(seconds=1))  # torch waits so long for the name of one that said that it is here
    if server != "has not come":
        PrefixStore("rpc/1", store).set("server 0", "is here")

    def never_answered(*_call: Any, **_options: Any) -> torch.futures.Future[Any]:
        called.set()
        return torch.futures.Future()

    def close() -> None:
        called.wait() if server == "does not answer" else other.wait(["rpc/1/worker 0"])
        host.close()

    agent = mock.Mock(rpc_async=never_answered) if server == "does not answer" else rpc_group.rpc
    closing = threading.Thread(target=close)
    closing.start()
    began = time.monotonic()
    with (
        mock.patch.object(rpc_group, "rpc", agent),
        pytest.raises(TransportError, match="the group of generation 1 was not formed within"),
    ):
        RpcGroup.form(
            store,
            generation=1,
            role="worker",
            index=0,
            num_servers=1,
            num_workers=1,
            host="127.0.0.1",
            timeout_s=LONG_S,
            handler=None,
        )
    closing.join()
    assert time.monotonic() - began < SOON_S
