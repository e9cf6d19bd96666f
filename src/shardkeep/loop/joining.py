"""What a loop of the user's own joins: the tables, the config, and the row client over the servers' connections."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from pydantic import ValidationError

from shardkeep.assembly.kernel_needs import needed_kernels
from shardkeep.assembly.service import build_service
from shardkeep.base.compiling.kernels import load_kernels
from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.settings import DAY_S, first_problem
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.ledger import Ledger
from shardkeep.compression.selection.registry import selector_of
from shardkeep.compression.values.codecs import Codecs
from shardkeep.config import JobConfig
from shardkeep.config.launch import LaunchConfig
from shardkeep.config.rules import check_compression
from shardkeep.config.web import WebConfig
from shardkeep.launch.machine import WORLD
from shardkeep.loop.metering import Meter, NoMeter, StepMeter
from shardkeep.loop.rejoining import Rejoining
from shardkeep.loop.saving import LoopCheckpoints, samples_of
from shardkeep.member.group import join_group
from shardkeep.member.membership import Membership
from shardkeep.member.metrics import MemberMetrics
from shardkeep.page.of_job import page_line
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import (
    ConsistencyConfig,
    RecoveryConfig,
    TableConfig,
    TableSpec,
    TelemetryConfig,
    check_policies,
)
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import ANY_STEP, Offer
from shardkeep.ps.jagged import Catalog
from shardkeep.ps.rpc.group import in_group
from shardkeep.ps.transport.lasting import LastingTransport
from shardkeep.ps.transport.metered import LedgerMeter, MeteredTransport, WorkerTraffic
from shardkeep.ps.transport.transport import LocalTransport, Transport
from shardkeep.ps.wire.rows import RowReader
from shardkeep.run.checkpoints import check_needs_no_rows, checkpoints_of, resumed_from
from shardkeep.run.storage import why_unseen
from shardkeep.trust.endpoint import Endpoint
from shardkeep.workers.config import CheckpointConfig

Tables = Sequence[TableSpec]
_place = threading.Lock()
"""Held by the client that is in a job: torch has one RPC group a process."""
_place_pid = 0
"""The process of the last client that held it."""
JOURNAL_BYTES = 8_000_000_000
"""Of one server's journal, which no checkpoint of a loop shortens."""


class Sections(TypedDict, total=False):
    """Sections of a job's config that `EmbeddingClient.serve` takes."""

    launch: LaunchConfig
    telemetry: TelemetryConfig
    web: WebConfig


class Joined(NamedTuple):
    """The parts of a client. Closing `ending` leaves the group."""

    rows: RowClient
    ledger: Ledger
    ending: contextlib.ExitStack
    saving: LoopCheckpoints
    meter: Meter
    start_step: int = 0
    control: ControlClient | None = None
    num_trainers: int = 1
    dense_state: Any = None
    resumed: bool = False
    """Whether the servers have the rows of a checkpoint."""
    page: str | None = None
    """The address of the job's page; None = it has none, or this process does not see the run folder."""


class Registered(NamedTuple):
    """A trainer that has its place in a job, and no tables yet. Closing `ending` leaves the job."""

    control: ControlClient
    coordinator: Endpoint
    config: JobConfig
    ending: contextlib.ExitStack
    num_trainers: int


def run_of(coordinator: str | Path | None) -> str | Path:
    """What `connect` was given, or the run folder that `shardkeep with` put into the environment. Raises UserError."""
    if coordinator is not None:
        return coordinator
    if run := os.environ.get("SHARDKEEP_RUN", ""):
        return run
    raise UserError("connect: no run; start the script with `shardkeep with -- COMMAND`, or give connect(RUN)")


@contextlib.contextmanager
def only_client() -> Iterator[None]:
    """Holds the place of the one client of this process that is in a job. Raises UserError where another has it."""
    global _place_pid
    if in_group() or not _place.acquire(blocking=False):
        why = "another EmbeddingClient of this process is open (torch has one RPC group a process); allowed: close() it"
        if _place_pid not in (0, os.getpid()):
            why = f"process {_place_pid} was forked while its EmbeddingClient was open; allowed: spawn this process"
        raise UserError(f"{why}, or EmbeddingClient.local")
    _place_pid = os.getpid()
    try:
        yield
    finally:
        _place.release()


