"""Compiling: the kernels that a model needs. Imports none of them, nor does anything that it imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardkeep.assembly.kernel_needs import compile_of_job
from shardkeep.inference.export.manifest import is_export, read_manifest
from shardkeep.run.trained import config_of
from shardkeep.workers.data_config import SOURCES

_ALSO = ("shardkeep.inference.sorted_rows_kernels", *SOURCES["csv"].kernels)
"""What inference imports, besides servers and workers."""


def prepare(run: Path, say: Callable[[str], None]) -> None:
    """Compiles what is not in the cache; `say` is called with what takes long. Raises UserError, CheckpointError."""
    config = read_manifest(run).config(run) if is_export(run) else config_of(run)
    compile_of_job(config, say, also=_ALSO)
