"""How a member joins its generation: the store, then the RPC group. Loads torch only when it is called."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardkeep.base.deadlines import SILENCE_S, Deadline, among_all_s
from shardkeep.base.errors import TransportError
from shardkeep.base.net.addresses import join_address
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Formation

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from shardkeep.ps.rpc.group import RpcGroup

CONNECT_S = 1.0
"""Seconds of an attempt to connect to the store. It may be repeated, so a slow network is no reason for more."""
RETRY_S = 0.05
ANSWER_S = 5.0
"""Seconds that the store of a few members gets to answer."""


def join_store(config: JobConfig, formation: Formation, lost: Callable[[int], bool]) -> Store:
    """The store through which a generation meets. Raises TransportError when it cannot be reached in time, or when the
    generation is `lost`: its store is closed then."""
    from shardkeep.ps.rpc.group import connect_store

    host, port = formation.store_host, formation.store_port
    deadline = Deadline(config.liveness.form_timeout_s)
    while not deadline.over and not lost(formation.generation):
        if _accepts(host, port, timeout_s=CONNECT_S):  # torch would try a port that refuses for twice its limit
            with contextlib.suppress(TransportError):
                store = connect_store(host, port, timeout_s=CONNECT_S)
                store.set_timeout(timedelta(seconds=among_all_s(ANSWER_S, len(formation.members))))
                return store
        time.sleep(RETRY_S)
    raise TransportError(f"the coordinator's store at {join_address(host, port)} cannot be reached")


def _accepts(host: str, port: int, *, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def _form_limit_s(config: JobConfig, formation: Formation) -> float:
    loads = formation.restores and formation.start_step
    return config.liveness.form_timeout_s + (SILENCE_S if loads else 0.0)


def join_group(
    config: JobConfig,
    formation: Formation,
    role: str,
    index: int,
    host: str,
    handler: Any,
    *,
    lost: Callable[[int], bool] = lambda _generation: False,
    moves: Callable[[], int] = int,
) -> RpcGroup:
    """Blocks until all members of the generation have joined its RPC group. Raises TransportError when they have not in
    time since `moves` grew, or when the generation is `lost`."""
    from shardkeep.ps.rpc.group import RpcGroup

    return RpcGroup.form(
        join_store(config, formation, lost),
        generation=formation.generation,
        role=role,
        index=index,
        num_servers=config.servers,
        num_workers=config.workers,
        host=host,
        timeout_s=_form_limit_s(config, formation),
        handler=handler,
        same_host=config.transport.same_host,
        moves=moves,
    )
