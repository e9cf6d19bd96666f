"""shardkeep: parameter-server training of large recommendation models in PyTorch.

The public names load on first use; `import shardkeep` itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CompressionConfig",
    "ConsistencyConfig",
    "EmbeddingClient",
    "JobConfig",
    "Lookup",
    "TableConfig",
    "TableSpec",
    "__version__",
    "connect",
    "load_config",
    "serve",
    "train",
]

if TYPE_CHECKING:
    from shardkeep.compression.config import CompressionConfig
    from shardkeep.config import JobConfig, load_config
    from shardkeep.launch.job import train
    from shardkeep.loop.client import EmbeddingClient, connect
    from shardkeep.loop.serve import serve
    from shardkeep.ps.config import ConsistencyConfig, TableConfig, TableSpec
    from shardkeep.workers.embeddings.lookup import Lookup

_HOMES = {
    "CompressionConfig": "shardkeep.compression.config",
    "ConsistencyConfig": "shardkeep.ps.config",
    "EmbeddingClient": "shardkeep.loop.client",
    "JobConfig": "shardkeep.config",
    "Lookup": "shardkeep.workers.embeddings.lookup",
    "TableConfig": "shardkeep.ps.config",
    "TableSpec": "shardkeep.ps.config",
    "connect": "shardkeep.loop.client",
    "load_config": "shardkeep.config",
    "serve": "shardkeep.loop.serve",
    "train": "shardkeep.launch.job",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
