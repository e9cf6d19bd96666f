"""A config with absolute paths: roles and later readers may run in other folders than the one that starts a job."""

from __future__ import annotations

from pathlib import Path

from shardkeep.config import JobConfig
from shardkeep.ps.config import TableConfig


def absolute(config: JobConfig) -> JobConfig:
    """The config with its paths below the current folder."""
    data = config.data.model_copy(update={"root": _absolute(config.data.root)})
    checkpoint = config.checkpoint
    if checkpoint.dir is not None:
        checkpoint = checkpoint.model_copy(update={"dir": _absolute(checkpoint.dir)})
    tables = {name: _with_absolute_rows(table) for name, table in config.tables.items()}
    return config.model_copy(update={"data": data, "checkpoint": checkpoint, "tables": tables})


def _with_absolute_rows(table: TableConfig) -> TableConfig:
    if table.init is None or table.init.path is None:
        return table
    return table.model_copy(update={"init": table.init.model_copy(update={"path": _absolute(table.init.path)})})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
