"""Sections of the page that are figures of training: speed, curves, step times, tables, bytes, staleness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from shardkeep.compression.ledger import DIRECTIONS as LEDGER_DIRECTIONS
from shardkeep.compression.ledger import PARTS
from shardkeep.page.records import DIRECTIONS, Record, RunRecords, number, position, steps_per_s, table_rows
from shardkeep.page.series import interpolate
from shardkeep.run.screen import metric_name

WAITING = ("pull_wait", "dense_reduce")
"""Parts of a step in which a worker waits for others."""
RATE_S = 120.0
"""Seconds over which the time left is measured."""


def last_start(records: RunRecords) -> Record:
    """What the summary says of the whole job: over all starts, where there were several."""
    summary = records.summary or {}
    return {**summary, **(summary.get("job") or {})} if summary else {}


def overview(records: RunRecords, state: str, config: Mapping[str, Any]) -> Record:
    """The figures of the head of the page."""
    summary, progress = last_start(records), records.progress
    ended = bool(summary)

    def last(key: str, of_summary: str = "") -> float | int | None:
        """A figure of the summary. A job that failed has none: then that of the last progress."""
        return (number(summary.get(of_summary or key)) if ended else None) or number(progress.get(key))

    evaluation = summary.get("eval") or (records.evaluations[-1] if records.evaluations else {})
    spent = bytes_of(records)
    return {
        "state": state,
        "message": str(summary.get("message") or ""),
        "name": str(config.get("name") or records.reader.path.name),
        "step": last("step", "steps"),
        "total_steps": number(progress.get("total_steps")),
        "epoch": number(progress.get("epoch")),
        "samples": last("samples") or None,
        "samples_per_s": last("samples_per_s") or None,
        "steps_per_s": (steps_per_s(summary) if ended else None) or steps_per_s(progress),
        "loss": number(progress.get("loss")),
        "began": records.first,
        "wall_s": number(summary.get("wall_s")) if ended else None,
        "left_s": None if ended else time_left(records),
        "evaluation": scores(evaluation),
        "best_auc": number(evaluation.get("best_auc")),
        "test": scores(summary.get("test") or {}),
        "bytes": sum(d["bytes"] for d in spent["directions"] if d["name"] in DIRECTIONS) or None,
        "fp32_bytes": sum(d["fp32"] or 0 for d in spent["directions"]) or None,
        "loop": own_loop(config),
        "servers": config.get("servers"),
        "workers": config.get("workers"),
        "recoveries": len(recoveries(records)),
        "dropped_rows": number(summary.get("dropped_rows") if ended else progress.get("dropped_rows")) or 0,
        "skipped_steps": number(summary.get("skipped_steps") if ended else progress.get("skipped_steps")) or 0,
        "newest": records.newest or None,
    }


def own_loop(config: Mapping[str, Any]) -> bool:
    """Whether the training loop is the user's own: the config names no data."""
    data = config.get("data")
    return isinstance(data, Mapping) and not data.get("source")


def scores(metrics: Mapping[str, Any]) -> list[Record]:
    """Name and value of each metric of an evaluation, as a person reads them."""
    others = ("step", "samples", "weights", "train_samples", "index", "best_auc", "at", "seq", "epoch")
    found = [(name, number(value)) for name, value in metrics.items() if name not in others]
    return [{"key": name, "name": metric_name(name), "value": value} for name, value in found if value is not None]


def time_left(records: RunRecords) -> float | None:
    """Seconds to the last step at the rate of the last minutes; None = not known."""
    total, rows = number(records.progress.get("total_steps")), records.training.rows
    if not total or len(rows) < 2:
        return None
    end, step = rows[-1][0] or 0.0, rows[-1][1] or 0
    at, begin = next((r[0] or 0.0, r[1] or 0) for r in rows if (r[0] or 0.0) >= end - RATE_S or r is rows[-2])
    return (total - step) * (end - at) / (step - begin) if step > begin else None


def recoveries(records: RunRecords) -> list[Record]:
    """Recoveries so far, each with the time of day at which training resumed."""
    told = [event for event in records.events if event.get("phase") == "recovery"]
    return told or list((records.summary or {}).get("recoveries") or ())