def register(
    coordinator: Endpoint,
    index: int,
    timeout_s: float,
    *,
    ending: contextlib.ExitStack,
    world: int | None = None,
    restarted: bool = False,
    advertise: str = "127.0.0.1",
) -> Registered:
    """Takes the place of trainer `index`; blocks until the coordinator answers. Arguments and errors: see `connect`.

    `ending`: What is closed after the trainer has left. `world`: The number of trainers by their launcher. `restarted`:
    The launcher starts all of them again after an error of this one."""
    with ending as stack:
        control = ControlClient(coordinator, role="worker", index=index, advertise=advertise, timeout_s=timeout_s)
        config = stack.enter_context(Membership(control, wait_s=timeout_s, restarted=restarted))
        if world not in (None, config.workers):
            raise UserError(
                f"{WORLD} is {world} and the job has {config.workers} trainers; allowed: `shardkeep with --trainers "
                f"{world}`, or workers: {world} in the job's config"
            )
        return Registered(control, coordinator, config, stack.pop_all(), config.workers)


def join(registered: Registered, specs: Sequence[TableSpec]) -> Joined:
    """Joins the group with these tables; blocks until all members have. Leaves the job where it fails."""
    control, coordinator, config, ending, _ = registered
    index, host = control.member.index, control.member.host
    with ending as stack:
        load_kernels(needed_kernels(config, "client"))
        _check_together(specs, config)
        unseen = why_unseen(control.shared, writes=False)
        offer = Offer(tuple(specs), unseen=unseen, settings=config.agreed())
        formation = control.join(offer)
        while index in formation.lacking:  # the others learn by it that they must start again, too
            why = f"worker {index} was started again"
            formation = control.join(offer, after=formation.generation, why=why)
        place = "worker", index, host, None
        group: Transport = join_group(config, formation, *place, moves=lambda: control.state.moves)
        traffic = WorkerTraffic()
        renewed = functools.partial(metered, traffic=traffic, config=config, tables=formation.tables)
        transport, lasting = renewed(group), None
        if config.recovery.restarts:
            transport = lasting = LastingTransport(
                transport,
                config.consistency,
                on_loss=control.wake,
            )
            rejoining = Rejoining(control, registered.coordinator, config, formation, specs, lasting, renewed)
            stack.callback(rejoining.close)
        stack.callback(transport.close)
        rows = row_client(
            config,
            transport,
            formation.tables,
            rank=index,
            generation=formation.generation,
            measures_waits=config.counts_figures,
        )
        checkpoints = checkpoints_of(config, Path(control.run_dir)) if control.run_dir else None
        found = None if checkpoints is None else resumed_from(checkpoints, formation.start_step)
        meter = _meter_of(
            registered,
            rows,
            traffic.ledger,
            samples=samples_of(found),
            generation=lambda: (lasting and lasting.generation) or formation.generation,
            ending=stack,
        )
        saving = LoopCheckpoints(
            rows,
            control,
            None if checkpoints is None else checkpoints.folder,
            num_trainers=config.workers,
            seed=config.seed,
            lasting=lasting,
            samples=lambda: meter.samples,
        )
        return Joined(
            rows,
            traffic.ledger,
            stack.pop_all(),
            saving,
            meter,
            formation.start_step,
            control,
            config.workers,
            None if found is None else saving.resume(found),
            found is not None,
            page_line(Path(control.run_dir), coordinator.token) if config.web.has_page and control.run_dir else None,
        )


def _meter_of(
    registered: Registered,
    rows: RowClient,
    ledger: Ledger,
    *,
    samples: int,
    generation: Callable[[], int],
    ending: contextlib.ExitStack,
) -> Meter:
    """What counts the steps of a client, with the endpoint of its metrics."""
    control, coordinator, config, _, _ = registered
    if not config.counts_figures:
        return NoMeter()
    metrics = MemberMetrics(config, coordinator, control.member)
    ending.callback(metrics.close)
    meter = StepMeter(rows, ledger, config, control, samples=samples, generation=generation, metrics=metrics.address)
    metrics.show_worker(lambda: meter.figures)
    return meter


def join_local(tables: Tables, config: JobConfig) -> Joined:
    """Creates the tables in this process. Raises ConfigError."""
    tables = checked_tables(tables, config)
    load_kernels(needed_kernels(config, "server", "client", tables=tables))
    service = build_service(config, tables, shard=0, generation=0)
    transport = LocalTransport([service.handle])
    ending = contextlib.ExitStack()
    ending.callback(service.close, "the client is closed")
    ending.callback(transport.close)
    traffic = WorkerTraffic()
    rows = row_client(config, metered(transport, traffic, config, tables), tables, rank=0, generation=0)
    saving = LoopCheckpoints(rows, None, None, num_trainers=1, seed=config.seed)
    return Joined(rows, traffic.ledger, ending, saving, NoMeter())


