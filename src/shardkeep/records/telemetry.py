"""Telemetry: the records that each process makes of its figures every few seconds; how they are checked.

Counts are those since the process began. Means are over the time since its last record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.base.errors import ProtocolError
from shardkeep.records.record import Json, Part, Record, key, keys_of
from shardkeep.records.training import TrainingFigures


@dataclass(frozen=True, kw_only=True)
class Telemetry(Record):
    """What every process says."""

    pid: int | None = key("the process")
    host: str | None = key("where others reach it")
    every_s: float | None = key("seconds between two records")
    generation: int | None = key("generation of the group")
    rss_bytes: int | None = key("memory of the process in RAM", metric="gauge memory_bytes")
    limit_bytes: int | None = key(
        "the smallest of the machine's memory and the limits of its control groups", metric="gauge memory_limit_bytes"
    )
    metrics: str | None = key("address of the process's Prometheus metrics; null = it has none", null=True)

    @property
    def place(self) -> tuple[str, int]:
        """Role and index."""
        return self.role, self.index


@dataclass(frozen=True, kw_only=True)
class WorkerTelemetry(Telemetry, TrainingFigures):
    """What a worker, or a trainer with a loop of its own, says."""

    steps: int | None = key("steps since the last record")
    wait_ms: Mapping[str, float] = key("mean ms that a step waited, by the server whose reply came last", empty=dict)
    bytes: Mapping[str, Any] = key("bytes so far, as in `summary.json`, without the last control calls", empty=dict)
    fp32_bytes: Mapping[str, int] = key("bytes so far of `pull`, `push` and `tower` with float32 values", empty=dict)
    ids: int | None = key("ids of this worker's samples", metric="counter ids_total")
    unique_ids: int | None = key("the distinct ids of each step and table", metric="counter unique_ids_total")
    unsent_rows: int | None = key("rows with a residual now", metric="gauge unsent_rows")
    unsent_share: float | None = key(
        "share (0 to 1) of all gradient values that selection has not sent; null = nothing is selected",
        null=True,
        metric="gauge unsent_gradient_ratio",
    )
    flops: int | None = key(
        "floating-point operations of this worker's matrix products in the dense model", metric="counter flops_total"
    )
    flops_per_s: float | None = key(
        "their rate since its last record, in `forward` and `backward`, on a GPU in the whole step; null = none",
        null=True,
    )
    compile_s: float | None = key("seconds that `torch.compile` took", metric="gauge compile_seconds")
    compile_rss_bytes: int | None = key("memory that compiling added to the process", metric="gauge compile_bytes")


@dataclass(frozen=True, kw_only=True)
class TableFigures(Part):
    """A server's share of one table. Counts of admission and eviction are there where they are above 0."""

    name: str = key("name", empty=str)
    rows: int | None = key("rows in this server's share of a table", metric="gauge table_rows")
    bytes: int | None = key("memory of this server's share of a table", metric="gauge table_bytes")
    created: int | None = key("rows that were created", metric="counter table_rows_created_total")
    removed: int | None = key("rows that `evict` removed", metric="counter table_rows_removed_total")
    refused: int | None = key("gradients of ids that `admit` refused", metric="counter table_rows_refused_total")
    candidates: int | None = key("ids that `admit.min_count` counts", metric="gauge table_candidates")


@dataclass(frozen=True, kw_only=True)
class WrittenPart(Part):
    """A server's part of a checkpoint."""

    step: int | None = key("step of the checkpoint")
    seconds: float | None = key("time to write its part of a checkpoint", metric="gauge snapshot_duration_seconds")
    time: str | None = key("time of its end")


@dataclass(frozen=True, kw_only=True)
class ServerTelemetry(Telemetry):
    """What a server says."""

    step: int | None = key("the last step whose pushes are applied", metric="gauge server_step")
    tables: tuple[TableFigures, ...] = key("tables; a count of policies is left out where it is 0", empty=tuple)
    pulls: int | None = key("pulls that are answered", metric="counter pulls_total")
    pushes: int | None = key("pushes that are applied or staged", metric="counter pushes_total")
    request_ms: float | None = key("mean ms of work on a request, without parked time; null = no request", null=True)
    parked_pulls: int | None = key("pulls that wait for pushes of other workers", metric="gauge parked_pulls")
    journal_bytes: int | None = key("size of the journal", metric="gauge journal_bytes")
    checkpoint: WrittenPart | None = key("its last part of a checkpoint; null = it has written none", null=True)


@dataclass(frozen=True, kw_only=True)
class CoordinatorTelemetry(Telemetry):
    """What the coordinator says."""

    state: str | None = key("state of the job")
    members: int | None = key("members that are registered and not lost")


TELEMETRY: Mapping[str, type[Telemetry]] = {
    "coordinator": CoordinatorTelemetry,
    "server": ServerTelemetry,
    "worker": WorkerTelemetry,
}
"""By role, in the order in which people see them."""
ROLES = tuple(TELEMETRY)
MEMORY_SHARE = 0.9
"""Share of its memory limit above which a process is near it."""


def telemetry_of(found: Json) -> Telemetry:
    """The telemetry record of a JSON object."""
    return TELEMETRY.get(str(found.get("role")), Telemetry).of(found)


def near_memory_limit(newest: Iterable[Telemetry]) -> list[tuple[str, float]]:
    """The name of each process near its memory limit, and the share of the limit that it uses."""
    shares = [(record, (record.rss_bytes or 0) / (record.limit_bytes or math.inf)) for record in newest]
    return [(f"{record.role} {record.index}", share) for record, share in shares if share > MEMORY_SHARE]


def check_record(found: Json, sender: str) -> None:
    """Raises ProtocolError, which names the key, where what `sender` reported is no telemetry.

    A record may lack any known key but `time` and `every_s`, and may have others."""
    for each in {name: known for kind in TELEMETRY.values() for name, known in keys_of(kind).items()}.values():
        if each.name not in found and each.name not in ("time", "every_s"):
            continue
        value, types = found.get(each.name), (*each.types, *([type(None)] if each.null else []))
        if not isinstance(value, types) or isinstance(value, bool):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise ProtocolError(f"{sender} reported telemetry with {each.name}: {repr(value)[:60]}; allowed: {allowed}")
