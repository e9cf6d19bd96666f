"""The summary of a finished job: the counts of all workers, the servers' reports, the digest of the model."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.base.machine.versions import peak_rss_bytes
from shardkeep.compression.ledger import Ledger, merge_totals
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.transport.metered import WorkerTraffic
from shardkeep.ps.wire.admin import GetReport
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.dense.tower import Tower, digest_parts
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.dense_figures import DenseFigures, step_share
from shardkeep.workers.reporting.figures import WorkerFigures, fp32_bytes
from shardkeep.workers.timing.clock import PARTS


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Counters outside training; called after the last step."""

    control_bytes: Callable[[], int] = lambda: 0
    """Bytes that this process and the coordinator have exchanged."""
    facts: Callable[[], Mapping[str, Any]] = dict
    """The process's entry under `processes`."""
    sockets: Callable[[], Mapping[str, Any]] = dict
    """The kernel's counters of the process's connections, by group."""


@dataclass(frozen=True, slots=True)
class Meters:
    """What counts in a worker's process, all its life."""

    steps: StepCounters
    traffic: WorkerTraffic
    process: ProcessCounters
    figures: WorkerFigures | None = None
    """What telemetry and exporters read; None = nobody does."""


@dataclass(frozen=True, slots=True)
class SummarySources:
    """The parts of a worker that a summary reads."""

    client: RowClient
    tower: Tower
    collective: Collective
    meters: Meters


