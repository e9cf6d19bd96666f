"""The modules of kernels that a role needs: those that it always imports, and those that its config names.

Each registry says which kernels its entries import. A module that is not named here is compiled when it is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from shardkeep.base.compiling.kernels import compile_kernels
from shardkeep.base.compiling.sources import with_imports
from shardkeep.base.plugging.own import OwnConfig
from shardkeep.compression.config import FORMS, CompressionConfig
from shardkeep.compression.per_table import pull_of, push_of
from shardkeep.compression.values.registry import kernels_of
from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS
from shardkeep.workers.data.sources.registry import kernels_of_source

Role = Literal["server", "worker", "client"]
"""A client is a worker with the user's own loop: it has neither our data nor our model."""

_CLIENT = (
    "shardkeep.ps.wire.message_kernels",
    "shardkeep.ps.placement_kernels",
    "shardkeep.ps.server.table.initializers.initial_kernels",
)
_ALWAYS: dict[Role, tuple[str, ...]] = {
    "server": ("shardkeep.ps.wire.message_kernels", "shardkeep.ps.server.table.table_kernels"),
    "client": _CLIENT,
    "worker": (*_CLIENT, "shardkeep.workers.embeddings.kernels", "shardkeep.workers.data.sampling_kernels"),
}
_IDS = ("shardkeep.compression.ids.code_kernels",)
_SLOTS = ("shardkeep.compression.selection.pool_kernels", "shardkeep.compression.selection.row_cache_kernels")
_DRAWS = ("shardkeep.compression.values.rounding_kernels",)


def needed_kernels(config: JobConfig | None, *roles: Role, tables: Sequence[TableSpec] = ()) -> list[str]:
    """All modules of kernels that these roles import, each after those that it imports.

    Args:
        config: None = as long as a role does not know its job's config.
        tables: Tables that are not in the config.
    """
    names = [name for role in roles for name in _ALWAYS[role]]
    if config is not None:
        specs = [*tables, *(config.table(name) for name in (*config.tables, "default"))]
        names += _of_both_ends(config.compression, specs)
        if "server" in roles:
            names += _of_tables(specs)
        if "worker" in roles or "client" in roles:
            names += _of_sender(config.compression)
        if "worker" in roles:
            names += (*kernels_of_source(config.data.source), *config.model.kernels)
    return with_imports(names)


def compile_of_job(config: JobConfig, say: Callable[[str], None], *, also: Sequence[str] = ()) -> list[str]:
    """Compiles the kernels that a job's servers and workers import, and `also`; returns their modules. `say` shows what
    takes so long. Raises as `compile_kernels`."""
    began, names = time.monotonic(), with_imports([*needed_kernels(config, "server", "worker"), *also])

    def begin(count: int) -> None:
        say(f"compiling {count} of {len(names)} modules, once for this installation; about {count} s on two cores")

    if compile_kernels(names, begin):
        say(f"ready in {time.monotonic() - began:.1f} s")
    return names


def _of_both_ends(compression: CompressionConfig, tables: Sequence[TableSpec]) -> Iterator[str]:
    """Kernels that write and read messages."""
    for spec in tables:
        yield from kernels_of(push_of(spec.compression, compression.push).values)
        yield from kernels_of(pull_of(spec.compression, compression.pull).values)
    if compression.ids == "coded":
        yield from _IDS


def _of_sender(compression: CompressionConfig) -> Iterator[str]:
    """Kernels that choose and keep what a worker sends, that keep what it has read, and that sum dense gradients."""
    push = compression.push
    if push.pool_rows or compression.pull.cache_rows:
        yield from _SLOTS
    if isinstance(push.select, OwnConfig):
        yield from _DRAWS
    if compression.tower.name in FORMS:
        yield from FORMS[compression.tower.name].kernels


def _of_tables(tables: Sequence[TableSpec]) -> Iterator[str]:
    """Kernels that change rows."""
    for table in tables:
        yield from OPTIMIZERS[table.optimizer.name].kernels
        if table.admit is not None or table.evict is not None:
            yield "shardkeep.ps.server.table.policies.admission_kernels"
        if table.candidates is not None:
            yield from OPTIMIZERS[table.candidates.optimizer.name].kernels
        if (table.dtype, table.state_dtype) != ("fp32", "fp32"):
            yield "shardkeep.ps.server.table.packed_kernels"
