"""Several trainers of a loop and their servers, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.loop.joining import Joined
from shardkeep.loop.metering import NoMeter
from shardkeep.loop.saving import LoopCheckpoints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.transport.transport import LocalTransport


def trainers(
    count: int, tables: Sequence[TableSpec], mode: str, *, servers: int = 2, seed: int = 5, timeout_s: float = 20.0
) -> list[EmbeddingClient]:
    consistency = ConsistencyConfig(mode=mode)
    services = [
        ShardService(shard=s, tables=tables, consistency=consistency, num_workers=count, seed=seed)
        for s in range(servers)
    ]
    clients = []
    for rank in range(count):
        rows = RowClient(
            LocalTransport([service.handle for service in services]),
            tables=tables,
            rank=rank,
            consistency=consistency,
            timeout_s=timeout_s,
            seed=seed,
            num_workers=count,
        )
        saving = LoopCheckpoints(rows, None, None, num_trainers=count, seed=seed)
        ledger, ending = WorkerTraffic().ledger, contextlib.ExitStack()
        clients.append(EmbeddingClient(Joined(rows, ledger, ending, saving, NoMeter(), num_trainers=count)))
    return clients
