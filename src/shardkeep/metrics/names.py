"""Every metric of a job's processes: name, kind, meaning, labels. The reference and the collectors read this list.

A metric that records have, too, is named there (src/shardkeep/records). Names follow Prometheus: prefix `shardkeep_`,
base units (seconds, bytes, ratio), `_total` for counts since the process began. Every series has the labels `role` and
`index`. No label holds an id of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from shardkeep.records.record import Key, Part, keys_of
from shardkeep.records.telemetry import ServerTelemetry, TableFigures, Telemetry, WorkerTelemetry, WrittenPart

Kind = Literal["gauge", "counter", "histogram"]
ProcessRole = Literal["coordinator", "server", "worker"]
EVERY_ROLE: tuple[ProcessRole, ...] = ("coordinator", "server", "worker")
OF_EVERY_SERIES = ("role", "index")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels`: besides those of every series."""

    name: str
    kind: Kind
    text: str
    roles: tuple[ProcessRole, ...]
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name under which prometheus_client knows it, without the suffix of counters."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


def _of(roles: tuple[ProcessRole, ...], name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"shardkeep_{name}", kind, text, roles, labels)


def figures_of(kind: type[Part]) -> dict[str, Key]:
    """The keys of a class of records that are metrics, too: by the metric's name, without the prefix."""
    return {key.metric.split()[1]: key for key in keys_of(kind).values() if key.metric}


def _of_records(
    roles: tuple[ProcessRole, ...], kind: type[Part], *labels: str, base: type[Part] = Part
) -> list[Metric]:
    """The metrics of a class of records, without those of its base."""
    found = [each for each in figures_of(kind).items() if each[0] not in figures_of(base)]
    return [_of(roles, name, cast(Kind, key.metric.split()[0]), key.text, *labels) for name, key in found]


_all, _coordinator = partial(_of, EVERY_ROLE), partial(_of, ("coordinator",))
_worker, _server = partial(_of, ("worker",)), partial(_of, ("server",))
_METRICS = (
    _all("build_info", "gauge", "1; the labels are versions", "version", "torch", "python"),
    *_of_records(EVERY_ROLE, Telemetry),
    _coordinator("job_state", "gauge", "1 for the state that the job is in, 0 for the others", "state"),
    _coordinator("job_members", "gauge", "members that have neither left nor died", "member_role"),
    _coordinator("job_planned_steps", "gauge", "steps of the whole job"),
    _coordinator(
        "member_heartbeat_age_seconds",
        "gauge",
        "time since the last sign of life of a member; after the lease it counts as dead",
        "member_role",
        "member_index",
    ),
    _coordinator("lease_seconds", "gauge", "`liveness.lease_s`"),
    _coordinator("generations_total", "counter", "times that the group formed"),
    _coordinator("recoveries_total", "counter", "recoveries of the job; a restart of the coordinator is one"),
    _coordinator("recovery_seconds_total", "counter", "time without a group, over all recoveries"),
    _coordinator("evaluation", "gauge", "the newest evaluation, by metric (above)", "metric"),
    _coordinator("evaluation_step", "gauge", "steps done at the newest evaluation"),
    _coordinator("checkpoint_step", "gauge", "step of the newest complete checkpoint, or where the job started"),
    _coordinator("checkpoint_duration_seconds", "gauge", "time from its snapshot to its manifest"),
    _coordinator("checkpoint_age_seconds", "gauge", "time since it is complete"),
    _coordinator("checkpoint_bytes", "gauge", "size of its files"),
    _coordinator(
        "checkpoint_period_steps", "gauge", "steps between two checkpoints; missing while `auto` has not chosen"
    ),
    *_of_records(("worker",), WorkerTelemetry, base=Telemetry),
    _worker("train_loss", "gauge", "mean training loss of this worker in the last 10 seconds or more"),
    _worker("step_duration_seconds", "histogram", "steps by duration, without evaluation and checkpoints"),
    _worker("step_part_seconds_total", "counter", "training time by part of a step", "part"),
    _worker("pull_wait_seconds", "histogram", "steps by the time that they waited for rows"),
    _worker("server_wait_seconds_total", "counter", "that time, by the server whose reply came last", "server"),
    _worker("pull_staleness_steps", "histogram", "pulls by the steps that their rows lagged behind"),
    _worker("staleness_bound_steps", "gauge", "`consistency.staleness`"),
    _worker("bytes_total", "counter", "bytes sent and received, by what they are", "direction", "kind"),
    _worker("fp32_bytes_total", "counter", "bytes that fp32 without compression would have taken", "direction"),
    *_of_records(("server",), ServerTelemetry, base=Telemetry),
    *_of_records(("server",), WrittenPart),
    *_of_records(("server",), TableFigures, "table"),
    _server("request_duration_seconds", "histogram", "calls of workers by time at work; a parked pull is not at work"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _METRICS}
"""Metric by name."""


def series_names(metric: Metric) -> list[str]:
    """The names of the metric's series."""
    if metric.kind == "histogram":
        return [f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
    return [metric.name]
