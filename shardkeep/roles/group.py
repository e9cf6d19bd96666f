"""How a member joins its generation: the store, then the RPC group. Loads torch only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import TransportError
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Formation

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from shardkeep.ps.rpc.group import RpcGroup

LOAD_S = 1800.0
"""Seconds that servers get to load a checkpoint before they meet the others."""
CONNECT_S = 5.0


def join_store(config: JobConfig, formation: Formation, lost: Callable[[int], bool]) -> Store:
    """The store through which a generation meets. Raises TransportError when it cannot be reached in time, or when the
    generation is `lost`: its store is closed then."""
    from shardkeep.ps.rpc.group import connect_store

    deadline = Deadline(_form_limit_s(config, formation))
    while True:
        try:
            return connect_store(formation.store_host, formation.store_port, timeout_s=CONNECT_S)
        except TransportError:
            if deadline.over or lost(formation.generation):
                raise


def _form_limit_s(config: JobConfig, formation: Formation) -> float:
    loads = formation.restores and formation.start_step
    return config.liveness.form_timeout_s + (LOAD_S if loads else 0.0)


def join_group(
    config: JobConfig,
    formation: Formation,
    role: str,
    index: int,
    host: str,
    handler: Any,
    *,
    lost: Callable[[int], bool] = lambda _generation: False,
) -> RpcGroup:
    """Blocks until all members of the generation have joined its RPC group. Raises TransportError when they have not in
    time, or when the generation is `lost`."""
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
    )
