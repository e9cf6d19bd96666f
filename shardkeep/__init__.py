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
    from shardkeep.custom import EmbeddingClient, connect
    from shardkeep.launch import train
    from shardkeep.ps.config import ConsistencyConfig, TableConfig, TableSpec
    from shardkeep.serving import serve
    from shardkeep.workers.lookup import Lookup

_HOMES = {
    "CompressionConfig": "shardkeep.compression.config",
    "ConsistencyConfig": "shardkeep.ps.config",
    "EmbeddingClient": "shardkeep.custom",
    "JobConfig": "shardkeep.config",
    "Lookup": "shardkeep.workers.lookup",
    "TableConfig": "shardkeep.ps.config",
    "TableSpec": "shardkeep.ps.config",
    "connect": "shardkeep.custom",
    "load_config": "shardkeep.config",
    "serve": "shardkeep.serving",
    "train": "shardkeep.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
