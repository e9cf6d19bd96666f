"""Sections of the page that are figures of training: speed, curves, step times, tables, bytes, staleness."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from shardkeep.compression.ledger import DIRECTIONS as LEDGER_DIRECTIONS, PARTS
from shardkeep.page.counts import DIRECTIONS
from shardkeep.page.records import Json, RunRecords, position
from shardkeep.page.series import interpolate
from shardkeep.records.events import RecoveryEvent
from shardkeep.records.record import added, number, numbers
from shardkeep.records.telemetry import WorkerTelemetry
from shardkeep.records.training import Evaluation, Progress
from shardkeep.view.screen import metric_name

WAITING = ("pull_wait", "dense_reduce")
"""Parts of a step in which a worker waits for others."""


def last_start(records: RunRecords) -> Json:
    """What the summary says of the whole job: over all starts, where there were several."""
    summary = records.summary or {}
    return {**summary, **(summary.get("job") or {})} if summary else {}


def overview(records: RunRecords, state: str, config: Mapping[str, Any]) -> Json:
    """The figures of the head of the page."""
    summary, view = last_start(records), records.view
    progress, ended = view.progress, bool(summary)

    def last(key: str, of_summary: str = "") -> float | int | None:
        """A figure of the summary. A job that failed has none: then that of the last progress."""
        return (number(summary.get(of_summary or key)) if ended else None) or getattr(progress, key)

    evaluation = summary.get("eval") or ({} if view.evaluation is None else view.evaluation.others)
    spent = bytes_of(records)
    return {
        "state": state,
        "message": str(summary.get("message") or ""),
        "name": str(config.get("name") or records.reader.path.name),
        "step": last("step", "steps"),
        "total_steps": progress.total_steps,
        "epoch": progress.epoch,
        "samples": last("samples") or None,
        "samples_per_s": last("samples_per_s") or None,
        "steps_per_s": (Progress.of(summary).steps_per_s if ended else None) or progress.steps_per_s,
        "loss": progress.loss,
        "began": records.first,
        "wall_s": number(summary.get("wall_s")) if ended else None,
        "left_s": None if ended else view.left_s,
        "evaluation": scores(evaluation),
        "best_auc": number(evaluation.get("best_auc")),
        **{part: scores(summary.get(part) or {}) for part in ("best", "test")},
        "bytes": sum(d["bytes"] for d in spent["directions"] if d["name"] in DIRECTIONS) or None,
        "fp32_bytes": sum(d["fp32"] or 0 for d in spent["directions"]) or None,
        "loop": own_loop(config),
        "servers": config.get("servers"),
        "workers": config.get("workers"),
        "recoveries": len(recoveries(records)),
        "dropped_rows": last("dropped_rows") or 0,
        "skipped_steps": last("skipped_steps") or 0,
        "newest": records.newest or None,
    }


def own_loop(config: Mapping[str, Any]) -> bool:
    """Whether the training loop is the user's own: the config names no data."""
    data = config.get("data")
    return isinstance(data, Mapping) and not data.get("source")


def scores(metrics: Mapping[str, Any]) -> list[Json]:
    """Name and value of each metric of an evaluation, as a person reads them."""
    others = ("step", "samples", "weights", "train_samples", "index", "best_auc", "at", "seq", "epoch")
    found = [
        (name, number(value))
        for name, value in metrics.items()
        if name.partition("/")[0] not in others and not name.startswith("best_")
    ]
    return [{"key": name, "name": metric_name(name), "value": value} for name, value in found if value is not None]


def recoveries(records: RunRecords) -> Sequence[RecoveryEvent]:
    """Recoveries so far, each with the time of day at which training resumed."""
    ended = (records.summary or {}).get("recoveries") or ()
    return records.view.recoveries or [RecoveryEvent.of(found) for found in ended]


