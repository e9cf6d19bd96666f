"""Every metric of a job's processes: name, kind, meaning, labels. The reference and the collectors read this list.

Names follow Prometheus: prefix `shardkeep_`, base units (seconds, bytes, ratio), `_total` for counts since the process
began. Every series has the labels `role` and `index`. No label holds an id of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def _all(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"shardkeep_{name}", kind, text, EVERY_ROLE, labels)


def _coordinator(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"shardkeep_{name}", kind, text, ("coordinator",), labels)


def _worker(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"shardkeep_{name}", kind, text, ("worker",), labels)


def _server(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"shardkeep_{name}", kind, text, ("server",), labels)


_METRICS = (
    _all("build_info", "gauge", "1; the labels are versions", "version", "torch", "python"),
    _all("memory_bytes", "gauge", "memory of the process in RAM"),
    _all("memory_limit_bytes", "gauge", "the smallest of the machine's memory and the limits of its control groups"),
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
    _worker("train_step", "gauge", "steps that are done; a recovery may lower it"),
    _worker("train_samples", "gauge", "samples of all workers that are done, over all starts of the job"),
    _worker("train_loss", "gauge", "mean training loss of this worker in the last 10 seconds or more"),
    _worker("step_duration_seconds", "histogram", "steps by duration, without evaluation and checkpoints"),
    _worker("step_part_seconds_total", "counter", "training time by part of a step", "part"),
    _worker("pull_wait_seconds", "histogram", "steps by the time that they waited for rows"),
    _worker("server_wait_seconds_total", "counter", "that time, by the server whose reply came last", "server"),
    _worker("pull_staleness_steps", "histogram", "pulls by the steps that their rows lagged behind"),
    _worker("staleness_bound_steps", "gauge", "`consistency.staleness`"),
    _worker("bytes_total", "counter", "bytes sent and received, by what they are", "direction", "kind"),
    _worker("fp32_bytes_total", "counter", "bytes that fp32 without compression would have taken", "direction"),
    _worker("ids_total", "counter", "ids of the samples"),
    _worker("unique_ids_total", "counter", "ids after each step's were deduplicated"),
    _worker("dropped_rows_total", "counter", "row gradients that were not finite, so not sent"),
    _worker("skipped_steps_total", "counter", "steps whose dense gradient was not finite, so not applied"),
    _worker("unsent_rows", "gauge", "rows with a residual"),
    _worker("unsent_gradient_ratio", "gauge", "share of gradients that selection does not send; missing without it"),
    _server("server_step", "gauge", "steps that are applied"),
    _server("table_rows", "gauge", "rows in this server's share of a table", "table"),
    _server("table_bytes", "gauge", "memory of this server's share of a table", "table"),
    _server("table_rows_created_total", "counter", "rows that were created", "table"),
    _server("table_rows_removed_total", "counter", "rows that `evict` removed", "table"),
    _server("table_rows_refused_total", "counter", "gradients of ids that `admit` refused", "table"),
    _server("table_candidates", "gauge", "ids that `admit.min_count` counts", "table"),
    _server("request_duration_seconds", "histogram", "calls of workers by time at work; a parked pull is not at work"),
    _server("pulls_total", "counter", "pulls that are answered"),
    _server("pushes_total", "counter", "pushes that are applied or staged"),
    _server("snapshot_duration_seconds", "gauge", "time to write this server's part of the newest checkpoint"),
    _server("parked_pulls", "gauge", "pulls that wait for pushes of other workers"),
    _server("journal_bytes", "gauge", "size of the journal"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _METRICS}
"""Metric by name."""


def series_names(metric: Metric) -> list[str]:
    """The names of the metric's series."""
    if metric.kind == "histogram":
        return [f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
    return [metric.name]
