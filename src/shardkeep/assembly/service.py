"""The service of one server of a job. Loads nothing that only workers need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.index import earlier_steps
from shardkeep.ps.config import TableSpec, check_policies
from shardkeep.ps.placement import buckets_of
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.snapshot.files import load_snapshots


def build_service(
    config: JobConfig,
    tables: Sequence[TableSpec],
    *,
    shard: int,
    generation: int,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
    journal: Journal | None = None,
    process: Callable[[], dict[str, Any]] = dict,
    moved: Callable[[int], None] = lambda _rows: None,
) -> ShardService:
    """Server `shard` of the job, empty, or with its rows of a checkpoint. Raises CheckpointError and ConfigError."""
    try:
        check_policies(tables, config.consistency)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    service = ShardService(
        shard=shard,
        tables=tables,
        consistency=config.consistency,
        num_workers=config.workers,
        seed=config.seed,
        compression=config.compression,
        generation=generation,
        start_step=0 if resumed is None else resumed.step,
        checkpoints=checkpoints,
        journal=journal,
        buckets=buckets_of(shard, max(config.servers, 1)),
        process=process,
        moved=moved,
        import_from=Path(config.data.root),
    )
    if resumed is not None:
        load_snapshots(service.tables, resumed, shard=shard, num_shards=max(config.servers, 1), moved=moved)
        service.tables.earlier_steps = earlier_steps(resumed)
    if config.checkpoint.full_every > 1:
        service.tables.changed.follow("" if resumed is None else resumed.id)
    return service
