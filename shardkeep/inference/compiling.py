"""Compiling: the kernels that a run's model needs, before anything imports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardkeep.inference.loading import config_of_model
from shardkeep.roles.kernel_needs import compile_of_job


def prepare(run: Path, say: Callable[[str], None]) -> None:
    """Compiles what is not in the cache; `say` is called with what takes long. Raises UserError: no run folder."""
    compile_of_job(config_of_model(run), say)