def loop_config(
    servers: int,
    seed: int,
    consistency: ConsistencyConfig | str,
    compression: CompressionConfig | None,
    restarts: int = 0,
    sections: Sections | None = None,
) -> JobConfig:
    """The config of a job of servers and one trainer. Raises ConfigError."""
    if other := sorted(set(sections or {}) - Sections.__annotations__.keys()):
        raise ConfigError(f"serve: {other[0]}; allowed: {', '.join(Sections.__annotations__)}")
    if isinstance(consistency, str):
        if consistency not in ("sync", "bounded", "async"):
            raise ConfigError(f"consistency: {consistency!r}; allowed: sync, bounded, async or a ConsistencyConfig")
        consistency = ConsistencyConfig.model_validate({"mode": consistency})
    try:
        return JobConfig(
            name="custom-loop",
            seed=seed,
            servers=servers,
            workers=1,
            consistency=consistency,
            compression=compression or CompressionConfig(),
            checkpoint=CheckpointConfig(every_steps="off"),
            recovery=RecoveryConfig(restarts=restarts, max_journal_bytes=JOURNAL_BYTES, max_lost_steps=ANY_STEP),
            **(sections or {}),
        )
    except ValidationError as error:
        raise ConfigError(f"serve: {first_problem(error)}") from error


def config_around(loaded: JobConfig | None, *, servers: int | None, trainers: int | None) -> JobConfig:
    """The config of servers around trainers of the user's own, with these numbers. Raises ConfigError."""
    given: dict[str, object] = {}
    if loaded is not None:
        check_needs_no_rows([loaded.table(name) for name in loaded.row_files], None)
        given = loaded.model_dump(exclude_unset=True)
    job = {"name": "custom-loop", "workers": 1, "servers": 2, **given}
    job |= {} if servers is None else {"servers": servers}
    job |= {} if trainers is None else {"workers": trainers}
    job["checkpoint"] = {**given.get("checkpoint", {}), "every_steps": "off"}  # type: ignore[dict-item]
    recovery = {"max_journal_bytes": JOURNAL_BYTES, "max_lost_steps": ANY_STEP}
    job["recovery"] = {**recovery, **given.get("recovery", {})}  # type: ignore[dict-item]
    if not job["servers"]:
        raise ConfigError("servers: 0; allowed: 1 or more, or EmbeddingClient.local in the script")
    return JobConfig.stored(job)


def checked_tables(tables: Tables, config: JobConfig | None = None) -> list[TableSpec]:
    """Returns the tables as a list. Raises ConfigError if it is empty, has a name twice, or holds no TableSpec, or if
    a table does not go with `config`."""
    found = list(tables)
    for table in found:
        if not isinstance(table, TableSpec):
            why = " (an entry of a job's config, without a name)" if isinstance(table, TableConfig) else ""
            kind = f"{type(table).__name__}{why}"
            raise ConfigError(f"tables: holds a {kind}; allowed: TableSpec(name=..., dim=..., ...)")
    found = [_validated(table) for table in found]
    names = [table.name for table in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"tables: two of them are named {next(n for n in names if names.count(n) > 1)}")
    if not found:
        raise ConfigError("tables: is empty; allowed: at least one TableSpec")
    check_needs_no_rows(found, None)
    if config is not None:
        _check_together(found, config)
    return found


def _validated(table: TableSpec) -> TableSpec:
    """The table with its settings checked, which `model_copy(update=...)` does not do."""
    try:
        return TableSpec(**dict(table))
    except ValidationError as error:
        raise ConfigError(f"tables.{table.name}: {first_problem(error)}") from error


def _check_together(tables: Sequence[TableSpec], config: JobConfig) -> None:
    push, import_from = config.compression.push, Path(config.data.root)
    Codecs(config.compression, import_from)  # plugs, before any process starts or joins
    if ":" in str(push.select):
        selector_of(push.select, import_from)
    try:
        check_compression(tables, config.compression)
        check_policies(tables, config.consistency)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def tables_of(config: JobConfig) -> list[TableSpec]:
    """The tables that a job's config names."""
    return [config.table(name) for name in config.tables if name != "default"]


def metered(transport: Transport, traffic: WorkerTraffic, config: JobConfig, tables: Tables) -> Transport:
    """The transport of one generation; `traffic` counts its bytes."""
    rows = RowReader(Catalog(tables), config.compression, Path(config.data.root))
    return MeteredTransport(transport, LedgerMeter(traffic), rows)


def row_client(
    config: JobConfig, transport: Transport, tables: Tables, *, rank: int, generation: int, measures_waits: bool = False
) -> RowClient:
    """Returns a client that sends through `transport`."""
    lasts = isinstance(transport, LastingTransport)
    return RowClient(
        transport,
        tables=tables,
        rank=rank,
        generation=generation,
        consistency=config.consistency,
        compression=config.compression,
        seed=config.seed,
        timeout_s=config.liveness.step_timeout_s,
        patience_s=DAY_S if lasts else 0.0,  # its calls end by themselves, after the servers have formed again
        measures_waits=measures_waits,
        import_from=Path(config.data.root),
    )
