"""Warnings of where a step's time goes. As src/shardkeep/page/warnings/processes.py."""

from __future__ import annotations

from statistics import median

from shardkeep.page.sections import worker_steps
from shardkeep.page.warnings.warning import Sight, Warning

WAIT_SHARE = 0.2
DATA_SHARE = 0.2
SLOW_RATIO = 1.4
"""A worker is slow if its own work takes so many times the median of all workers."""
SPEED_SHARE = 0.6
DENSE_SHARE = 0.6
"""A dense model is large if its products, sums and updates take this share of a step."""
DENSE_PARTS = ("forward", "backward", "dense_reduce", "optimizer")
CORE_SHARE, CORE_WAIT_S = 0.5, 60.0
"""Threads of a worker wait for cores if they do so for this share of a step, in a run of at least so many seconds."""


def waits(sight: Sight) -> list[Warning]:
    """Workers that wait for the rows of a server."""
    found = []
    for row in worker_steps(sight.records):
        share = (row["parts"].get("pull_wait") or 0.0) / row["total"] if row["total"] else 0.0
        if share >= WAIT_SHARE:
            found.append((share, row))
    if not found:
        return []
    share, row = max(found, key=lambda item: item[0])
    slowest = max(row["waits"].items(), key=lambda item: item[1], default=("the servers", 0.0))[0]
    if len(found) == 1 or len({max(r["waits"], key=r["waits"].__getitem__, default="") for _, r in found}) > 1:
        text = f"worker {row['index']} waits {share:.0%} of its step for {slowest}".replace("%", " %")
        others = f"; {len(found) - 1} more wait, too" if len(found) > 1 else ""
    else:
        text = f"{len(found)} workers wait up to {share:.0%} of their step for {slowest}".replace("%", " %")
        others = ""
    advice = "Add a server, allow staleness, or compress pulls and pushes."
    if sight.loop:
        advice = "Request rows ahead (client.ahead, prefetch), add a server, allow staleness, or compress."
    return [Warning("warn", text + others, advice, "steps")]


def slow_worker(sight: Sight) -> list[Warning]:
    """A worker whose own work takes much longer than that of the others."""
    rows = worker_steps(sight.records)
    slow = [row for row in rows if len(rows) > 1 and row["ratio"] > SLOW_RATIO]
    if not slow:
        return []
    row = slow[0]
    part = max(row["parts"].items(), key=lambda item: item[1] if item[0] not in ("pull_wait", "dense_reduce") else 0)
    more = f"; {len(slow) - 1} more are slow" if len(slow) > 1 else ""
    text = (
        f"worker {row['index']} is slower than the others: its own work takes {row['own']:,.1f} ms a step, "
        f"the median of the others is {row['usual']:,.1f} ms; longest part: {part[0].replace('_', ' ')}{more}"
    )
    return [Warning("warn", text, "All workers wait for the slowest one. Look for other load on its machine.", "steps")]


def waits_for_samples(sight: Sight) -> list[Warning]:
    """Workers that wait for their data."""
    shares = [
        ((row["parts"].get("data") or 0.0) / row["total"], row["index"])
        for row in worker_steps(sight.records)
        if row["total"]
    ]
    share, index = max(shares, default=(0.0, 0))
    if share < DATA_SHARE:
        return []
    advice = "check the disk, or " + ("read in more processes." if sight.loop else "convert the data once.")
    return [Warning("warn", f"worker {index} waits {100 * share:.0f} % of its step for samples",
                    f"Reading data is the bottleneck: {advice}", "steps")]  # fmt: skip


def large_tower(sight: Sight) -> list[Warning]:
    """A dense model that takes most of a step and has more parameters than the tables have rows."""
    rows = worker_steps(sight.records)
    total, dense = (
        sum(row["total"] for row in rows),
        sum(row["parts"].get(p, 0.0) for row in rows for p in DENSE_PARTS),
    )
    summary = sight.records.summary or {}
    parameters = (summary.get("tower") or {}).get("parameters") or 0
    held = sum(int(table.get("rows") or 0) for table in summary.get("tables") or ())
    if dense < DENSE_SHARE * total or not total or parameters <= held:
        return []
    text = (f"products, sums and updates of the dense model take {100 * dense / total:.0f} % of a step: "
            f"{parameters:,} parameters beside {held:,} rows")  # fmt: skip
    return [Warning("note", text, "A smaller model.hidden trains faster, and fewer workers have less to sum; compare "
                    "the AUC.", "steps")]  # fmt: skip


def waits_for_cores(sight: Sight) -> list[Warning]:
    """Threads of workers that are ready to run and have no core, as the summary says."""
    summary = sight.records.summary or {}
    waited, total = (summary.get("cpu_ms") or {}).get("waited"), (summary.get("step_ms") or {}).get("total")
    if not waited or not total or waited < CORE_SHARE * total or (summary.get("wall_s") or 0.0) < CORE_WAIT_S:
        return []
    text = f"the threads of a worker wait {waited:,.1f} ms for a core in a step of {total:,.1f} ms"
    alone = [sight.config.get(key) for key in ("servers", "workers", "threads")] == [0, 1, 1]
    advice = "Other programs take its cores." if alone else "Set fewer threads or workers, or end other programs."
    return [Warning("warn", f"{text}: more threads run than there are cores", advice, "steps")]


def slower(sight: Sight) -> list[Warning]:
    """A speed far below the usual one of this job."""
    rows = sight.records.training.rows
    counted, unit = ([row[at] for row in rows] for at in (4, 5)), "samples"
    rates, steps = ([rate for rate in found if rate] for found in counted)
    if not rates:
        rates, unit = steps, "steps"
    if sight.state != "training" or len(rates) < 9:
        return []
    usual, now = median(rates[1:-3]), median(rates[-3:])
    if now >= SPEED_SHARE * usual:
        return []
    return [Warning("warn", f"the speed fell from {usual:,.0f} to {now:,.0f} {unit}/s",
                    "Where a step goes shows which part grew.", "steps")]  # fmt: skip
