"""shardkeep: parameter-server training of large recommendation models in PyTorch.

The public names load on first use; `import shardkeep` itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["EmbeddingClient", "JobConfig", "TableConfig", "TableSpec", "__version__", "load_config", "train"]

if TYPE_CHECKING:
    from shardkeep.config import JobConfig, load_config
    from shardkeep.launch import train
    from shardkeep.ps.client import EmbeddingClient
    from shardkeep.ps.config import TableConfig, TableSpec

_HOMES = {
    "EmbeddingClient": "shardkeep.ps.client",
    "JobConfig": "shardkeep.config",
    "TableConfig": "shardkeep.ps.config",
    "TableSpec": "shardkeep.ps.config",
    "load_config": "shardkeep.config",
    "train": "shardkeep.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