def curves(records: RunRecords) -> Record:
    """Training and evaluation as columns over time, step, samples and bytes."""
    points = _spent(records)
    training = [
        [at, step, samples, _whole(interpolate(where, points)), loss, rate, steps]
        for at, step, samples, loss, rate, steps in records.training.rows
        if (where := position(samples, step)) is not None
    ]
    names = list(dict.fromkeys(m["key"] for record in records.evaluations for m in scores(record)))
    evaluation = [
        [
            record["at"],
            number(record.get("step")),
            (samples := number(record.get("train_samples"))),
            _spent_at(record, position(samples, record.get("step")), points),
            *(number(record.get(name)) for name in names),
        ]
        for record in records.evaluations
    ]
    axes = ["time", "step", "samples", "bytes"]
    best = next((b for r in reversed(records.evaluations) if (b := number(r.get("best_auc"))) is not None), None)
    return {
        "training": {"columns": [*axes, "loss", "samples_per_s", "steps_per_s"], "rows": training},
        "evaluation": {"columns": [*axes, *names], "names": [metric_name(n) for n in names], "rows": evaluation},
        "best_auc": best,
    }


def _spent(records: RunRecords) -> list[tuple[float, float]]:
    """Position and bytes in growing order, from a job's start on."""
    told = [(at, spent) for at, spent in records.spent.rows if at is not None and spent is not None]
    for record in records.evaluations:
        spent, samples = number((record.get("train_bytes") or {}).get("total")), number(record.get("train_samples"))
        if spent is not None and samples is not None:
            told.append((samples, spent))
    points = [(0.0, 0.0)]
    for samples, spent in sorted(told):
        if samples > points[-1][0]:
            points.append((samples, max(spent, points[-1][1])))
    return points if len(points) > 1 else []


def _spent_at(record: Record, at: float | None, points: Sequence[tuple[float, float]]) -> int | None:
    told = number((record.get("train_bytes") or {}).get("total"))
    return _whole(told if told is not None or at is None else interpolate(at, points))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def worker_steps(records: RunRecords) -> list[Record]:
    """Where a step goes, of each worker; the worker whose own work takes longest is the first.

    `usual`: the median of the others' own work. Of a job that runs, means over the last `STEPS_S` seconds."""
    found = {index: mean_step(seen) for index, seen in records.steps_seen.items()}
    ended = {
        int(p["index"]): p
        for p in (records.summary or {}).get("processes") or ()
        if p.get("role") == "worker" and p.get("step_ms")
    }
    single = records.progress.get("step_ms")
    if not found and not ended and single:
        ended = {0: records.progress}
    rows = list[Record]()
    for index in sorted({*found, *ended}):
        record = ended.get(index) or found[index]
        parts = {name: ms for name, value in record["step_ms"].items() if (ms := number(value)) is not None}
        total = parts.pop("total", None) or sum(parts.values())
        own = total - sum(parts.get(name, 0.0) for name in WAITING)
        waits = {who: ms for who, ms in found.get(index, {}).get("wait_ms", {}).items() if ms}
        rows.append({"index": index, "total": total, "own": own, "parts": parts, "waits": waits})
    for row in rows:
        others = [other["own"] for other in rows if other is not row]
        row["usual"] = median(others) if others else row["own"]
        row["ratio"] = row["own"] / row["usual"] if row["usual"] > 0 else 1.0
    return sorted(rows, key=lambda row: -row["own"])


def mean_step(seen: Iterable[Record]) -> Record:
    """Mean times in ms over a worker's records, each weighted by its steps."""
    weights = [(record, number(record.get("steps")) or 1) for record in seen]
    steps = sum(weight for _, weight in weights)
    means: dict[str, dict[str, float]] = {"step_ms": {}, "wait_ms": {}}
    for kind, sums in means.items():
        for record, weight in weights:
            for name, value in (record.get(kind) or {}).items():
                sums[str(name)] = sums.get(str(name), 0.0) + (number(value) or 0.0) * weight / steps
    return dict(means)


