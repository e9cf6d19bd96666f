"""The main of a server: starts, wires and stops the parts of one process. Loads nothing that only workers need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkeep.base.allocator import keep_freed_memory
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints import Checkpoint, Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.client import ControlClient
from shardkeep.ps.control.endpoint import Endpoint
from shardkeep.ps.shard.service import ShardService
from shardkeep.ps.shard.snapshot import load_snapshots
from shardkeep.ps.transport import RpcTransport  # noqa: F401 - loads torch RPC while the other roles start
from shardkeep.roles import (
    Membership,
    checkpoints_of,
    end_when_the_job_failed,
    join_group,
    process_facts,
    resumed_from,
)

_log = EventLog("roles")


def run_server(coordinator: Endpoint, *, index: int, advertise: str, folder: Path, kernels_s: float) -> int:
    """A server's life; returns 0 when the job is completed. Raises why it was not.

    Args:
        folder: The run folder: a profile goes there, and checkpoints where the config names no other place.
        kernels_s: Seconds it took to compile kernels, for the summary.
    """
    control = ControlClient(coordinator, role="server", index=index, advertise=advertise)
    end_when_the_job_failed(control)
    with Membership(control) as config:
        keep_freed_memory()
        formation = control.join(None)
        checkpoints = checkpoints_of(config, folder)
        service = build_service(
            config,
            formation.tables,
            shard=index,
            generation=formation.generation,
            checkpoints=checkpoints,
            resumed=resumed_from(checkpoints, formation.start_step),
        )
        service.process = lambda: process_facts(kernels_s)
        profile = None
        if config.profile.steps:
            from shardkeep.workers.profiling import (  # a server needs nothing else of this room
                ServerProfile,
                trace_path,
            )

            profile = ServerProfile(config.profile, trace_path(folder, "server", index), service.handle)
        handle = service.handle if profile is None else profile.handle
        transport = join_group(config, formation, "server", index, advertise, handle)
        control.update(step=formation.start_step, phase="serving")
        _log.info("serving", generation=formation.generation, tables=len(formation.tables))
        try:
            control.over.wait()
        finally:
            if profile is not None:
                profile.close()
            service.close("the job is over")
            transport.close()
    state = control.state
    if state.state != "completed" and (error := state.error()) is not None:
        raise error
    _log.info("done")
    return 0


def build_service(
    config: JobConfig,
    tables: Sequence[TableSpec],
    *,
    shard: int,
    generation: int,
    checkpoints: Checkpoints | None = None,
    resumed: Checkpoint | None = None,
) -> ShardService:
    """Server `shard` of the job, empty, or with its rows of a checkpoint. Raises CheckpointError."""
    service = ShardService(
        shard=shard,
        num_shards=max(config.servers, 1),
        tables=tables,
        consistency=config.consistency,
        num_workers=config.workers,
        seed=config.seed,
        pull_values=config.compression.pull.values,
        generation=generation,
        start_step=0 if resumed is None else resumed.step,
        checkpoints=checkpoints,
    )
    if resumed is not None:
        load_snapshots(service.tables, resumed, shard=shard, num_shards=max(config.servers, 1))
    return service
