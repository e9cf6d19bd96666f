"""Warnings: what is wrong with a job, in words. One function per warning; each returns a list, which may be empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pvariance
from typing import Any, Literal

from shardkeep.page.records import Record, RunRecords, number
from shardkeep.page.sections import own_loop, recoveries, worker_steps

NO_STEP_S = 60.0
SILENT_S = 15.0
SILENT_RECORDS = 4
"""A process is silent after so many intervals without a record, and after `SILENT_S`."""
WAIT_SHARE = 0.2
DATA_SHARE = 0.2
SLOW_RATIO = 1.4
"""A worker is slow if its own work takes so many times the median of all workers."""
CHECKPOINT_S, CHECKPOINT_PERIODS = 600.0, 2.0
"""A checkpoint is old after so many seconds, and so many of its periods."""
UNKNOWN_PERIOD_S = 1800.0
STUCK_STEPS = 500
RISE, NOISE = 0.05, 4
"""A loss rises if it grows by this share of its lowest mean, and by so many times what it differs between records."""
AUC_DROP = 0.002
MEMORY_SHARE = 0.9
SPEED_SHARE = 0.6
RESTART_S = 600.0
RECOVERIES_PER_HOUR = 3
MOST_NAMED = 3

Level = Literal["bad", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Warning:
    """`text`: what is seen, with numbers. `advice`: what it means or what to do."""

    level: Level
    text: str
    advice: str = ""
    about: str = ""
    """The section of the page with the figures."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a warning may look at. `now`: seconds since 1970; of an ended job, the time of its last record."""

    records: RunRecords
    state: str
    now: float
    config: Mapping[str, Any]
    checkpoints: Sequence[Record] = ()

    @property
    def loop(self) -> bool:
        """Whether the training loop is the user's own."""
        return own_loop(self.config)

    @property
    def running(self) -> bool:
        """Whether the job has processes."""
        return self.state in ("starting", "training", "recovering", "stopping", "forming")


Check = Callable[[Sight], list[Warning]]


def failed(sight: Sight) -> list[Warning]:
    """The job ended without completing."""
    message = str((sight.records.summary or {}).get("message") or "")
    if sight.state in ("failed", "killed"):
        return [Warning("bad", f"the job {sight.state}: {message}" if message else f"the job {sight.state}",
                        "The log of the process that ended first says why.", "members")]  # fmt: skip
    if sight.state == "gone":
        advice = (
            "Start the loop again."
            if sight.loop
            else f"Resume it: shardkeep train --resume {sight.records.reader.path}"
        )
        return [Warning("bad", "no process of the job is left, and it wrote no summary", advice, "members")]
    return []


def recovering(sight: Sight) -> list[Warning]:
    """The job has no group at the moment."""
    if sight.state != "recovering":
        return []
    why = next((str(e["text"]) for e in reversed(sight.records.events) if "lost" in e or "lost_pid" in e), "")
    text = f"the job recovers: {why}" if why else "the job recovers from a lost process"
    return [Warning("warn", text, "Training resumes when all members are back.", "members")]


def no_step(sight: Sight) -> list[Warning]:
    """No progress for a minute while the job trains."""
    last = max((row[0] or 0.0 for row in sight.records.training.rows[-1:]), default=0.0)
    for _, record in sight.records.role("worker"):
        if number(record.get("steps")):
            last = max(last, record["at"])
    if not sight.running or not last or sight.now - last <= NO_STEP_S:
        return []
    return [Warning("bad", f"no step for {span(sight.now - last)}",
                    "Look at the log of the worker or server that reported last.", "members")]  # fmt: skip


def silent(sight: Sight) -> list[Warning]:
    """A process that has sent no record for several intervals."""
    if not sight.running:
        return []
    quiet = [
        (sight.now - record["at"], f"{role} {index}")
        for (role, index), record in sorted(sight.records.telemetry.items())
        if sight.now - record["at"] > max(SILENT_S, SILENT_RECORDS * (number(record.get("every_s")) or 5.0))
    ]
    if not quiet:
        return []
    age = max(quiet)[0]
    names = several([name for _, name in quiet], "process", "processes")
    return [Warning("warn", f"{names} sent nothing for {span(age)}", "It hangs, or its machine is overloaded.",
                    "members")]  # fmt: skip


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
        f"worker {row['index']} is slower than the others: its own work takes {row['own']:.1f} ms a step, "
        f"the median of the others is {row['usual']:.1f} ms; longest part: {part[0].replace('_', ' ')}{more}"
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


