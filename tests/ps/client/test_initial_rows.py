"""Initial rows of every law: equal over any number of servers, whether a server or the worker computes them."""

from __future__ import annotations

import numpy as np

from shardkeep.compression.config import CompressionConfig
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.transport.transport import LocalTransport
from tests.support.cases import every

LAWS = {
    "uniform": {"name": "uniform", "low": -0.2, "high": 0.7},
    "normal": {"name": "normal", "mean": 0.5, "std": 0.01},
    "constant": {"name": "constant", "value": 0.25},
    "scaled": {"name": "normal", "scale": 0.1},
}
TABLES = tuple(TableSpec(name=name, dim=5, init=InitConfig(**law)) for name, law in LAWS.items())
IDS = np.unique(np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 500))


def rows_over(servers: int, ids: str) -> dict[str, np.ndarray]:
    compression, mode = CompressionConfig(ids=ids), ConsistencyConfig()
    services = [
        ShardService(shard=s, tables=TABLES, consistency=mode, num_workers=1, seed=9, compression=compression)
        for s in range(servers)
    ]
    client = RowClient(
        LocalTransport([service.handle for service in services]), tables=TABLES, compression=compression, seed=9
    )
    rows = client.pull(0, client.request(dict.fromkeys(LAWS, IDS))).result()
    return {name: rows[name].copy() for name in LAWS}


@every("ids", ["raw", "coded"])
@every("servers", [1, 3])
def test_initial_rows_are_equal_over_any_number_of_servers(servers: int, ids: str) -> None:
    expected, found = rows_over(2, "raw"), rows_over(servers, ids)
    for name in LAWS:
        assert found[name].tobytes() == expected[name].tobytes()
    assert (found["constant"] == 0.25).all()
    assert abs(found["normal"].mean() - 0.5) < 0.01