def summarize(
    sources: SummarySources,
    *,
    steps: int,
    evaluation: Mapping[str, Any] | None,
    best: Mapping[str, Any] | None = None,
    progressive: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The job's summary on rank 0, None elsewhere. Blocks until every rank has called it.

    `wall_s`, `versions`, `machine`, `status` and the coordinator's process are added by who keeps the run folder."""
    client, tower, collective, meters = sources.client, sources.tower, sources.collective, sources.meters
    control_bytes, facts = meters.process.control_bytes(), meters.process.facts()
    client.fence(steps)
    collective.barrier(purpose="agreements")
    workers = gather_records(collective, _steps_record(sources, control_bytes) | _worker_record(sources, facts))
    if collective.rank != 0:
        return None
    servers = client.calls.ask(GetReport(), dict)
    return {
        "steps": steps,
        **_position(meters.steps),
        **_of_workers(workers),
        "eval": dict(evaluation or {}),
        **({"best": dict(best)} if best is not None else {}),
        **({"progressive": dict(progressive)} if progressive is not None else {}),
        "bytes": _bytes(workers, meters.steps, _control_of(servers)),
        **_saturated(workers, fp32=client.compressor.fp32),
        "skipped_steps": workers[0]["skipped_steps"],
        "recoveries": [],
        "tables": table_totals(servers),
        "state_digest": state_digest(servers, _dense_parts(tower, workers)),
        "tower": {"chosen": dict(tower.chosen), "parameters": sum(p.numel() for p in tower.model.parameters())}
        | DenseFigures(tower.compilation, meters.steps).total()
        | _tower_unsent([w["tower_unsent"] for w in workers]),
        "processes": server_processes(servers) + [w["process"] | {"step_ms": w["step_ms"]} for w in workers],
    }


def stopped_figures(sources: SummarySources, *, steps: int) -> dict[str, Any] | None:
    """What the summary of a stopped job says of this start, on rank 0; None elsewhere. Asks no server: its bytes of
    control calls are not in it. Blocks until every rank has called it."""
    meters = sources.meters
    workers = gather_records(sources.collective, _steps_record(sources, meters.process.control_bytes()))
    if sources.collective.rank != 0:
        return None
    return {
        "steps": steps,
        **_position(meters.steps),
        "step_ms": mean_step_ms([w["step_ms"] for w in workers]),
        "bytes": _bytes(workers, meters.steps),
        "dropped_rows": sum(w["dropped_rows"] for w in workers),
        "skipped_steps": meters.steps.counts.skipped_steps,
    }


def _steps_record(sources: SummarySources, control_bytes: int) -> dict[str, Any]:
    """What this rank's steps came to, for rank 0, as JSON types. Books the bytes of control calls."""
    counters, ledger = sources.meters.steps, sources.meters.traffic.ledger
    ledger.add("control", "calls", control_bytes)
    totals = ledger.totals()
    return {
        "bytes": totals,
        "fp32_bytes": fp32_bytes(sources.client, sources.tower.sums, counters, totals),
        "step_ms": counters.step_ms(),
        "dropped_rows": counters.counts.dropped_rows,
    }


def _worker_record(sources: SummarySources, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What else this rank tells rank 0 at the end, as JSON types."""
    client, tower, meters = sources.client, sources.tower, sources.meters
    return {
        "sockets": meters.process.sockets(),
        "staleness": {str(k): n for k, n in client.pulls.staleness_seen.items()},
        "saturated_values": client.compressor.counts.saturated,
        "residuals_and_cache": client.residuals_and_cache(),
        "tower_unsent": tower.unsent,
        **({} if tower.shards is None else {"part_digest": _sha256(digest_parts(tower))}),
        "skipped_steps": meters.steps.counts.skipped_steps,
        "cpu_ms": meters.steps.cpu.mean_ms(),
        "ids_per_step": meters.steps.counts.ids / max(meters.steps.counts.steps, 1),
        "process": {
            "role": "worker",
            "index": sources.collective.rank,
            **facts,
            "compile_s": tower.compilation.compile_s,
        },
    }


def _of_workers(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and sums of the workers' records."""
    step_ms = mean_step_ms([w["step_ms"] for w in workers])
    return {
        "step_ms": step_ms,
        "step_share": step_share(step_ms),
        "cpu_ms": mean_cpu_ms([w["cpu_ms"] for w in workers]),
        "sockets": _summed(w["sockets"] for w in workers),
        "staleness": merged_histogram([w["staleness"] for w in workers]),
        "ids_per_step": _ids_per_step([w["ids_per_step"] for w in workers]),
        "dropped_rows": sum(w["dropped_rows"] for w in workers),
        **_residuals_and_cache([w["residuals_and_cache"] for w in workers]),
    }


def _ids_per_step(by_rank: Sequence[float]) -> dict[str, Any]:
    """The mean ids of a step by rank: ranks with longer histories hold up the others."""
    mean = sum(by_rank) / len(by_rank)
    return {"by_rank": [round(ids, 1) for ids in by_rank], "largest_over_mean": max(by_rank) / mean if mean else 1.0}


def _control_of(servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The bytes of the servers' control calls, as totals of a ledger."""
    ledger = Ledger()
    ledger.add("control", "calls", sum(one.get("control_bytes", 0) for one in server_processes(servers)))
    return ledger.totals()


def gather_records(collective: Collective, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's record, on every rank, in order of the ranks."""
    body = np.frombuffer(json.dumps(record).encode("utf-8"), dtype=np.uint8).copy()
    parts = gather_arrays(collective, body, purpose="agreements")
    return [json.loads(bytes(part).decode("utf-8")) for part in parts]


def merged_histogram(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sum of histograms with integer keys, sorted by key."""
    total: dict[int, int] = {}
    for part in parts:
        for key, count in part.items():
            total[int(key)] = total.get(int(key), 0) + count
    return {str(key): total[key] for key in sorted(total)}


def _position(counters: StepCounters) -> dict[str, Any]:
    """Samples of the job, those before this start where there are any, and this start's rate."""
    before = {"resumed_at": {"samples": counters.samples - counters.trained}} if counters.resumed else {}
    return {"samples": counters.samples, **before, "samples_per_s": counters.samples_per_s()}


def _saturated(workers: Sequence[Mapping[str, Any]], *, fp32: bool) -> dict[str, int]:
    """Gradient values that were beyond the range of the push format; nothing where every float32 fits."""
    return {} if fp32 else {"saturated_values": sum(w["saturated_values"] for w in workers)}


def _bytes(workers: Sequence[Mapping[str, Any]], counters: StepCounters, *others: Mapping[str, Any]) -> dict[str, Any]:
    """The totals; `per_sample`, what training alone cost, without evaluation; and `fp32`, what the workers would have
    sent as float32 without compression."""
    totals, samples = merge_totals([*(w["bytes"] for w in workers), *others]), counters.trained
    training = totals["total"] - sum(totals["read"].values())
    fp32 = {way: sum(w["fp32_bytes"][way] for w in workers) for way in ("push", "pull", "tower")}
    return totals | {"per_sample": training / samples if samples else 0.0, "fp32": fp32}


def _summed(sockets: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The workers' counters, group by group."""
    sums: dict[str, Counter[str]] = {}
    for one in sockets:
        for group, counters in one.items():
            sums.setdefault(group, Counter()).update(counters)
    return {group: dict(counters) for group, counters in sums.items()}


POLICY_COUNTS = ("admitted_rows", "refused_rows", "evicted_rows", "candidates")
"""What a server says of a table with policies."""


def table_totals(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, bytes and the index's load factor of each table over all servers, in the tables' order."""
    sums: dict[str, Counter[str]] = {}
    for server in servers:
        for table in server["tables"]:
            counts = {key: value for key, value in table.items() if key != "name"}
            sums.setdefault(table["name"], Counter()).update(counts)
    return [
        {
            "name": name,
            "rows": s["rows"],
            "bytes": s["bytes"],
            "load_factor": round(s["rows"] / max(1, s["entries"]), 4),
            **{key: s[key] for key in POLICY_COUNTS if key in s},
        }
        for name, s in sums.items()
    ]


def server_processes(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each server that is a process of its own."""
    return [
        {"role": "server", "index": s["shard"], **s["process"], "applied_steps": s["applied_steps"]}
        for s in servers
        if s["process"]
    ]


def loop_figures(
    client: RowClient, ledger: Ledger, servers: Sequence[Mapping[str, Any]], *, steps: int, dropped_rows: int
) -> dict[str, Any]:
    """What the client of a loop of the user's own says of its steps."""
    return {
        "steps": steps,
        "tables": table_totals(servers),
        "bytes": ledger.totals(),
        "staleness": {str(k): n for k, n in sorted(client.pulls.staleness_seen.items())},
        "dropped_rows": dropped_rows,
    }


def loop_processes(servers: Sequence[Mapping[str, Any]], step_ms: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """The processes of a loop of the user's own: the servers, and this one, the first trainer. `step_ms`: None = it was
    not measured."""
    own = {"role": "worker", "index": 0, "peak_rss_bytes": peak_rss_bytes()}
    return [*server_processes(servers), own | ({"step_ms": step_ms} if step_ms else {})]


def mean_step_ms(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of the workers' step times, part by part."""
    return {name: round(sum(w[name] for w in workers) / len(workers), 4) for name in ("total", *PARTS)}


def mean_cpu_ms(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """CPU milliseconds of a step: the mean of the workers, and that of the servers, which rank 0 asked. Empty when a
    rank counted no step."""
    if not all(workers):
        return {}
    means = {key: round(sum(w[key] for w in workers) / len(workers), 4) for key in ("worker", "waited")}
    return {"steps": workers[0]["steps"], "server": workers[0]["server"], **means}


def _dense_parts(tower: Tower, workers: Sequence[Mapping[str, Any]]) -> Iterable[bytes]:
    """The bytes of the dense model; of a model in shards the digest of each worker's part."""
    return digest_parts(tower) if tower.shards is None else [w["part_digest"].encode() for w in workers]


def state_digest(servers: Sequence[Mapping[str, Any]], dense: Iterable[bytes]) -> str:
    """SHA-256 over every table's digest (summed over servers, so that neither the order of rows nor the number of
    servers matters) and the dense parameters' bytes. Equal digests mean equal models, bit for bit."""
    sums: dict[str, int] = {}
    for server in servers:
        for name, part in server["digest"].items():
            sums[name] = (sums.get(name, 0) + int(part, 16)) % (1 << 128)
    tables = (f"{name}:{sums[name]:032x};".encode() for name in sorted(sums))
    return _sha256(itertools.chain(tables, dense))


def _sha256(parts: Iterable[bytes]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def _residuals_and_cache(workers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Rows that wait at the end, the norm of what they hold, rounding errors given up, and what the caches saved."""
    total = {key: sum(w[key] for w in workers) for key in workers[0]}
    if "unsent_squares" in total:
        total["unsent_norm"] = math.sqrt(total.pop("unsent_squares"))
    return {"residuals_and_cache": total} if total else {}


def _tower_unsent(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the tower's compression never sent: the sum of the ranks' norms, which their sum's norm does not exceed,
    and how many steps' gradients that is."""
    if not all(workers):
        return {}
    norm, step_norm = sum(w["norm"] for w in workers), max(w["step_norm"] for w in workers)
    return {"unsent_norm": norm} | ({"unsent_steps": norm / step_norm} if step_norm else {})