def old_checkpoint(sight: Sight) -> list[Warning]:
    """A newest checkpoint that is older than twice its period."""
    if not sight.running or not sight.checkpoints:
        return []
    times = sorted(row["at"] for row in sight.checkpoints)
    period = min((b - a for a, b in pairwise(times)), default=UNKNOWN_PERIOD_S / CHECKPOINT_PERIODS)
    age = sight.now - times[-1]
    if age <= max(CHECKPOINT_S, CHECKPOINT_PERIODS * period):
        return []
    where = "the calls of client.checkpoint" if sight.loop else "checkpoint.every_steps"
    return [Warning("warn", f"the newest checkpoint is {span(age)} old",
                    f"Work since then is lost if all processes die. Check the disk and {where}.",
                    "checkpoints")]  # fmt: skip


def not_finite(sight: Sight) -> list[Warning]:
    """A loss that is no number, or gradients and steps that were dropped."""
    losses, progress = sight.records.losses, last_progress(sight)
    told = []
    if losses and losses[-1][1] is None:
        told.append(f"the loss is not finite at step {losses[-1][0]:,}")
    if dropped := number(progress.get("dropped_rows")):
        told.append(f"{dropped:,} rows of gradients were dropped because they were not finite")
    if skipped := number(progress.get("skipped_steps")):
        told.append(f"{skipped:,} steps were skipped because their gradients were not finite")
    if not told:
        return []
    remedy = "clip gradients" if sight.loop else "set train.clip_norm"
    return [Warning("bad", "; ".join(told),
                    f"The learning rate is too high, or the data hold extreme values. Lower lr, or {remedy}.",
                    "convergence")]  # fmt: skip


def last_progress(sight: Sight) -> Mapping[str, Any]:
    """The newest counts of dropped rows and skipped steps."""
    counts = {
        key: max([number(r.get(key)) or 0 for _, r in sight.records.role("worker")], default=0)
        for key in ("dropped_rows", "skipped_steps")
    }
    return {key: max(count, number(sight.records.progress.get(key)) or 0) for key, count in counts.items()}


def rising_loss(sight: Sight) -> list[Warning]:
    """A loss that grows by more than its noise."""
    points = [(step, loss) for step, loss in sight.records.losses if loss is not None]
    if len(points) < 8:
        return []
    low_at = min(range(len(points) - 3), key=lambda at: fmean(loss for _, loss in points[at : at + 3]))
    before, after = [loss for _, loss in points[low_at : low_at + 3]], [loss for _, loss in points[-3:]]
    rise = fmean(after) - fmean(before)
    noise = median(abs(a - b) for (_, a), (_, b) in pairwise(points))
    if low_at + 3 > len(points) - 3 or rise <= max(RISE * abs(fmean(before)), NOISE * noise):
        return []
    text = f"the loss rises: {fmean(before):.4f} at step {points[low_at][0]:,}, {fmean(after):.4f} now"
    return [Warning("bad", text, "The learning rate is probably too high.", "convergence")]


def worse_than_guessing(sight: Sight) -> list[Warning]:
    """A binary cross-entropy above that of the constant prediction 0.5."""
    losses = [loss for _, loss in list(sight.records.losses)[-3:] if loss is not None]
    loss_name = ((sight.config.get("train") or {}).get("loss") or {}).get("name")
    step = sight.records.losses[-1][0] if sight.records.losses else 0
    if sight.loop or loss_name != "bce" or not losses or step < 100 or fmean(losses) <= math.log(2) * 1.02:
        return []
    text = f"after {step:,} steps the loss is {fmean(losses):.3f}; a constant prediction of 0.5 has 0.693"
    return [Warning("bad", text, "The learning rate is probably too high, or labels and features do not match.",
                    "convergence")]  # fmt: skip


def stuck_loss(sight: Sight) -> list[Warning]:
    """A loss that has not moved by more than its noise for 500 steps or more."""
    points = [(step, loss) for step, loss in sight.records.losses if loss is not None]
    if sight.state not in ("training", "recovering") or not points:
        return []
    length, still = STUCK_STEPS, 0
    while (part := [p for p in points if p[0] > points[-1][0] - length]) and points[0][0] <= points[-1][0] - length:
        half = len(part) // 2
        if half < 3 or _moved([loss for _, loss in part[:half]], [loss for _, loss in part[half:]]):
            break
        still, length = length, length * 2
    if not still:
        return []
    return [Warning("note", f"the loss has not moved for {still:,} steps",
                    "Normal near the end of training. Early: raise or decay the learning rate, or check the labels.",
                    "convergence")]  # fmt: skip