def tables(records: RunRecords) -> Record:
    """Rows, growth and bytes of each table, and how many ids of the workers were duplicates."""
    kinds: dict[str, Record] = {}
    for event in records.events:
        for table in event.get("tables") or ():
            kinds[str(table.get("name"))] = table
    now: dict[str, Record] = {name: {"rows": rows} for name, rows in table_rows(records).items()}
    for _, record in records.role("server"):
        for table in record.get("tables") or ():
            for key in ("bytes", "created", "removed", "refused", "candidates"):
                if (count := number(table.get(key, 0 if "created" in table else None))) is not None:  # 0 is left out
                    now[str(table.get("name"))][key] = now[str(table.get("name"))].get(key, 0) + int(count)
    for table in (records.summary or {}).get("tables") or ():
        name = str(table["name"])
        now[name] = {
            **now.get(name, {}),
            **{k: n for k in ("rows", "bytes") if (n := number(table.get(k))) is not None},
        }
    rows: list[Record] = [
        {"name": name, "growth": None if records.summary else _growth(records, name), **figures,
         "dim": kinds.get(name, {}).get("dim"), "optimizer": kinds.get(name, {}).get("optimizer")}
        for name, figures in now.items()
    ]  # fmt: skip
    ids = sum(int(number(record.get("ids")) or 0) for _, record in records.role("worker"))
    unique = sum(int(number(record.get("unique_ids")) or 0) for _, record in records.role("worker"))
    ordered = sorted(rows, key=lambda row: -(row.get("bytes") or row.get("rows") or 0))
    return {"rows": ordered, "ids": ids or None, "unique_ids": unique or None}


def _growth(records: RunRecords, name: str) -> float | None:
    """New rows a minute, over the last minutes."""
    seen = records.rows_seen
    whole = [(at, rows[name]) for at, servers, rows in seen if name in rows and servers == seen[-1][1]]
    if len(whole) < 2 or whole[-1][0] <= whole[0][0]:
        return None
    return round(60 * (whole[-1][1] - whole[0][1]) / (whole[-1][0] - whole[0][0]), 1)


def bytes_of(records: RunRecords) -> Record:
    """Bytes by direction and part, beside fp32, of the whole job."""
    counted = last_start(records).get("bytes") or {}
    live = records.bytes_by_part
    fp32 = live.pop("fp32", {})
    source = counted if counted.get("total") else live
    fp32 = (source.get("fp32") if source is counted else None) or fp32
    directions = list[Record]()
    for name, meaning in LEDGER_DIRECTIONS.items():
        parts = source.get(name) or {}
        parts = parts if isinstance(parts, Mapping) else {"": parts}
        rows: list[Record] = [
            {"name": part, "bytes": n, "meaning": PARTS.get(part, "")} for part, n in parts.items() if n
        ]
        total = sum(row["bytes"] for row in rows)
        if total:
            rows.sort(key=lambda row: -row["bytes"])
            parts_shown = rows if rows[0]["name"] else []
            directions.append(
                {"name": name, "meaning": meaning, "bytes": total, "parts": parts_shown, "fp32": fp32.get(name) or None}
            )
    samples = number(last_start(records).get("samples") or records.progress.get("samples"))
    trained = sum(d["bytes"] for d in directions if d["name"] in DIRECTIONS)
    return {"directions": directions, "per_sample": trained / samples if samples and trained else None}


def staleness(records: RunRecords, config: Mapping[str, Any]) -> Record:
    """How old the rows of the steps were, in steps."""
    counts: dict[str, int] = {}
    for _, record in records.role("worker"):
        for steps, times in (record.get("staleness") or {}).items():
            counts[steps] = counts.get(steps, 0) + int(times)
    found = (records.summary or {}).get("staleness") or counts or records.progress.get("staleness") or {}
    consistency = config.get("consistency") or {}
    ordered = sorted(found.items(), key=lambda item: int(item[0]))
    mode = str(consistency.get("mode") or "")
    bound = consistency.get("staleness") if mode == "bounded" else 0 if mode == "sync" else None
    return {"counts": [[int(steps), int(times)] for steps, times in ordered], "mode": mode, "bound": bound}