def curves(records: RunRecords) -> Json:
    """Training and evaluation as columns over time, step, samples and bytes."""
    points = _spent(records)
    training = [
        [at, step, samples, _whole(interpolate(where, points)), loss, rate, steps]
        for at, step, samples, loss, rate, steps in records.training.rows
        if (where := position(samples, step)) is not None
    ]
    names = list(dict.fromkeys(m["key"] for record in records.evaluations for m in scores(record.others)))
    evaluation = [
        [record.at, record.step, record.train_samples, _spent_at(record, points), *map(record.metrics.get, names)]
        for record in records.evaluations
    ]
    axes = ["time", "step", "samples", "bytes"]
    best = next((r.metrics["best_auc"] for r in reversed(records.evaluations) if "best_auc" in r.metrics), None)
    return {
        "training": {"columns": [*axes, "loss", "samples_per_s", "steps_per_s"], "rows": training},
        "evaluation": {"columns": [*axes, *names], "names": [metric_name(n) for n in names], "rows": evaluation},
        "best_auc": best,
    }


def _spent(records: RunRecords) -> list[tuple[float, float]]:
    """Position and bytes in growing order, from a job's start on."""
    told = [(at, spent) for at, spent in records.counts.spent.rows if at is not None and spent is not None]
    for record in records.evaluations:
        if "total" in record.train_bytes and record.train_samples is not None:
            told.append((record.train_samples, record.train_bytes["total"]))
    points = [(0.0, 0.0)]
    for samples, spent in sorted(told):
        if samples > points[-1][0]:
            points.append((samples, max(spent, points[-1][1])))
    return points if len(points) > 1 else []


def _spent_at(record: Evaluation, points: Sequence[tuple[float, float]]) -> int | None:
    told, at = record.train_bytes.get("total"), position(record.train_samples, record.step)
    return _whole(told if told is not None or at is None else interpolate(at, points))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def worker_steps(records: RunRecords) -> list[Json]:
    """Where a step goes, of each worker; the worker whose own work takes longest is the first.

    `usual`: the median of the others' own work. Of a job that runs, means over the last `STEPS_S` seconds."""
    found = {index: mean_step(seen) for index, seen in records.counts.steps.items()}
    ended = {
        int(p["index"]): numbers(p["step_ms"])
        for p in (records.summary or {}).get("processes") or ()
        if p.get("role") == "worker" and p.get("step_ms")
    }
    if not found and not ended and records.view.progress.step_ms:
        ended = {0: dict(records.view.progress.step_ms)}
    rows = list[Json]()
    for index in sorted({*found, *ended}):
        told, waited = found.get(index, ({}, {}))
        parts = dict(ended.get(index) or told)
        total = parts.pop("total", None) or sum(parts.values())
        own = total - sum(parts.get(name, 0.0) for name in WAITING)
        waits = {who: ms for who, ms in waited.items() if ms}
        rows.append({"index": index, "total": total, "own": own, "parts": parts, "waits": waits})
    for row in rows:
        others = [other["own"] for other in rows if other is not row]
        row["usual"] = median(others) if others else row["own"]
        row["ratio"] = row["own"] / row["usual"] if row["usual"] > 0 else 1.0
    return sorted(rows, key=lambda row: -row["own"])


def dense(records: RunRecords) -> Json:
    """The dense model of worker 0: its choices, the cost of compiling, and the rate of its matrix products."""
    told: Json = (records.summary or {}).get("tower") or {}
    now = next((record for record in records.counts.workers if record.index == 0), WorkerTelemetry())
    return {
        "choices": next((event.text for event in reversed(records.events) if event.phase == "tower"), None),
        "compile_s": number(told.get("compile_s")) or now.compile_s,
        "compile_bytes": now.compile_rss_bytes,
        "flops_per_s": number(told.get("flops_per_s")) or now.flops_per_s,
    }