def _moved(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by more than twice their standard error, and by 0.1 %."""
    error = math.sqrt(pvariance(one) / len(one) + pvariance(other) / len(other))
    return abs(fmean(one) - fmean(other)) > max(2 * error, 1e-3 * abs(fmean(one)))


def falling_auc(sight: Sight) -> list[Warning]:
    """An AUC below the best one of two evaluations or more ago."""
    aucs = [(r.get("step"), auc) for r in sight.records.evaluations if (auc := number(r.get("auc"))) is not None]
    if len(aucs) < 3:
        return []
    best = max(range(len(aucs)), key=lambda at: aucs[at][1])
    if best > len(aucs) - 3 or aucs[best][1] - aucs[-1][1] < AUC_DROP:
        return []
    text = f"AUC falls: {aucs[best][1]:.4f} at step {aucs[best][0]:,}, {aucs[-1][1]:.4f} at step {aucs[-1][0]:,}"
    remedy = "Stop earlier." if sight.loop else "Set train.early_stopping."
    return [Warning("warn", text, f"The model overfits, or the learning rate is too high. {remedy}", "convergence")]


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


def restarts(sight: Sight) -> list[Warning]:
    """Processes that died and were replaced."""
    found = recoveries(sight.records)
    if not found:
        return []
    last = found[-1]
    at = number(last.get("at")) or sight.now
    told = f"{one(len(found), 'recovery', 'recoveries')}; the last: {last.get('text') or last.get('cause')}"
    of_hour = sum((number(record.get("at")) or 0) > sight.now - 3600 for record in found)
    if sight.running and of_hour > RECOVERIES_PER_HOUR:
        return [Warning("bad", f"{of_hour} recoveries within an hour; the last: {last.get('text')}",
                        "The logs of the processes that died say why.", "members")]  # fmt: skip
    level: Level = "warn" if sight.running and sight.now - at < RESTART_S else "note"
    died = last.get("died") or ()
    who = several([f"{d.get('role')} {d.get('index')}" for d in died], "process", "processes") if died else ""
    when = f" {span(sight.now - at)} ago" if sight.running else ""
    if who:
        told = f"{who} died and was restarted{when}; {one(len(found), 'recovery', 'recoveries')} so far"
    return [Warning(level, told, "Training continued without a command. Its log says why it died.", "members")]


def memory(sight: Sight) -> list[Warning]:
    """Processes near the limit of their memory."""
    near = []
    for (role, index), record in sorted(sight.records.telemetry.items()):
        used, limit = number(record.get("rss_bytes")), number(record.get("limit_bytes"))
        if used and limit and used > MEMORY_SHARE * limit:
            near.append((used / limit, f"{role} {index}"))
    if not near or not sight.running:
        return []
    names = several([name for _, name in near], "process", "processes")
    text = f"{names} uses {100 * max(near)[0]:.0f} % of its memory limit"
    return [Warning("bad", text, "Add servers, evict rows, or store rows in fewer bits.", "members")]


def told(sight: Sight) -> list[Warning]:
    """Warnings of the job itself."""
    texts = [
        str(e["text"]).removeprefix("warning: ")
        for e in sight.records.events
        if str(e.get("text", "")).startswith("warning:")
    ]
    return [Warning("note", text, "The job said so itself.") for text in list(dict.fromkeys(texts))[-3:]]


CHECKS: tuple[Check, ...] = (
    failed, recovering, no_step, not_finite, rising_loss, worse_than_guessing, slow_worker, waits, waits_for_samples,
    slower, memory, silent, restarts, old_checkpoint, falling_auc, stuck_loss, told,
)  # fmt: skip
_ORDER: dict[Level, int] = {"bad": 0, "warn": 1, "note": 2}


def warnings_of(sight: Sight) -> list[Warning]:
    """All warnings, the worst first."""
    return sorted((found for check in CHECKS for found in check(sight)), key=lambda found: _ORDER[found.level])


def span(seconds: float) -> str:
    """`41 minutes`, of a number of seconds."""
    seconds = max(0.0, seconds)  # clocks of machines differ
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} seconds"


def one(count: int, noun: str, plural: str) -> str:
    """`1 recovery`, `2 recoveries`."""
    return f"{count} {noun if count == 1 else plural}"


def several(names: Sequence[str], noun: str, plural: str) -> str:
    """The names, or their number where there are many."""
    return ", ".join(names) if len(names) <= MOST_NAMED else one(len(names), noun, plural)