def mean_step(seen: Iterable[WorkerTelemetry]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean times in ms of a step and of its waits over a worker's records, each weighted by its steps."""
    weights = [(record, record.steps or 1) for record in seen]
    steps = sum(weight for _, weight in weights)
    parts, waits = dict[str, float](), dict[str, float]()
    for record, weight in weights:
        for sums, told in ((parts, record.step_ms), (waits, record.wait_ms)):
            for name, value in told.items():
                sums[name] = sums.get(name, 0.0) + value * weight / steps
    return parts, waits


def tables(records: RunRecords) -> Json:
    """Rows, growth and bytes of each table, and how many ids of the workers were duplicates."""
    kinds = {table.name: table for event in records.events for table in event.tables}
    now: dict[str, Json] = {name: {"rows": rows} for name, rows in records.counts.table_rows.items()}
    for table in (table for record in records.counts.servers for table in record.tables):
        for key in ("bytes", "created", "removed", "refused", "candidates"):
            count = getattr(table, key)
            if count is not None or table.created is not None:  # 0 is left out
                now[table.name][key] = now[table.name].get(key, 0) + int(count or 0)
    for found in (records.summary or {}).get("tables") or ():
        now.setdefault(str(found["name"]), {}).update(
            {k: n for k, n in numbers(found).items() if k in ("rows", "bytes")}
        )
    rows: list[Json] = [
        {"name": name, "growth": None if records.summary else _growth(records, name), **figures,
         "dim": kinds[name].dim if name in kinds else None,
         "optimizer": kinds[name].optimizer if name in kinds else None}
        for name, figures in now.items()
    ]  # fmt: skip
    ids = sum(record.ids or 0 for record in records.counts.workers)
    unique = sum(record.unique_ids or 0 for record in records.counts.workers)
    ordered = sorted(rows, key=lambda row: -(row.get("bytes") or row.get("rows") or 0))
    return {"rows": ordered, "ids": ids or None, "unique_ids": unique or None}


def _growth(records: RunRecords, name: str) -> float | None:
    """New rows a minute, over the last minutes."""
    seen = records.counts.rows
    whole = [(at, rows[name]) for at, servers, rows in seen if name in rows and servers == seen[-1][1]]
    if len(whole) < 2 or whole[-1][0] <= whole[0][0]:
        return None
    return round(60 * (whole[-1][1] - whole[0][1]) / (whole[-1][0] - whole[0][0]), 1)


def bytes_of(records: RunRecords) -> Json:
    """Bytes by direction and part, beside fp32, of the whole job."""
    counted = last_start(records).get("bytes") or {}
    live = records.counts.bytes_by_part
    fp32 = live.pop("fp32", {})
    source = counted if counted.get("total") else live
    fp32 = (source.get("fp32") if source is counted else None) or fp32
    directions = list[Json]()
    for name, meaning in LEDGER_DIRECTIONS.items():
        parts = source.get(name) or {}
        parts = parts if isinstance(parts, Mapping) else {"": parts}
        rows: list[Json] = [
            {"name": part, "bytes": n, "meaning": PARTS.get(part, "")} for part, n in parts.items() if n
        ]
        total = sum(row["bytes"] for row in rows)
        if total:
            rows.sort(key=lambda row: -row["bytes"])
            parts_shown = rows if rows[0]["name"] else []
            directions.append(
                {"name": name, "meaning": meaning, "bytes": total, "parts": parts_shown, "fp32": fp32.get(name) or None}
            )
    samples = number(last_start(records).get("samples")) or records.view.progress.samples
    trained = sum(d["bytes"] for d in directions if d["name"] in DIRECTIONS)
    return {"directions": directions, "per_sample": trained / samples if samples and trained else None}


def staleness(records: RunRecords, config: Mapping[str, Any]) -> Json:
    """How old the rows of the steps were, in steps."""
    counts = functools.reduce(added, (record.staleness for record in records.counts.workers), dict[str, int]())
    found = (records.summary or {}).get("staleness") or counts or records.view.progress.staleness
    consistency = config.get("consistency") or {}
    ordered = sorted(found.items(), key=lambda item: int(item[0]))
    mode = str(consistency.get("mode") or "")
    bound = consistency.get("staleness") if mode == "bounded" else 0 if mode == "sync" else None
    return {"counts": [[int(steps), int(times)] for steps, times in ordered], "mode": mode, "bound": bound}
